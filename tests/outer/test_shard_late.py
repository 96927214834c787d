"""What a shard does for contributions from former anchors, and for buffers of them."""

import pickle

import numpy as np
import pytest
from outer_world import LAYOUT, chunk_size, contribution_payload, founded, offer
from shard_rounds import NESTEROV, anchor_of, drawn, moved

from ray_diloco.blocks import channels_of, recipe_of
from ray_diloco.config.compose import compose
from ray_diloco.errors import TooOld
from ray_diloco.outer.layout import Range
from ray_diloco.outer.optimizer import DelayedNesterov, Sgd
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import BadContribution, Contribution

pytestmark = pytest.mark.usefixtures("small_chunks")


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
    shard = founded(LAYOUT, Recipe(Sgd(0.1), max_age=None, reanchor=True, remembered=4), np.zeros(8))
    for version in range(6):
        moved(shard, version)
    with pytest.raises(TooOld, match="island i7: measured from version 1, which is not kept any more") as slow:
        moved(shard, 6, [offer("i7", np.ones(8), version=1)])
    sent = pickle.loads(pickle.dumps(slow.value))
    assert type(sent) is TooOld and (sent.island, sent.what) == ("i7", slow.value.what)
    moved(shard, 6, [offer("i7", np.ones(8), version=2)])


@pytest.mark.parametrize(("islands", "kept"), [(2, 8), (4, 8), (8, 16)])
def test_all_islands_of_one_speed_find_their_base_and_a_slow_one_for_a_while(islands, kept):
    config = compose(["algorithm=easgd", f"islands.count={islands}"]).config
    assert recipe_of(channels_of(config)[0]).past == kept


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
