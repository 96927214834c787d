"""What a shard does for late contributions, random fragments, nested channels and every block in two phases."""

import numpy as np
import pytest
import torch
from outer_world import (
    LAYOUT,
    WHOLE,
    anchor_payload,
    chunk_size,
    contribution_payload,
    elements,
    flat,
    founded,
    offer,
    parameters_payload,
)

from ray_diloco.errors import SyncError
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Bf16, Fp32
from ray_diloco.outer.layout import Range, layout_of
from ray_diloco.outer.merge import MergeSettings
from ray_diloco.outer.moves import PAST
from ray_diloco.outer.optimizer import AdamW, DelayedNesterov, EmaNesterov, HeavyBall, Nesterov, Sgd
from ray_diloco.outer.payload import Meta, Writer, open_payload
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.shard import AnchorShard, BadContribution, Contribution
from ray_diloco.outer.stale import DirectionSettings
from ray_diloco.outer.step import Recipe

pytestmark = pytest.mark.usefixtures("small_chunks")

NESTEROV = Nesterov(0.7, 0.9)
RANDOM = Draw("bernoulli", 0.5, 3)


def drawn(seed, numel=8):
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def moved(shard, version, offers=None, **settings):
    """Makes the round that moves the anchor of a version; what it sends."""
    _, payload = shard.prepare(f"r{version}", 0, offers or [offer("i0", drawn(version), version=version)], **settings)
    shard.commit(f"r{version}")
    return payload


def anchor_of(shard):
    return flat(shard.tensors()).astype(np.float64)


# Late contributions


@pytest.mark.parametrize("age", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_late_contribution_is_measured_from_the_anchor_as_it_is_now(age, chunk):
    with chunk_size(chunk):
        shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=3, reanchor=True), drawn(100))
        base = anchor_of(shard)
        for version in range(age):
            moved(shard, version)
        now, theta = anchor_of(shard), drawn(99).astype(np.float64)
        moved(shard, age, [offer("late", base - theta, version=0)])
        # Δ = A − θ, so that with rate 1 the anchor becomes θ.
        np.testing.assert_allclose(anchor_of(shard), theta, rtol=1e-5, atol=1e-6)
        assert np.abs(now - theta).max() > 0.1


def test_late_and_fresh_contributions_are_merged_together():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=2, reanchor=True), np.zeros(8))
    moved(shard, 0, [offer("i0", np.full(8, -4.0))])
    # A is 4; i1 comes from 0 and stands at 2: it says 4 − 2 = 2.  i0 stands at 3 and says 1.
    offers = [offer("i1", np.full(8, -2.0), version=0), offer("i0", np.full(8, 1.0), version=1)]
    moved(shard, 1, offers)
    assert anchor_of(shard).tolist() == [2.5] * 8


def test_without_reanchoring_a_late_contribution_counts_as_it_is():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=2), np.zeros(8))
    moved(shard, 0, [offer("i0", np.full(8, -4.0))])
    moved(shard, 1, [offer("i1", np.full(8, -2.0), version=0)])
    assert anchor_of(shard).tolist() == [6.0] * 8


@pytest.mark.parametrize("reanchor", [False, True])
def test_contributions_beyond_the_greatest_age_are_refused_by_name(reanchor):
    shard = founded(LAYOUT, Recipe(NESTEROV, max_age=2, reanchor=reanchor), np.zeros(8))
    for version in range(3):
        moved(shard, version)
    with pytest.raises(BadContribution, match="RD-412: island i1: measured from version 0") as caught:
        moved(shard, 3, [offer("i1", np.ones(8), version=0)])
    assert caught.value.island == "i1"
    moved(shard, 3, [offer("i1", np.ones(8), version=1)])
    with pytest.raises(BadContribution, match="RD-412"):
        moved(shard, 4, [offer("i1", np.ones(8), version=5)])


