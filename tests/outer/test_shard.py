"""What a shard computes and keeps: rounds by hand and against a direct loop, views, fragments, checkpoints."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import (
    LAYOUT,
    WHOLE,
    chunk_size,
    contribution_payload,
    elements,
    flat,
    founded,
    nesterov,
    offer,
    parameters_payload,
    shards_of,
    state_digest,
    worlds,
)

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Bf16, Fp32
from ray_diloco.outer.layout import Range, intersect, layout_of, shard_ranges, total
from ray_diloco.outer.optimizer import Nesterov, Sgd
from ray_diloco.outer.payload import open_payload
from ray_diloco.outer.shard import AnchorShard, Contribution

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_two_rounds_by_hand():
    shard = founded(LAYOUT, Nesterov(0.5, 0.5), np.zeros(8))
    # Δ = (8·1 + 0·3)/4 = 2; u = 2; A = −½ (2 + ½·2) = −1.5.
    _, payload = shard.prepare("r1", 0, [offer("i0", [8.0] * 8, 1), offer("i1", [0.0] * 8, 3)])
    shard.commit("r1")
    assert elements(payload).tolist() == [-1.5] * 8
    assert flat(shard.state_tensors("momentum")).tolist() == [2.0] * 8
    # Δ = 4; u = ½·2 + 4 = 5; A = −1.5 − ½ (4 + ½·5) = −4.75.
    prepared, payload = shard.prepare("r2", 0, [offer("i0", [4.0] * 8, version=1)])
    shard.commit("r2")
    assert elements(payload).tolist() == flat(shard.tensors()).tolist() == [-4.75] * 8
    assert flat(shard.state_tensors("momentum")).tolist() == [5.0] * 8
    assert prepared.squared_delta_norm == 8 * 16
    assert prepared.squared_update_norm == 8 * 3.25**2
    assert prepared.squared_anchor_norm == 8 * 4.75**2
    assert (prepared.key, prepared.fragment, prepared.version) == ("r2", 0, 2)
    assert prepared.bytes_out == payload.nbytes
    assert prepared.digest == open_payload(payload).digest
    assert open_payload(payload).header.meta.versions == {0: 2}
    assert shard.versions == {0: 2}


def numpy_round(anchor, momentum, deltas, weights, lr, mu):
    """One outer round in float64, for values whose arithmetic is exact there and in fp32."""
    shares = np.float64(weights) / np.sum(weights)
    delta = sum(share * d for share, d in zip(shares, deltas, strict=True))
    momentum = mu * momentum + delta
    return anchor - lr * (delta + mu * momentum), momentum


@settings(deadline=None, max_examples=60)
@given(worlds(), st.integers(0, 2**31), st.sampled_from([Fp32(), Bf16()]), st.sampled_from([Fp32(), Bf16()]))
def test_any_islands_fragments_and_shards_give_what_a_direct_loop_gives(world, seed, up, down):
    layout, islands, fragments, count = world
    rng = np.random.default_rng(seed)
    weights = {1: [3], 2: [1, 3], 3: [1, 2, 1]}[len(islands)]
    # Whole numbers below 128 times powers of two: exact in bf16, and so is every sum and product of this test in fp32.
    anchor, momentum = rng.integers(-4, 5, layout.numel).astype(np.float64), np.zeros(layout.numel)
    shards = shards_of(layout, count, fragments, Nesterov(0.5, 0.5), down)
    islands[0].write(torch.from_numpy(anchor.astype(np.float32)))
    for shard in shards:
        shard.found(islands[0].read(shard.ranges))
    for island in islands:
        island.adopt([shard.payload(p) for shard in shards for p in range(len(fragments))])
    for version in range(2):
        starts = [island.theta().astype(np.float64) for island in islands]
        deltas = [rng.integers(-3, 4, layout.numel) / 4.0 for _ in islands]
        for island, start, delta in zip(islands, starts, deltas, strict=True):
            island.write(torch.from_numpy((start - delta).astype(np.float32)))
        expected, momentum = numpy_round(anchor, momentum, deltas, weights, 0.5, 0.5)
        updates = []
        for shard in shards:
            for p, fragment in enumerate(fragments):
                kept = intersect(fragment, shard.ranges)
                offers = [i.contribute(kept, p, version, w, up) for i, w in zip(islands, weights, strict=True)]
                updates.append(shard.prepare(f"r{version}", p, offers[::-1])[1])
            shard.commit(f"r{version}")
        for island in islands:
            island.adopt(updates)
        got = {name: array for shard in shards for name, array in shard.tensors().items()}
        kept_momentum = {name: array for shard in shards for name, array in shard.state_tensors("momentum").items()}
        for spec in layout.tensors:
            r = spec.range
            np.testing.assert_array_equal(got[spec.name].reshape(-1), expected[r.start : r.stop])
            np.testing.assert_array_equal(kept_momentum[spec.name].reshape(-1), momentum[r.start : r.stop])
        rounded = torch.from_numpy(expected).to(torch.bfloat16 if down.name == "bf16" else torch.float32).float()
        for island in islands:
            np.testing.assert_array_equal(island.theta(), rounded.numpy())
        anchor = expected


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 9))
def test_the_bits_are_those_of_torch_sgd_on_the_sum_in_island_order(seed, numel, rounds):
    layout = layout_of([("w", (numel,))])
    rng = np.random.default_rng(seed)
    draw = lambda: rng.standard_normal(numel).astype(np.float32)  # noqa: E731
    start, raw = draw(), {"i0": 3.0, "i1": 5.0, "i2": 11.0}
    shard = founded(layout, Nesterov(0.7, 0.9), start)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for version in range(rounds):
        deltas = {island: draw() for island in raw}
        merged = torch.zeros(numel)
        for island, delta in deltas.items():
            factor = float(np.float32(raw[island] / 19.0))
            merged = (
                torch.mul(torch.from_numpy(delta), factor)
                if island == "i0"
                else merged.add_(torch.from_numpy(delta), alpha=factor)
            )
        parameter.grad = merged
        sgd.step()
        offers = [offer(i, deltas[i], raw[i], version, layout.whole) for i in ("i2", "i0", "i1")]
        _, payload = shard.prepare(f"r{version}", 0, offers)
        shard.commit(f"r{version}")
        assert elements(payload).tobytes() == parameter.detach().numpy().tobytes()


@pytest.mark.parametrize("count", [2, 4])
def test_equal_contributions_give_the_bits_of_one(count):
    values = np.random.default_rng(1).standard_normal(8)
    one, many = nesterov(), nesterov()
    alone = one.prepare("r", 0, [offer("i0", values)])[1]
    together = many.prepare("r", 0, [offer(f"i{k}", values, 7.0) for k in range(count)])[1]
    assert alone.tobytes() == together.tobytes()


def test_the_order_of_arrival_changes_no_byte():
    rng = np.random.default_rng(2)
    offers = [offer(f"i{k}", rng.standard_normal(8), float(k + 1)) for k in range(4)]
    first = nesterov().prepare("r", 0, offers)[1].tobytes()
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        assert nesterov().prepare("r", 0, [offers[k] for k in order])[1].tobytes() == first


def test_a_contribution_of_weight_zero_is_not_even_looked_at():
    nan = Contribution("i1", 0.0, 99, (np.zeros(3, np.uint8),))
    alone = nesterov().prepare("r", 0, [offer("i0", np.ones(8), 5.0)])[1]
    assert nesterov().prepare("r", 0, [offer("i0", np.ones(8), 5.0), nan])[1].tobytes() == alone.tobytes()


def test_a_round_without_weight_is_an_error():
    with pytest.raises(SyncError, match="RD-413"):
        nesterov().prepare("r", 0, [offer("i0", np.ones(8), 0.0)])
    with pytest.raises(SyncError, match="RD-413"):
        nesterov().prepare("r", 0, [])


def test_an_outer_step_to_infinity_is_refused():
    shard = founded(LAYOUT, Sgd(1e30), np.zeros(8))
    with pytest.raises(SyncError, match="RD-417: the outer step of fragment 0 gives"):
        shard.prepare("r", 0, [offer("i0", np.full(8, 1e12))])
    assert shard.versions == {0: 0}


def test_tensors_in_one_fragment_are_views_and_cut_ones_are_put_together():
    values = np.arange(8.0, dtype=np.float32)
    whole = founded(LAYOUT, Nesterov(0.5, 0.5), values)
    cut = founded(LAYOUT, Nesterov(0.5, 0.5), values, [(Range(0, 2), Range(6, 8)), (Range(2, 6),)])
    assert whole.tensors()["w"].base is not None
    for shard in (whole, cut):
        assert shard.names == ("w", "b")
        assert shard.tensors()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert shard.tensors()["b"].tolist() == [6, 7]
    one, other = (Range(0, 2), Range(6, 8)), (Range(2, 6),)
    cut.prepare("r1", 0, [offer("i0", np.full(4, 4.0), ranges=one)])
    cut.commit("r1")
    assert cut.versions == {0: 1, 1: 0}
    # u = Δ = 4 where fragment 0 is, and A moves by −½ (4 + ½·4) = −3.
    assert cut.state_tensors("momentum")["w"].tolist() == [[4, 4, 0], [0, 0, 0]]
    assert cut.tensors()["w"].tolist() == [[-3, -2, 2], [3, 4, 5]]
    assert elements(cut.payload(1)).tolist() == [2, 3, 4, 5]
    assert open_payload(cut.payload(1)).header.ranges == other


def test_fragments_move_one_by_one_and_a_key_may_move_several():
    fragments = [(Range(0, 6),), (Range(6, 8),)]
    shard = founded(LAYOUT, Sgd(1.0), np.zeros(8), fragments)
    shard.prepare("a", 0, [offer("i0", np.ones(6), ranges=fragments[0])])
    shard.prepare("b", 1, [offer("i0", np.ones(2), ranges=fragments[1], fragment=1)])
    shard.abort("a")
    shard.commit("b")
    assert shard.versions == {0: 0, 1: 1}
    shard.prepare("c", 0, [offer("i0", np.ones(6), ranges=fragments[0])])
    shard.prepare("c", 1, [offer("i0", np.ones(2), version=1, ranges=fragments[1], fragment=1)])
    shard.commit("c")
    assert shard.versions == {0: 1, 1: 2}
    assert flat(shard.tensors()).tolist() == [-1] * 6 + [-2] * 2


def test_a_loaded_shard_goes_on_as_the_saved_one():
    saved, loaded = nesterov(), AnchorShard(LAYOUT, WHOLE, [WHOLE], Nesterov(0.5, 0.5))
    rng = np.random.default_rng(3)
    for version in range(2):
        saved.prepare(f"r{version}", 0, [offer("i0", rng.standard_normal(8), version=version)])
        saved.commit(f"r{version}")
    anchor = {name: torch.from_numpy(array.copy()) for name, array in saved.tensors().items()}
    loaded.load(anchor, {"momentum": saved.state_tensors("momentum")}, saved.versions)
    assert state_digest(loaded) == state_digest(saved)
    assert loaded.payload(0).tobytes() == saved.payload(0).tobytes()
    last = [offer("i0", rng.standard_normal(8), version=2)]
    assert loaded.prepare("r2", 0, last)[1].tobytes() == saved.prepare("r2", 0, last)[1].tobytes()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a, s, v: a.pop("b"), "tensor b is missing"),
        (lambda a, s, v: a.update(b=torch.zeros(3)), r"tensor b is torch.float32 \(3,\), not fp32 \(2,\)"),
        (lambda a, s, v: a.update(b=torch.zeros(2).double()), "tensor b is torch.float64"),
        (lambda a, s, v: s.clear(), r"outer state \[\] instead of \['momentum'\]"),
        (lambda a, s, v: s["momentum"].pop("w"), "tensor w is missing"),
        (lambda a, s, v: v.clear(), r"no version of fragments \[0\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, word):
    anchor = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    state = {"momentum": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}}
    versions = {0: 5}
    change(anchor, state, versions)
    shard = AnchorShard(LAYOUT, WHOLE, [WHOLE], Nesterov(0.5, 0.5))
    with pytest.raises(SyncError, match=f"RD-424: {word}"):
        shard.load(anchor, state, versions)
    with pytest.raises(SyncError, match="RD-422"):
        shard.payload(0)


def test_a_checkpoint_with_an_infinite_tensor_is_refused():
    shard = AnchorShard(LAYOUT, WHOLE, [WHOLE], Sgd(1.0))
    with pytest.raises(SyncError, match="RD-417: the anchor of fragment 0 has squared norm inf"):
        shard.load({"w": torch.full((2, 3), float("inf")), "b": torch.zeros(2)}, {}, {0: 1})


def test_a_run_is_founded_once_with_every_element_once():
    empty = AnchorShard(LAYOUT, WHOLE, [WHOLE], Sgd(1.0))
    half = parameters_payload(np.ones(4), (Range(0, 4),))
    for arrays, number in [
        ([], 406),
        ([half], 406),
        ([half, half], 406),
        ([parameters_payload(np.ones(9), (Range(0, 9),))], 406),
        ([contribution_payload(np.ones(8), WHOLE)], 412),
        ([parameters_payload(np.ones(8), WHOLE, Bf16())], 412),
        ([parameters_payload(np.full(8, np.nan), WHOLE)], 417),
    ]:
        with pytest.raises(SyncError) as caught:
            empty.found(arrays)
        assert caught.value.number == number
        with pytest.raises(SyncError, match="RD-422: this shard has no anchor yet"):
            empty.prepare("r", 0, [offer("i0", np.ones(8))])
    empty.found([parameters_payload(np.ones(4), (Range(4, 8),)), half])
    assert elements(empty.payload(0)).tolist() == [1.0] * 8
    with pytest.raises(SyncError, match="RD-422: this shard has an anchor already"):
        empty.found([half, parameters_payload(np.ones(4), (Range(4, 8),))])


@pytest.mark.parametrize(
    ("ranges", "fragments"),
    [
        ((Range(0, 5),), [WHOLE]),
        ((Range(0, 9),), [(Range(0, 9),)]),
        (WHOLE, [(Range(0, 4),)]),
        (WHOLE, [WHOLE, (Range(7, 8),)]),
    ],
)
def test_shards_keep_whole_tensors_and_fragments_partition_them(ranges, fragments):
    with pytest.raises(SyncError, match="RD-421"):
        AnchorShard(LAYOUT, ranges, fragments, Sgd(1.0))


def test_unknown_fragments_and_states_are_refused():
    with pytest.raises(SyncError, match="RD-421: there is no fragment 1 of 1"):
        nesterov().payload(1)
    with pytest.raises(SyncError, match="RD-424: outer state 'velocity' is not one of"):
        nesterov().state_tensors("velocity")


def test_a_shard_without_elements_takes_part_in_rounds():
    ranges = shard_ranges(LAYOUT, 3)[2]
    assert total(ranges) == 0
    shard = AnchorShard(LAYOUT, ranges, [WHOLE], Nesterov(0.5, 0.5))
    shard.found([])
    prepared, payload = shard.prepare("r", 0, [Contribution("i0", 1.0, 0, ())])
    shard.commit("r")
    assert (prepared.squared_anchor_norm, elements(payload).size, shard.tensors()) == (0.0, 0, {})
    assert shard.versions == {0: 1}


def test_a_lossy_downlink_rounds_what_is_sent_and_not_the_anchor():
    start = np.float32([1 + 2**-12] * 8)
    shard = founded(LAYOUT, Sgd(1.0), start, codec_down=Bf16())
    assert flat(shard.tensors()).tolist() == start.tolist()
    assert elements(shard.payload(0)).tolist() == [1.0] * 8
    _, payload = shard.prepare("r", 0, [offer("i0", [0.5] * 8, codec=Bf16())])
    shard.commit("r")
    assert flat(shard.tensors()).tolist() == [0.5 + 2**-12] * 8
    assert elements(payload).tolist() == [0.5] * 8


def test_a_round_may_have_its_own_learning_rate():
    shard = founded(LAYOUT, Sgd(1.0), np.zeros(8))
    shard.prepare("r", 0, [offer("i0", np.ones(8))], lr=0.25)
    shard.commit("r")
    assert flat(shard.tensors()).tolist() == [-0.25] * 8


def test_sixteen_bytes_a_parameter_with_nesterov():
    with chunk_size(131072):
        layout = layout_of([("w", (1_000_000,))])
        shard = AnchorShard(layout, layout.whole, [layout.whole], Nesterov(0.7, 0.9))
        (part,) = shard._fragments
        sides = (part.live, part.spare)
        nbytes = sum(side.writer._memory.nbytes + sum(s.nbytes for s in side.state) for side in sides)
        assert all(side.anchor.data_ptr() == side.writer.elements.data_ptr() for side in sides)
        assert nbytes <= 16.01 * layout.numel
