"""An anchor that a slower channel rewrites, and averages of fragments that are published."""

import numpy as np
import pytest
from outer_world import LAYOUT, WHOLE, anchor_payload, elements, flat, founded, offer, parameters_payload
from shard_rounds import NESTEROV, RANDOM, anchor_of, everything, moved, selected_offer

from ray_diloco.errors import SyncError
from ray_diloco.outer.average import OuterAverage
from ray_diloco.outer.layout import Range
from ray_diloco.outer.optimizer import HeavyBall, Sgd
from ray_diloco.outer.payload import open_payload
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import AnchorShard

pytestmark = pytest.mark.usefixtures("small_chunks")


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