def test_with_any_age_allowed_those_whose_base_is_not_kept_are_refused_by_name():
    shard = founded(LAYOUT, Recipe(Sgd(0.1), max_age=None, reanchor=True), np.zeros(8))
    for version in range(PAST + 2):
        moved(shard, version)
    with pytest.raises(BadContribution, match="island i7: measured from version 1, which is not kept any more"):
        moved(shard, PAST + 2, [offer("i7", np.ones(8), version=1)])
    moved(shard, PAST + 2, [offer("i7", np.ones(8), version=2)])


def test_a_loaded_shard_keeps_no_anchors_of_before():
    shard = founded(LAYOUT, Recipe(Sgd(0.1), max_age=None, reanchor=True), np.zeros(8))
    moved(shard, 0)
    shard.load(shard.tensors(), {}, shard.versions)
    with pytest.raises(BadContribution, match="which is not kept any more"):
        moved(shard, 1, [offer("i0", np.ones(8), version=0)])


def test_two_contributions_of_one_island_from_different_versions_are_both_merged():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=1), np.zeros(8))
    moved(shard, 0, [offer("i0", np.zeros(8))])
    offers = [offer("i0", np.full(8, 2.0), 1.0, 1), offer("i0", np.full(8, 6.0), 3.0, 0)]
    moved(shard, 1, offers)
    assert anchor_of(shard).tolist() == [-5.0] * 8
    with pytest.raises(BadContribution, match="two contributions to one round"):
        moved(shard, 2, [offer("i0", np.ones(8), version=2)] * 2)


def test_contributions_of_several_payloads_are_measured_anew_piece_by_piece():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=1, reanchor=True), drawn(1))
    base = anchor_of(shard)
    moved(shard, 0)
    theta, cut = drawn(2), ((Range(0, 3), Range(5, 6)), (Range(3, 5), Range(6, 8)))
    said = base - theta
    parts = [
        contribution_payload(np.concatenate([said[r.start : r.stop] for r in ranges]), ranges, "i1", 0)
        for ranges in cut
    ]
    moved(shard, 1, [Contribution("i1", 1.0, 0, tuple(parts))])
    np.testing.assert_allclose(anchor_of(shard), theta, rtol=1e-5, atol=1e-6)


def test_a_buffer_of_contributions_from_one_base_is_one_synchronous_step():
    rows = [drawn(k) for k in range(3)]
    late = founded(LAYOUT, Recipe(DelayedNesterov(0.7, 0.9, 3), max_age=2), np.zeros(8))
    once = founded(LAYOUT, NESTEROV, np.zeros(8))
    for epoch in range(2):
        for k, row in enumerate(rows):
            version = 3 * epoch + k
            moved(late, version, [offer(f"i{k}", row, version=3 * epoch)], scale=[1.0])
        moved(once, epoch, [offer(f"i{k}", row, version=epoch) for k, row in enumerate(rows)])
        np.testing.assert_allclose(anchor_of(late), anchor_of(once), rtol=1e-5, atol=1e-6)


def test_a_buffer_of_one_has_the_bits_of_nesterov():
    late = founded(LAYOUT, DelayedNesterov(0.7, 0.9, 1), np.zeros(8))
    straight = founded(LAYOUT, NESTEROV, np.zeros(8))
    for version in range(3):
        moved(late, version)
        moved(straight, version)
    assert anchor_of(late).tobytes() == anchor_of(straight).tobytes()


def test_everybodys_anchor_with_everybody_as_neighbour_is_the_shared_one():
    shared = founded(LAYOUT, NESTEROV, np.zeros(8))
    own = [founded(LAYOUT, NESTEROV, np.zeros(8)) for _ in range(3)]
    for version in range(3):
        offers = [offer(f"i{k}", drawn(10 * version + k), version=version) for k in range(3)]
        sent = moved(shared, version, offers).tobytes()
        assert {moved(shard, version, offers).tobytes() for shard in own} == {sent}


# Two phases, for every block

