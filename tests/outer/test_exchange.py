import math
import resource

import numpy as np
import pytest
import torch
from outer_world import anchor_payload, chunk_size, contribution_payload

from ray_diloco.errors import SyncError
from ray_diloco.outer.adopt import Adopt
from ray_diloco.outer.codec import Bf16, Fp32
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, layout_of
from ray_diloco.outer.payload import Meta, open_payload

LAYOUT = layout_of([("w", (2, 3)), ("b", (4,))])
WHOLE = LAYOUT.whole
META = Meta("contribution", {0: 0}, "i0")
TENSORS = (Range(0, 6), Range(6, 10))


@pytest.fixture(autouse=True)
def small_chunks():
    with chunk_size(4):
        yield


class Rank:
    """An exchange over two tensors that this object owns."""

    def __init__(self, emits=WHOLE, held=TENSORS):
        self.theta = torch.full((10,), -1.0)
        self.exchange = Exchange(LAYOUT, [Slice(r, self.theta[r.start : r.stop]) for r in held], emits)

    def adopt(self, values, ranges=WHOLE, only=None, version=0):
        return self.exchange.adopt([anchor_payload(values, ranges, {0: version})], only)

    def emitted(self, ranges=WHOLE, codec=None, meta=META):
        emission = self.exchange.emit(ranges, codec or Fp32(), meta)
        payload = open_payload(emission.payload)
        return payload.read(0, payload.numel, torch.empty(10)).tolist()


def test_what_is_emitted_is_start_minus_end():
    rank = Rank()
    rank.adopt(np.arange(10.0))
    rank.theta += torch.tensor([1.0, 0, 0, 0, 0, -2, 0, 0, 0, 0.5])
    assert rank.emitted() == [-1, 0, 0, 0, 0, 2, 0, 0, 0, -0.5]
    emission = rank.exchange.emit(WHOLE, Fp32(), META)
    assert emission.squared_norm == 1 + 4 + 0.25
    assert emission.finite
    assert open_payload(emission.payload).header.meta == META


def test_ranges_are_emitted_in_canonical_order_across_tensors_and_chunks():
    rank = Rank()
    rank.adopt(np.zeros(10))
    rank.theta.copy_(-torch.arange(10.0))
    assert rank.emitted((Range(1, 3), Range(5, 9))) == [1, 2, 5, 6, 7, 8]
    assert rank.emitted((Range(9, 10),)) == [9]
    assert rank.emitted(()) == []


def test_base_anchor_and_parameters_never_share_memory():
    rank, sent = Rank(), anchor_payload(np.arange(10.0), WHOLE)
    rank.exchange.adopt([sent])
    for _ in range(3):
        rank.theta -= 1.0
        assert sent.tobytes() == anchor_payload(np.arange(10.0), WHOLE).tobytes()
        assert rank.theta.tolist() == [k - 1.0 for k in range(10)]
        assert rank.emitted() == [1.0] * 10
        rank.exchange.adopt([sent])
        assert rank.theta.tolist() == list(range(10))
        assert rank.emitted() == [0.0] * 10


def test_a_lossy_codec_reports_the_norm_before_rounding():
    rank = Rank()
    rank.adopt(np.zeros(10))
    rank.theta.fill_(-(1 + 2**-12))
    emission = rank.exchange.emit(WHOLE, Bf16(), META)
    assert emission.squared_norm == pytest.approx(10 * (1 + 2**-12) ** 2, abs=1e-5)
    assert rank.emitted(codec=Bf16()) == [1.0] * 10


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_is_reported_and_still_sent(value):
    rank = Rank()
    rank.adopt(np.zeros(10))
    rank.theta[7] = value
    assert not rank.exchange.emit(WHOLE, Fp32(), META).finite
    assert rank.exchange.emit((Range(0, 7),), Fp32(), META).finite


def test_parameters_are_read_as_they_are():
    rank = Rank(emits=(Range(0, 2),))
    rank.theta.copy_(torch.arange(10.0))
    payload = open_payload(rank.exchange.read((Range(1, 8),), Meta("parameters")))
    assert payload.header.meta.purpose == "parameters"
    assert payload.read(0, 4, torch.empty(4)).tolist() == [1, 2, 3, 4]
    assert payload.read(4, 7, torch.empty(4)).tolist() == [5, 6, 7]


