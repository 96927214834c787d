"""A shard of whose elements only those that are drawn travel and move."""

import numpy as np
import pytest
from outer_world import LAYOUT, WHOLE, elements, flat, founded, offer
from shard_rounds import NESTEROV, RANDOM, anchor_of, drawn, moved, selected_offer

from ray_diloco.errors import SyncError
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.optimizer import HeavyBall, Sgd
from ray_diloco.outer.payload import Meta, Writer, open_payload
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import AnchorShard, BadContribution

pytestmark = pytest.mark.usefixtures("small_chunks")


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
