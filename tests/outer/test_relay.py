"""One contribution for a region."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outer_world import LAYOUT, WHOLE, chunk_size, contribution_payload, elements, founded, offer

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Bf16, Fp32
from ray_diloco.outer.contribution import BadContribution, Contribution
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.layout import Range
from ray_diloco.outer.optimizer import Nesterov
from ray_diloco.outer.payload import Meta, Writer, open_payload
from ray_diloco.outer.relay import Relay

pytestmark = pytest.mark.usefixtures("small_chunks")


def relay(codec=None, region="eu", fragment=0, ranges=WHOLE):
    return Relay(region, fragment, ranges, codec or Fp32())


def sent(contribution):
    assert len(contribution.payloads) == 1
    return elements(contribution.payloads[0])


def test_a_region_offers_the_weighted_mean_with_the_weight_of_its_islands():
    found = relay().merge([offer("i1", 4 * np.ones(8), 3.0), offer("i0", np.arange(8.0), 1.0)], 0)
    assert sent(found).tolist() == [(k + 12) / 4 for k in range(8)]
    assert (found.island, found.weight, found.base_version) == ("eu", 4.0, 0)
    meta = open_payload(found.payloads[0]).header.meta
    assert (meta.purpose, meta.island, dict(meta.versions)) == ("contribution", "eu", {0: 0})


@hypothesis_settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 9)), min_size=1, max_size=7),
    st.integers(0, 10_000),
    st.integers(1, 9),
)
def test_the_mean_of_regions_is_the_mean_over_all_islands(islands, seed, chunk):
    values = np.random.default_rng(seed).normal(size=(len(islands), 8)).astype(np.float32)
    with chunk_size(chunk):
        offers = [(region, offer(f"i{k}", values[k], weight)) for k, (region, weight) in enumerate(islands)]
        regions = [
            relay(region=f"r{n}").merge([one for region, one in offers if region == n], 0)
            for n in sorted({region for region, _ in islands})
        ]
        whole = relay(region="all").merge(regions, 0)
        found = sent(whole)
    weights = np.array([weight for _, weight in islands])
    np.testing.assert_allclose(found, weights @ values / weights.sum(), atol=1e-5)
    assert whole.weight == pytest.approx(weights.sum(), rel=1e-12)


def test_an_anchor_takes_the_contribution_of_a_region_as_that_of_an_island():
    shard = founded(LAYOUT, Nesterov(1.0, 0.0), np.zeros(8))
    regions = [
        relay(region="eu").merge([offer("i0", np.ones(8)), offer("i1", 3 * np.ones(8))], 0),
        relay(region="us").merge([offer("i2", 5 * np.ones(8))], 0),
    ]
    shard.prepare("r", 0, regions)
    shard.commit("r")
    assert np.concatenate([t.reshape(-1) for t in shard.tensors().values()]).tolist() == [-3.0] * 8


def test_the_order_of_arrival_changes_no_bit():
    values = np.random.default_rng(0).normal(size=(5, 8))
    offers = [offer(f"i{k}", values[k], 0.1 + k) for k in range(5)]
    one, two = relay().merge(offers, 0).payloads[0].copy(), relay().merge(offers[::-1], 0).payloads[0]
    assert one.tobytes() == two.tobytes()


def test_an_island_alone_is_passed_on_bit_for_bit():
    values = np.random.default_rng(1).normal(size=8).astype(np.float32)
    found = relay().merge([offer("i0", values, 0.3), offer("i1", np.ones(8), 0.0)], 0)
    assert sent(found).tolist() == values.tolist() and found.weight == 0.3


def test_a_region_travels_in_the_codec_of_the_way_up():
    found = relay(Bf16()).merge([offer("i0", np.full(8, 1 / 3), codec=Bf16()), offer("i1", np.full(8, 1.0))], 0)
    third = torch.tensor(1 / 3).bfloat16().float()
    assert sent(found).tolist() == [float(((third + 1) / 2).bfloat16())] * 8
    assert open_payload(found.payloads[0]).header.codec == "bf16"


def test_islands_may_send_in_a_codec_of_whole_tensors():
    codec, meta = Dct(4, 64), Meta("contribution", {0: 0}, "i0")
    writer = Writer(codec, WHOLE, meta, shapes=((2, 3), (2,)))
    values = torch.arange(8.0)
    for at, shape, target, _ in writer.tensors():
        codec.encode(values[at : at + math.prod(shape)], shape, target)
    found = relay().merge([Contribution("i0", 1.0, 0, (writer.seal(meta),)), offer("i1", np.ones(8))], 0)
    np.testing.assert_allclose(sent(found), (values.numpy() + 1) / 2, atol=1e-6)


def test_ranks_that_cut_a_fragment_elsewhere_meet():
    values = np.arange(8.0)
    halves = [(Range(0, 3),), (Range(3, 8),)]
    cut = Contribution(
        "i0", 1.0, 2, tuple(contribution_payload(values[r.start : r.stop], (r,), "i0", 2) for (r,) in halves)
    )
    found = relay().merge([cut, offer("i1", values, version=2)], 2)
    assert sent(found).tolist() == values.tolist() and found.base_version == 2


def test_a_relay_is_used_round_after_round():
    meeting = relay()
    for version in range(12):
        found = meeting.merge([offer("i0", np.full(8, version), version=version)], version, incarnation=10**version)
        assert sent(found).tolist() == [version] * 8
        assert open_payload(found.payloads[0]).header.meta.incarnation == 10**version


@pytest.mark.parametrize(
    ("values", "settings", "number"),
    [
        ([np.nan] * 8, {}, 411),
        ([3e38] * 8, {}, 411),
        (np.ones(8), {"version": 1}, 412),
        (np.ones(8), {"weight": -1.0}, 414),
        (np.ones(7), {"ranges": (Range(0, 7),)}, 406),
    ],
)
def test_an_island_that_cannot_be_used_is_named(values, settings, number):
    with pytest.raises(BadContribution) as caught:
        relay().merge([offer("i0", np.ones(8)), offer("i1", values, **settings)], 0)
    assert (caught.value.number, caught.value.island) == (number, "i1")


def test_a_region_in_which_nobody_trained_offers_nothing():
    with pytest.raises(SyncError) as caught:
        relay().merge([offer("i0", np.ones(8), 0.0)], 0)
    assert caught.value.number == 413