def test_a_rank_writes_all_that_it_holds_and_measures_from_what_it_emits():
    rank = Rank(emits=(Range(4, 8),))
    rank.adopt(np.arange(10.0))
    assert rank.theta.tolist() == list(range(10))
    rank.theta.zero_()
    assert rank.emitted((Range(4, 8),)) == [4, 5, 6, 7]
    with pytest.raises(SyncError, match=r"RD-442: elements \[8, 9\) \(1 in all\) are held but not emitted"):
        rank.emitted((Range(5, 9),))


def test_a_rank_takes_from_a_payload_what_it_holds():
    rank = Rank(emits=(Range(7, 9),), held=(Range(2, 4), Range(7, 9)))
    rank.adopt(np.arange(10.0))
    assert rank.theta.tolist() == [-1, -1, 2, 3, -1, -1, -1, 7, 8, -1]
    rank.theta.zero_()
    assert rank.emitted((Range(7, 9),)) == [7, 8]


def test_a_rank_reads_only_the_chunks_of_a_payload_that_it_needs():
    rank = Rank(emits=(), held=(Range(0, 3),))
    damaged = anchor_payload(np.arange(10.0), WHOLE).copy()
    damaged[-1] ^= 1
    rank.exchange.adopt([damaged])
    assert rank.theta[:3].tolist() == [0, 1, 2]


def test_a_fragment_is_adopted_alone_from_several_shards():
    rank = Rank()
    rank.adopt(np.arange(10.0))
    fragment = (Range(1, 3), Range(5, 8))
    shards = [anchor_payload([30, 31, 32], (Range(5, 8),), {1: 4}), anchor_payload([10, 20], (Range(1, 3),), {1: 4})]
    assert rank.exchange.adopt(shards, fragment) == {1: 4}
    assert rank.theta.tolist() == [0, 10, 20, 3, 4, 30, 31, 32, 8, 9]
    assert rank.exchange.versions == {0: 0, 1: 4}
    rank.theta.zero_()
    assert rank.emitted() == [0, 10, 20, 3, 4, 30, 31, 32, 8, 9]


def test_elements_of_a_payload_outside_the_wanted_ranges_stay():
    rank = Rank()
    rank.adopt(np.zeros(10))
    rank.adopt(np.full(10, 5.0), only=(Range(2, 5),))
    assert rank.theta.tolist() == [0, 0, 5, 5, 5, 0, 0, 0, 0, 0]


def test_nothing_is_emitted_without_a_base():
    rank = Rank()
    with pytest.raises(SyncError, match=r"RD-442: elements \[0, 10\) \(10 in all\) have no base to measure from"):
        rank.emitted()
    rank.adopt(np.zeros(6), (Range(0, 6),), only=(Range(0, 6),))
    rank.emitted((Range(0, 6),))
    with pytest.raises(SyncError, match=r"RD-442: elements \[6, 10\) \(4 in all\) have no base"):
        rank.emitted()


@pytest.mark.parametrize(
    ("arrays", "number"),
    [
        ([], 406),
        ([anchor_payload(np.ones(9), (Range(0, 9),))], 406),
        ([anchor_payload(np.ones(10), WHOLE), anchor_payload(np.ones(1), (Range(3, 4),))], 406),
        ([anchor_payload(np.ones(10), WHOLE)[:-1]], 401),
        ([contribution_payload(np.ones(10), WHOLE)], 412),
        ([anchor_payload(np.ones(5), (Range(k, k + 5),), {0: k}) for k in (0, 5)], 412),
    ],
)
def test_payloads_that_do_not_fit_are_refused_before_anything_is_written(arrays, number):
    rank = Rank()
    rank.adopt(np.arange(10.0))
    with pytest.raises(SyncError) as caught:
        rank.exchange.adopt(arrays)
    assert caught.value.number == number
    assert rank.theta.tolist() == list(range(10))
    assert rank.emitted() == [0.0] * 10


def test_a_body_that_is_damaged_leaves_no_base_until_an_adoption_succeeds():
    rank = Rank()
    rank.adopt(np.zeros(10))
    damaged = anchor_payload(np.ones(10), WHOLE).copy()
    damaged[-5] ^= 1
    with pytest.raises(SyncError, match="RD-405: anchor payload: chunk 2 of the body is damaged"):
        rank.exchange.adopt([damaged])
    assert rank.theta.tolist() == [1.0] * 8 + [0.0] * 2
    with pytest.raises(SyncError, match="RD-442"):
        rank.emitted()
    rank.adopt(np.ones(10))
    assert rank.theta.tolist() == [1.0] * 10
    assert rank.emitted() == [0.0] * 10