RECIPES = {
    "nesterov": Recipe(NESTEROV),
    "adamw": Recipe(AdamW(0.1, 0.9, 0.99, 0.1, 0.0)),
    "average": Recipe(NESTEROV, average=OuterAverage("uniform", 4, 0.25)),
    "merged": Recipe(NESTEROV, "centred_clipping", MergeSettings(tau=1.0)),
    "rda": Recipe(NESTEROV, "rda"),
    "median": Recipe(NESTEROV, "median"),
    "reanchor": Recipe(NESTEROV, max_age=2, reanchor=True),
    "direction": Recipe(EmaNesterov(0.7, 0.9), direction=DirectionSettings(), lookahead=True),
    "consensus": Recipe(HeavyBall(0.7, 0.5), consensus=0.5),
    "recode": Recipe(NESTEROV, recode=Bf16()),
    "lookahead": Recipe(NESTEROV, lookahead=True, average=OuterAverage("ema", 4, 0.25)),
}
CASES = [
    *((name, recipe, down, None) for name, recipe in RECIPES.items() for down in (Fp32(), Bf16())),
    *((f"random {name}", RECIPES[name], down, RANDOM)
      for name in ("nesterov", "average", "reanchor", "consensus", "median") for down in (Fp32(), Bf16())),
]  # fmt: skip


def everything(shard):
    """All that is committed, as bytes."""
    return (
        repr(shard.versions),
        flat(shard.tensors()).tobytes(),
        *(flat(shard.state_tensors(name)).tobytes() for name in shard.recipe.state_names),
        *(repr(sorted((v, a.numpy().tobytes()) for v, a in part.past.items())) for part in shard._fragments),
        shard.payload(0).tobytes(),
        shard.published(0).tobytes(),
    )


def work(shard, draw, version, seed=0):
    """Contributions to the round of a version, and what else `prepare` needs."""
    offers = []
    for k in range(3):
        values = drawn(100 * seed + 10 * version + k)
        if draw is None:
            offers.append(offer(f"i{k}", values, version=version))
        else:
            offers.append(selected_offer(f"i{k}", values, version, draw))
    settings = {}
    if shard.recipe.rule.needs_whole_vector:
        settings["scale"] = [1 / 3] * 3 + [0.0] * len(shard.recipe.rule.extras)
    if shard.recipe.consensus:
        settings["neighbours"] = [[shard.payload(0).copy()], [anchor_payload(drawn(7), WHOLE)]]
    return offers, settings


