"""Contributions in codes of whole tensors: decoded, merged over senders in the domain of the transform, refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import chunk_size, founded, offer, parameters_payload, partitions

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.contribution import check_offers
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.layout import Range, intersect, layout_of, shard_ranges
from ray_diloco.outer.low_rank import LowRank
from ray_diloco.outer.optimizer import EmaNesterov, HeavyBall, Nesterov, Sgd
from ray_diloco.outer.payload import Meta, Writer, open_payload
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.relay import Relay
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shard import AnchorShard, BadContribution, Contribution
from ray_diloco.outer.sources import Decoded, Message, picked, source_of, transform_of
from ray_diloco.outer.stale import DirectionSettings

LAYOUT = layout_of([("w", (4, 6)), ("b", (5,)), ("v", (3, 7)), ("s", ())])
WHOLE, N = LAYOUT.whole, LAYOUT.numel


@pytest.fixture(autouse=True)
def short_chunks():
    with chunk_size(8):
        yield


def drawn(seed, numel=N):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def shapes_of(ranges):
    """Shape of each tensor in a set, or the number of its elements if it is cut."""
    cut = [(t, r) for t in LAYOUT.tensors for r in intersect(ranges, (t.range,))]
    return tuple(t.shape if r.numel == t.numel else (r.numel,) for t, r in sorted(cut, key=lambda c: c[1]))


def coded(values, codec, island="i0", ranges=WHOLE, version=0, shapes=None):
    """A contribution in codes of whole tensors, made without `Exchange`; `values` are of the whole layout."""
    meta = Meta("contribution", {0: version}, island)
    shapes = shapes_of(ranges) if shapes is None else shapes
    writer = Writer(codec, ranges, meta, shapes=shapes)
    packed = torch.from_numpy(np.concatenate([values[r.start : r.stop] for r in ranges] or [np.empty(0)])).float()
    for at, shape, data, nonce in writer.tensors():
        codec.encode(packed[at : at + math.prod(shape)].clone(), shape, data, nonce=nonce)
    return writer.seal(meta)


def coded_offer(values, codec, island="i0", parts=(WHOLE,), version=0):
    payloads = tuple(coded(values, codec, island, part, version) for part in parts)
    return Contribution(island, 1.0, version, payloads)


def merged(offers, recipe=None, **settings):
    """How far an anchor goes under SGD of rate 1."""
    shard = founded(LAYOUT, recipe or Recipe(Sgd(1.0)), np.zeros(N))
    shard.prepare("r", 0, offers, **settings)
    shard.commit("r")
    return -np.concatenate([t.reshape(-1) for t in shard.tensors().values()]).astype(np.float64)


def cosines(n):
    k, i = np.arange(n)[:, None], np.arange(n)[None]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    rows[0] = np.sqrt(1 / n)
    return rows


def kept_coefficients(values, shape, block, k):
    """Per tile the cosine coefficients that are sent: [tiles, high, wide], and the places of the tiles."""
    m, n = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    high, wide = (max(d for d in range(1, block + 1) if side % d == 0) for side in (m, n))
    matrix = values.reshape(m, n).astype(np.float64)
    places = [(slice(a, a + high), slice(b, b + wide)) for a in range(0, m, high) for b in range(0, n, wide)]
    tiles = np.array([cosines(high) @ matrix[p] @ cosines(wide).T for p in places])
    rest = np.argsort(-np.abs(tiles).reshape(len(places), -1), axis=1)[:, k:]
    np.put_along_axis(tiles.reshape(len(places), -1), rest, 0, axis=1)
    return tiles, places


def demo(rows, block, k):
    """The mean over those who sent each coefficient, transformed back."""
    out = np.zeros(N)
    for t in LAYOUT.tensors:
        part = slice(t.offset, t.offset + t.numel)
        found = [kept_coefficients(row[part], t.shape, block, k) for row in rows]
        tiles = np.array([tiles for tiles, _ in found])
        mean = tiles.sum(0) / np.maximum((tiles != 0).sum(0), 1)
        m = math.prod(t.shape[:-1]) if t.shape else 1
        matrix = np.zeros((m, t.numel // m))
        for tile, place in zip(mean, found[0][1], strict=True):
            matrix[place] = cosines(tile.shape[0]).T @ tile @ cosines(tile.shape[1])
        out[part] = matrix.reshape(-1)
    return out


@pytest.mark.parametrize(("block", "k"), [(4, 3), (64, 2), (2, 1), (8, 64)])
def test_coefficients_are_averaged_over_those_who_sent_them(block, k):
    rows = [drawn(seed) for seed in range(3)]
    offers = [coded_offer(row, Dct(block, k), f"i{j}") for j, row in enumerate(rows)]
    expected = demo(rows, block, k)
    np.testing.assert_allclose(merged(offers, Recipe(Sgd(1.0), "mean_over_senders")), expected, atol=1e-5)
    # The mean over all is another one, unless all sent everything.
    assert np.allclose(merged(offers), expected, atol=1e-5) == (k == 64)


def test_islands_may_keep_different_numbers_of_coefficients():
    rows = [drawn(0), drawn(1)]
    offers = [coded_offer(rows[0], Dct(4, 2), "i0"), coded_offer(rows[1], Dct(4, 16), "i1")]
    got = merged(offers, Recipe(Sgd(1.0), "mean_over_senders"))
    assert np.isfinite(got).all()
    whole = merged([coded_offer(r, Dct(4, 16), f"i{k}") for k, r in enumerate(rows)])
    assert np.abs(got - whole).max() > 0.01


@settings(deadline=None, max_examples=40)
@given(
    partitions(N, 3),
    st.integers(1, 4),
    st.sampled_from(["mean", "mean_over_senders", "median"]),
    st.sampled_from([Dct(4, 100), LowRank(7)]),
    st.sampled_from([1, 8, 1024]),
)
def test_tensors_that_are_sent_whole_are_found_wherever_they_lie(parts, count, merge, codec, chunk):
    with chunk_size(chunk):
        rows = [drawn(k) for k in range(3)]
        tensors = {}
        for kept in shard_ranges(LAYOUT, count):
            shard = AnchorShard(LAYOUT, kept, [WHOLE], Recipe(Sgd(1.0), merge))
            shard.found([parameters_payload(np.zeros(sum(r.numel for r in kept)), kept)])
            cut = [intersect(kept, part) for part in parts]
            shard.prepare("r", 0, [coded_offer(row, codec, f"i{k}", cut) for k, row in enumerate(rows)])
            shard.commit("r")
            tensors |= shard.tensors()
        went = -np.concatenate([tensors[t.name].reshape(-1) for t in LAYOUT.tensors])
        expected = np.median(rows, axis=0) if merge == "median" else np.mean(rows, axis=0)
        np.testing.assert_allclose(went, expected, atol=2e-5)


def test_factors_over_senders_are_counted_in_elements_where_there_is_no_transform():
    rows = [drawn(0), drawn(1)]
    rows[1][:24] = 0
    offers = [coded_offer(row, LowRank(4), f"i{k}") for k, row in enumerate(rows)]
    expected = np.concatenate([rows[0][:24], np.mean(rows, axis=0)[24:]])
    np.testing.assert_allclose(merged(offers, Recipe(Sgd(1.0), "mean_over_senders")), expected, atol=1e-5)


def test_late_coefficients_are_measured_anew_in_elements():
    recipe = Recipe(Sgd(1.0), "mean_over_senders", max_age=1, reanchor=True)
    shard = founded(LAYOUT, recipe, np.zeros(N))
    codec = Dct(8, 100)
    shard.prepare("a", 0, [coded_offer(drawn(0), codec)])
    shard.commit("a")
    # i1 stands at −drawn(1), and has measured from zeros.
    shard.prepare("b", 0, [coded_offer(drawn(1), codec, "i1", version=0)])
    shard.commit("b")
    got = np.concatenate([t.reshape(-1) for t in shard.tensors().values()])
    np.testing.assert_allclose(got, -drawn(1), atol=1e-5)


def test_coefficients_and_neighbours_go_together():
    shard = founded(LAYOUT, Recipe(HeavyBall(0.5, 0.0), "mean_over_senders", consensus=0.5), np.zeros(N))
    other = founded(LAYOUT, Sgd(1.0), np.ones(N))
    around = [[shard.payload(0).copy()], [other.payload(0).copy()]]
    shard.prepare("r", 0, [coded_offer(np.zeros(N, np.float32), Dct(8, 100))], neighbours=around)
    shard.commit("r")
    got = np.concatenate([t.reshape(-1) for t in shard.tensors().values()])
    np.testing.assert_allclose(got, np.full(N, 0.25), atol=1e-6)


def test_coefficients_are_turned_by_direction_in_elements():
    recipe = Recipe(EmaNesterov(1.0, 0.5), "mean_over_senders", direction=DirectionSettings(c_ok=-1.0))
    plain = Recipe(EmaNesterov(1.0, 0.5))
    offers = [coded_offer(drawn(k), Dct(8, 100), f"i{k}") for k in range(2)]
    np.testing.assert_allclose(merged(offers, recipe), merged(offers, plain), atol=1e-5)


def mixed(island):
    """Elements from one rank, whole tensors from another."""
    one, other = (Range(0, 24),), (Range(24, N),)
    dense = offer(island, np.ones(24), ranges=one).payloads[0]
    return Contribution(island, 1.0, 0, (dense, coded(drawn(0), Dct(4, 4), island, other)))


BAD = {
    "another codec": lambda: offer("i1", np.ones(N), ranges=WHOLE),
    "other tiles": lambda: coded_offer(drawn(1), Dct(2, 4), "i1"),
    "factors": lambda: coded_offer(drawn(1), LowRank(2), "i1"),
    "both": lambda: mixed("i1"),
    "another cut": lambda: coded_offer(drawn(1), Dct(4, 4), "i1", ((Range(0, 12),), (Range(12, N),))),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_coefficients_that_do_not_fit_the_others_are_refused_by_name(case):
    with pytest.raises(BadContribution, match="RD-412: island i1") as caught:
        merged([coded_offer(drawn(0), Dct(4, 4)), BAD[case]()], Recipe(Sgd(1.0), "mean_over_senders"))
    assert caught.value.island == "i1"


@pytest.mark.parametrize("merge", ["mean", "mean_over_senders"])
@pytest.mark.parametrize("shapes", [((29,), (22,)), ((24,), (5,), (22,)), ((51,),)])
def test_tensors_that_would_reach_into_others_do_no_harm(merge, shapes):
    fragment, first = (Range(0, 24), Range(24, N)), coded_offer(drawn(0), Dct(4, 4))
    bad = Contribution("i1", 1.0, 0, (coded(drawn(1), Dct(4, 4), "i1", shapes=shapes),))
    shard = AnchorShard(LAYOUT, WHOLE, [fragment], Recipe(Sgd(1.0), merge))
    shard.found([parameters_payload(np.zeros(N), WHOLE)])
    try:
        shard.prepare("r", 0, [first, bad])
    except BadContribution as error:
        assert (error.number, error.island) == (412, "i1")


def test_a_tensor_across_a_gap_of_the_fragment_is_refused():
    fragments = [(Range(0, 24), Range(29, N)), (Range(24, 29),)]
    shard = AnchorShard(LAYOUT, WHOLE, fragments, Sgd(1.0))
    shard.found([parameters_payload(np.zeros(N), WHOLE)])
    bad = coded(drawn(1), Dct(4, 4), "i1", fragments[0], shapes=((46,),))
    with pytest.raises(BadContribution, match="RD-412: island i1: a tensor \\(46,\\) that is not one of the anchor's"):
        shard.prepare("r", 0, [Contribution("i1", 1.0, 0, (bad,))])


@pytest.mark.parametrize("merge", ["mean", "mean_over_senders", "median", "rda"])
@pytest.mark.parametrize("codec", [Dct(4, 4), LowRank(2)])
def test_codes_that_are_damaged_or_not_finite_are_refused_by_name(merge, codec):
    good = [coded_offer(drawn(k), codec, f"i{k}") for k in (0, 2)]
    damaged = coded(drawn(1), codec, "i1").copy()
    damaged[-3] ^= 1
    infinite = Dct(4, 4) if codec.name == "dct" else LowRank(1)
    huge = drawn(1)
    # Raw fp32 in the codes of a vector with one row, and a coefficient of a constant tile.
    huge[24:29] = 3e38
    cases = [(damaged, 405), (coded(huge, infinite, "i1"), 411)]
    for payload, number in cases:
        with pytest.raises(BadContribution) as caught:
            merged([good[0], Contribution("i1", 1.0, 0, (payload,)), good[1]], Recipe(Sgd(1.0), merge))
        assert (caught.value.number, caught.value.island) == (number, "i1")


def test_a_relay_takes_codes_of_whole_tensors_and_refuses_selections():
    relay = Relay("r", 0, WHOLE, Fp32())
    rows = [drawn(0), drawn(1)]
    sent = relay.merge([coded_offer(row, Dct(8, 100), f"i{k}") for k, row in enumerate(rows)], 0)
    values = [open_payload(sent.payloads[0]).read(at, min(at + 8, N), torch.empty(8)).clone() for at in range(0, N, 8)]
    np.testing.assert_allclose(torch.cat(values), np.mean(rows, axis=0), atol=1e-5)
    selection = Selection("bernoulli", 0.5, 0, 0)
    meta = Meta("contribution", {0: 0}, "i1")
    writer = Writer(Fp32(), WHOLE, meta, selection, numel=selection.count(WHOLE))
    for at in range(0, writer.numel, 8):
        writer.put(at, torch.ones(min(8, writer.numel - at)))
    with pytest.raises(BadContribution, match="RD-412: island i1: a selection of elements"):
        relay.merge([Contribution("i1", 1.0, 0, (writer.seal(meta),))], 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_relay_refuses_what_is_not_finite_by_name(value):
    rows = [drawn(k) for k in range(3)]
    rows[2][40] = value
    with pytest.raises(BadContribution, match="RD-411: island i2"):
        Relay("r", 0, WHOLE, Fp32()).merge([offer(f"i{k}", row, ranges=WHOLE) for k, row in enumerate(rows)], 0)


def test_vectors_are_handed_out_chunk_by_chunk():
    values = torch.from_numpy(drawn(0))
    room = (torch.empty(8), torch.empty(8))
    (dense,) = check_offers([offer("i0", values.numpy(), ranges=WHOLE)], 0, WHOLE, 0)
    (shaped,) = check_offers([coded_offer(values.numpy(), Dct(8, 100))], 0, WHOLE, 0)
    assert isinstance(source_of(dense, WHOLE, N), Message)
    assert isinstance(source_of(shaped, WHOLE, N), Decoded)
    for found in (dense, shaped):
        source = source_of(found, WHOLE, N)
        # In any order, and again.
        for k in (3, 0, 6, 3):
            np.testing.assert_allclose(source.chunk(k, room), values[8 * k : 8 * k + 8], atol=1e-5)
    at = torch.tensor([0, 7, 8, 50])
    np.testing.assert_array_equal(picked(source_of(dense, WHOLE, N), N, at).chunk(0, room), values[at])
    assert transform_of([dense]) is None
    assert transform_of([]) is None
    assert transform_of([shaped]).params["block"] == 8
    assert chunks.CHUNK == 8


def test_payloads_that_are_no_contributions_of_this_round_are_refused_by_name():
    shard = founded(LAYOUT, Nesterov(0.7, 0.9), np.zeros(N))
    with pytest.raises(SyncError, match="RD-412: island i1"):
        shard.prepare("r", 0, [Contribution("i1", 1.0, 0, (coded(drawn(0), Dct(4, 4), "i2"),))])
    with pytest.raises(SyncError, match="RD-406: island i1"):
        shard.prepare("r", 0, [coded_offer(drawn(0), Dct(4, 4), "i1", ((Range(0, 24),),))])