def half_way(chunk):
    chunk.theta.add_(chunk.anchor).mul_(0.5)
    chunk.base.copy_(chunk.anchor)


def test_a_rule_that_reads_parameters_is_one_function_and_all_is_checked_before_it_writes():
    rank, rule = Rank(), Adopt(half_way, reads_theta=True)
    rank.adopt(np.zeros(10))
    rank.theta.copy_(torch.arange(10.0))
    damaged = anchor_payload(np.full(10, 4.0), WHOLE).copy()
    damaged[-1] ^= 1
    with pytest.raises(SyncError, match="RD-405"):
        rank.exchange.adopt([damaged], rule=rule)
    assert rank.theta.tolist() == list(range(10))
    rank.exchange.adopt([anchor_payload(np.full(10, 4.0), WHOLE)], rule=rule)
    assert rank.theta.tolist() == [2 + k / 2 for k in range(10)]
    assert rank.emitted() == [2 - k / 2 for k in range(10)]


def test_parameters_that_require_gradients_are_read_and_written_in_place():
    parameter = torch.nn.Parameter(torch.ones(10))
    with torch.no_grad():
        exchange = Exchange(LAYOUT, [Slice(Range(0, 10), parameter.view(-1))], WHOLE)
    exchange.adopt([anchor_payload(np.arange(10.0), WHOLE)])
    assert parameter.tolist() == list(range(10))
    (parameter.sum() * 2).backward()
    assert parameter.grad.tolist() == [2.0] * 10
    assert exchange.emit(WHOLE, Fp32(), META).squared_norm == 0


def test_payload_memory_is_used_again():
    rank = Rank()
    rank.adopt(np.zeros(10))
    first = rank.exchange.emit(WHOLE, Fp32(), META).payload
    second = rank.exchange.emit(WHOLE, Fp32(), Meta("contribution", {0: 10}, "i0", 3)).payload
    assert first.ctypes.data == second.ctypes.data
    assert not second.flags.writeable
    longer = Meta("contribution", dict.fromkeys(range(40), 0), "i0")
    assert open_payload(rank.exchange.emit(WHOLE, Fp32(), longer).payload).header.meta == longer


def test_no_temporary_of_the_size_of_the_model_is_allocated():
    # Above 32 MiB, malloc takes new pages from the system each time; each costs a fault.
    numel = 9_000_000
    with chunk_size(131072):
        layout = layout_of([("w", (numel,))])
        exchange = Exchange(layout, [Slice(Range(0, numel), torch.zeros(numel))], layout.whole)
        sent = anchor_payload(torch.ones(numel), layout.whole)
        exchange.adopt([sent])
        exchange.emit(layout.whole, Fp32(), META)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        exchange.emit(layout.whole, Fp32(), META)
        exchange.adopt([sent])
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4 * numel / resource.getpagesize() / 4


@pytest.mark.parametrize(
    ("held", "emits", "word"),
    [
        ([(0, 6, torch.zeros(5))], (), "is torch.float32"),
        ([(0, 6, torch.zeros(6).double())], (), "is torch.float64"),
        ([(0, 6, torch.zeros(2, 3))], (), "is torch.float32"),
        ([(0, 6, torch.zeros(12)[::2])], (), "not flat contiguous fp32"),
        ([(8, 11, torch.zeros(3))], (), "leaves the 10 elements of the layout"),
        ([(0, 6, torch.zeros(6)), (5, 7, torch.zeros(2))], (), "overlap"),
        ([(0, 6, torch.zeros(6))], (Range(4, 8),), r"elements \[6, 8\) \(2 in all\) shall be emitted but are not held"),
    ],
)
def test_slices_that_are_no_flat_memory_of_the_layout_are_refused(held, emits, word):
    slices = [Slice(Range(start, stop), values) for start, stop, values in held]
    with pytest.raises(SyncError, match=f"RD-441: .*{word}"):
        Exchange(LAYOUT, slices, emits)


def test_a_rank_that_holds_nothing_takes_part():
    exchange = Exchange(LAYOUT, [Slice(Range(4, 4), torch.empty(0))], ())
    assert exchange.adopt([anchor_payload(np.ones(10), WHOLE)]) == {0: 0}
    assert open_payload(exchange.emit((), Fp32(), META).payload).numel == 0