def selected_offer(island, values, version, draw, base=None, ranges=WHOLE):
    """A contribution of the elements that a draw selects."""
    selection = draw.of(version)
    base = version if base is None else base
    at = selection.packed(ranges)
    writer = Writer(Fp32(), ranges, Meta("contribution", {0: base}, island), selection, numel=len(at))
    chosen = torch.from_numpy(np.float32(values)[at])
    for start in range(0, len(at), 4):
        writer.put(start, chosen[start : start + 4])
    return Contribution(island, 1.0, base, (writer.seal(Meta("contribution", {0: base}, island)),))


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_an_abort_leaves_no_trace_and_the_same_round_has_the_same_bytes(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    straight = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    for version in range(4):
        before = everything(shard)
        other, settings = work(shard, draw, version, seed=1)
        shard.prepare("lost", 0, other, **settings)
        assert everything(shard) == before
        shard.abort("lost")
        shard.prepare("idle", 0, (), idle=True)
        assert everything(shard) == before
        shard.abort("idle")
        offers, settings = work(shard, draw, version)
        first, sent = shard.prepare("r", 0, offers, **settings)
        sent = sent.tobytes()
        assert everything(shard) == before
        shard.abort("r")
        # Aborting what is not open is nothing.
        shard.abort("r")
        key = f"r{version}"
        again, repeated = shard.prepare(key, 0, offers, **settings)
        assert repeated.tobytes() == sent
        assert again.digest == first.digest == open_payload(repeated).digest
        shard.commit(key)
        shard.commit(key)
        shard.payload(0)
        # Who lost the answer asks again, before and after others have asked for the anchor.
        same, repeated = shard.prepare(key, 0, offers, **settings)
        assert (same, repeated.tobytes()) == (again, sent)
        assert straight.prepare(key, 0, offers, **settings)[1].tobytes() == sent
        straight.commit(key)
        assert everything(shard) == everything(straight)


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_a_loaded_shard_goes_on_with_every_block(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    for version in range(2):
        offers, settings = work(shard, draw, version)
        moved(shard, version, offers, **settings)
    loaded = AnchorShard(LAYOUT, WHOLE, [WHOLE], recipe, down, draw)
    states = {state: shard.state_tensors(state) for state in recipe.state_names}
    loaded.load(shard.tensors(), states, shard.versions)
    assert loaded.payload(0).tobytes() == shard.payload(0).tobytes()
    offers, settings = work(shard, draw, 2)
    assert moved(loaded, 2, offers, **settings).tobytes() == moved(shard, 2, offers, **settings).tobytes()
    assert loaded.published(0).tobytes() == shard.published(0).tobytes()


@pytest.mark.parametrize(("name", "recipe", "down", "draw"), CASES, ids=[f"{c[0]} {c[2].name}" for c in CASES])
def test_an_idle_round_moves_the_version_alone(name, recipe, down, draw):
    shard = founded(LAYOUT, recipe, drawn(50), codec_down=down, draw=draw)
    offers, settings = work(shard, draw, 0)
    moved(shard, 0, offers, **settings)
    anchor, asked = anchor_of(shard), elements(shard.payload(0))
    states = [flat(shard.state_tensors(s)).tobytes() for s in recipe.optimizer.state_names]
    prepared, sent = shard.prepare("idle", 0, (), idle=True)
    sent = sent.copy()
    shard.commit("idle")
    assert shard.versions == {0: 2} == open_payload(sent).header.meta.versions
    assert (prepared.squared_update_norm, prepared.squared_delta_norm) == (0.0, 0.0)
    assert prepared.squared_anchor_norm == pytest.approx(np.sum(anchor**2), rel=1e-5)
    assert anchor_of(shard).tolist() == anchor.tolist()
    assert elements(shard.payload(0)).tolist() == asked.tolist()
    assert [flat(shard.state_tensors(s)).tobytes() for s in recipe.optimizer.state_names] == states
    at = slice(None) if draw is None else draw.of(1).packed(WHOLE)
    assert elements(sent).tolist() == asked[at].tolist()


def test_an_idle_round_is_an_iterate_of_the_average():
    average = OuterAverage("uniform", rounds=3, start=0.3)
    shard = founded(LAYOUT, Recipe(Sgd(1.0), average=average), np.zeros(8))
    shard.prepare("idle", 0, (), idle=True)
    shard.commit("idle")
    moved(shard, 1, [offer("i0", np.full(8, -2.0), version=1)])
    assert elements(shard.published(0)).tolist() == [1.0] * 8


# Random fragments


def test_a_random_round_moves_the_selected_elements_and_no_others():
    shard = founded(LAYOUT, Recipe(NESTEROV), np.zeros(8), draw=RANDOM)
    anchor, u = np.zeros(8), np.zeros(8)
    for version in range(5):
        values, at = drawn(version).astype(np.float64), RANDOM.of(version).packed(WHOLE)
        u[at] = 0.9 * u[at] + values[at]
        anchor[at] -= 0.7 * (values[at] + 0.9 * u[at])
        prepared, sent = shard.prepare(f"r{version}", 0, [selected_offer("i0", values, version, RANDOM)])
        shard.commit(f"r{version}")
        np.testing.assert_allclose(anchor_of(shard), anchor, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(elements(sent), anchor[at], rtol=1e-5, atol=1e-6)
        assert open_payload(sent).header.selection == RANDOM.of(version)
        # A joiner gets everything, and so does the evaluation.
        for whole in (shard.payload(0), shard.published(0)):
            np.testing.assert_array_equal(elements(whole), flat(shard.tensors()))
            assert open_payload(whole).header.meta.versions == {0: version + 1}
        assert prepared.squared_anchor_norm == pytest.approx(np.sum(anchor**2), rel=1e-5)


def test_a_random_round_of_everything_is_an_ordinary_one():
    draw = Draw("bernoulli", 1.0, 5)
    random, whole = founded(LAYOUT, NESTEROV, drawn(0), draw=draw), founded(LAYOUT, NESTEROV, drawn(0))
    for version in range(3):
        values = drawn(version + 1)
        moved(random, version, [selected_offer("i0", values, version, draw)])
        moved(whole, version, [offer("i0", values, version=version)])
        assert anchor_of(random).tobytes() == anchor_of(whole).tobytes()


def test_all_elements_are_averaged_though_few_are_sent():
    average = OuterAverage("uniform", rounds=4, start=0.5)
    shard = founded(LAYOUT, Recipe(Sgd(1.0), average=average), drawn(9), draw=RANDOM)
    seen = []
    for version in range(4):
        moved(shard, version, [selected_offer("i0", drawn(version), version, RANDOM)])
        seen.append(anchor_of(shard))
    np.testing.assert_allclose(elements(shard.published(0)), np.mean(seen[2:], axis=0), rtol=1e-5, atol=1e-6)


def test_a_late_random_contribution_is_measured_anew():
    shard = founded(LAYOUT, Recipe(Sgd(1.0), max_age=1, reanchor=True), np.zeros(8), draw=RANDOM)
    moved(shard, 0, [selected_offer("i0", np.full(8, -4.0), 0, RANDOM)])
    before, at = anchor_of(shard), RANDOM.of(1).packed(WHOLE)
    # It stands at 1 everywhere and has measured from 0, of what this round selects.
    moved(shard, 1, [selected_offer("i1", np.full(8, -1.0), 1, RANDOM, base=0)])
    expected = before.copy()
    expected[at] = 1.0
    assert anchor_of(shard).tolist() == expected.tolist()


def test_random_consensus_keeps_the_mean_of_a_pair_and_brings_selected_elements_nearer():
    starts = np.array([drawn(1), drawn(2)], np.float64)
    pair = [founded(LAYOUT, Recipe(HeavyBall(0.5, 0.0), consensus=0.25), s, draw=RANDOM) for s in starts]
    around = [[shard.payload(0).copy()] for shard in pair]
    for k, shard in enumerate(pair):
        moved(shard, 0, [selected_offer("i0", np.zeros(8), 0, RANDOM)], neighbours=around, own=k)
    after, gap = np.array([anchor_of(shard) for shard in pair]), starts[0] - starts[1]
    factor = np.ones(8)
    factor[RANDOM.of(0).packed(WHOLE)] = 0.75
    np.testing.assert_allclose(after.mean(0), starts.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[0] - after[1], factor * gap, rtol=1e-5, atol=1e-6)


def test_contributions_of_another_selection_are_refused_by_name():
    shard, other = founded(LAYOUT, NESTEROV, np.zeros(8), draw=RANDOM), Draw("bernoulli", 0.5, 4)
    for bad in (offer("i1", np.ones(8)), selected_offer("i1", np.ones(8), 0, other)):
        with pytest.raises(BadContribution, match="RD-412: island i1"):
            moved(shard, 0, [bad])
    whole = founded(LAYOUT, NESTEROV, np.zeros(8))
    with pytest.raises(BadContribution, match="RD-412: island i1: a selection of elements where all are wanted"):
        moved(whole, 0, [selected_offer("i1", np.ones(8), 0, RANDOM)])


def test_a_random_contribution_that_is_not_finite_is_refused_by_name():
    shard = founded(LAYOUT, Recipe(NESTEROV, "median"), np.zeros(8), draw=RANDOM)
    bad = np.ones(8)
    bad[RANDOM.of(0).packed(WHOLE)[-1]] = np.inf
    with pytest.raises(BadContribution, match="RD-411: island i1"):
        moved(shard, 0, [selected_offer(f"i{k}", bad if k == 1 else np.ones(8), 0, RANDOM) for k in range(3)])


def test_a_run_is_not_founded_by_a_selection():
    shard = AnchorShard(LAYOUT, WHOLE, [WHOLE], NESTEROV)
    selection = RANDOM.of(0)
    writer = Writer(Fp32(), WHOLE, Meta("parameters"), selection, numel=len(selection.packed(WHOLE)))
    with pytest.raises(SyncError, match="RD-412"):
        shard.found([writer.seal(Meta("parameters"))])


# Channels that are nested


def test_a_faster_anchor_goes_on_from_a_slower_one():
    fast = founded(LAYOUT, Recipe(HeavyBall(1.0, 0.5)), np.zeros(8))
    moved(fast, 0, [offer("i0", np.ones(8))])
    slow = [anchor_payload(np.arange(3.0), (Range(2, 5),), {7: 4}), anchor_payload([9.0], (Range(7, 8),), {7: 4})]
    fast.rewrite(0, slow)
    expected = [-1, -1, 0, 1, 2, -1, -1, 9]
    assert anchor_of(fast).tolist() == elements(fast.payload(0)).tolist() == expected
    assert fast.versions == {0: 1} == open_payload(fast.payload(0)).header.meta.versions
    assert flat(fast.state_tensors("momentum")).tolist() == [1.0] * 8
    moved(fast, 1, [offer("i0", np.ones(8), version=1)])
    assert anchor_of(fast).tolist() == [a - 1.5 for a in expected]


def test_a_faster_random_anchor_is_rewritten_whole():
    fast = founded(LAYOUT, Recipe(Sgd(1.0)), np.zeros(8), draw=RANDOM)
    moved(fast, 0, [selected_offer("i0", np.ones(8), 0, RANDOM)])
    fast.rewrite(0, [anchor_payload(np.arange(8.0), WHOLE, {7: 4})])
    assert anchor_of(fast).tolist() == elements(fast.payload(0)).tolist() == list(range(8))
    moved(fast, 1, [selected_offer("i0", np.ones(8), 1, RANDOM)])
    expected = np.arange(8.0)
    expected[RANDOM.of(1).packed(WHOLE)] -= 1
    assert anchor_of(fast).tolist() == elements(fast.payload(0)).tolist() == expected.tolist()


def test_an_anchor_is_not_rewritten_under_an_open_preparation_nor_from_what_is_no_anchor():
    fast = founded(LAYOUT, NESTEROV, np.zeros(8))
    before = everything(fast)
    damaged = anchor_payload(np.ones(8), WHOLE).copy()
    damaged[-1] ^= 1
    for bad, number in ((parameters_payload(np.ones(8), WHOLE), 412), (damaged, 405)):
        with pytest.raises(SyncError, match=f"RD-{number}"):
            fast.rewrite(0, [bad])
        assert everything(fast) == before
    fast.prepare("r", 0, [offer("i0", np.ones(8))])
    with pytest.raises(SyncError, match="RD-423: fragment 0 has the open preparation 'r' and cannot be rewritten"):
        fast.rewrite(0, [anchor_payload(np.ones(8), WHOLE)])
    with pytest.raises(SyncError, match="RD-422"):
        AnchorShard(LAYOUT, WHOLE, [WHOLE], NESTEROV).rewrite(0, [anchor_payload(np.ones(8), WHOLE)])


def test_published_tensors_of_fragments_that_are_not_averaged_yet_are_their_anchors():
    fragments = [(LAYOUT.tensors[0].range,), (LAYOUT.tensors[1].range,)]
    average = OuterAverage("uniform", rounds=2, start=0.5)
    shard = founded(LAYOUT, Recipe(Sgd(1.0), average=average), np.arange(8.0), fragments)
    for version in range(2):
        moved(shard, version, [offer("i0", np.ones(6), version=version, ranges=fragments[0])])
    assert elements(shard.published(0)).tolist() == [-2, -1, 0, 1, 2, 3]
    assert elements(shard.published(1)).tolist() == [6, 7]
    assert flat(shard.state_tensors("average")).tolist() == [-2, -1, 0, 1, 2, 3, 6, 7]


def test_plain_rounds_make_no_arrays_of_the_size_of_the_model():
    import resource

    numel = 9_000_000
    with chunk_size(131072):
        layout = layout_of([("w", (numel,))])
        shard = founded(layout, NESTEROV, torch.zeros(numel))
        offers = [offer(f"i{k}", torch.ones(numel), ranges=layout.whole) for k in range(2)]
        for _ in range(2):
            shard.prepare("r", 0, offers)
            shard.abort("r")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        shard.prepare("r", 0, offers)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 4 * numel / resource.getpagesize() / 8
