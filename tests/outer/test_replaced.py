"""Anchors that were replaced: what a shard keeps of them, and what a commit brings back."""

import numpy as np
import pytest
from outer_world import LAYOUT, WHOLE, elements, flat, founded, offer
from shard_rounds import NESTEROV, anchor_of, drawn, moved

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Bf16
from ray_diloco.outer.layout import intersect, shard_ranges
from ray_diloco.outer.optimizer import Sgd
from ray_diloco.outer.payload import open_payload
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.replaced import kinds_of
from ray_diloco.outer.shard import AnchorShard

pytestmark = pytest.mark.usefixtures("small_chunks")

LATE = Recipe(NESTEROV, passed=2, max_age=3)
FREE = Recipe(Sgd(0.5), max_age=2, reanchor=True, free=True)


def saved_of(shards):
    """What the files of a commit hold of replaced anchors: by name, then by tensor."""
    found = {}
    for shard in shards:
        for name, tensor, array in shard.replaced_tensors():
            found.setdefault(name, {})[tensor] = array.copy()
    return found


def successor(recipe, shards, ranges=(WHOLE,), codec=None, fragments=(WHOLE,)):
    """Shards that go on from what others would have written, however many they are."""
    anchor = {name: array.copy() for shard in shards for name, array in shard.tensors().items()}
    state = {
        kind: {n: a.copy() for shard in shards for n, a in shard.state_tensors(kind).items()}
        for kind in recipe.state_names
    }
    made = [AnchorShard(LAYOUT, kept, list(fragments), recipe, codec) for kept in ranges]
    for shard in made:
        shard.load(anchor, state, shards[0].versions, saved_of(shards))
    return made


@pytest.mark.parametrize("codec", [None, Bf16()])
def test_a_shard_keeps_what_it_sent_of_as_many_anchors_as_are_still_to_be_adopted(codec):
    shard, sent = founded(LAYOUT, LATE, drawn(9), codec_down=codec), {}
    sent[0] = elements(shard.payload(0))
    for version in range(5):
        sent[version + 1] = elements(moved(shard, version))
    (again,) = successor(LATE, [shard], codec=codec)
    for kept in (shard, again):
        for version in (3, 4):
            payload = kept.passed(0, version)
            assert open_payload(payload).header.meta.versions == {0: version}
            assert elements(payload).tobytes() == sent[version].tobytes()
        assert kept.passed(0, 2) is None and kept.passed(0, 5) is None


def test_replaced_anchors_fit_another_number_of_shards():
    shard = founded(LAYOUT, LATE, drawn(9))
    sent = [elements(moved(shard, version)) for version in range(3)]
    several = successor(LATE, [shard], shard_ranges(LAYOUT, 2))
    (one,) = successor(LATE, several)
    assert elements(one.passed(0, 2)).tobytes() == sent[1].tobytes()
    for part in several:
        payload = open_payload(part.passed(0, 1))
        assert payload.header.ranges == intersect(WHOLE, part.ranges)


def test_a_run_at_its_own_pace_goes_on_to_measure_from_the_very_anchors():
    shard = founded(LAYOUT, FREE, drawn(9))
    for version in range(3):
        moved(shard, version)
    (again,) = successor(FREE, [shard])
    late = [offer("i0", drawn(20), version=1)]
    assert moved(again, 3, late).tobytes() == moved(shard, 3, late).tobytes()
    assert anchor_of(again).tobytes() == anchor_of(shard).tobytes()


def test_a_commit_that_holds_none_leaves_none():
    shard = founded(LAYOUT, LATE, drawn(9))
    assert list(shard.replaced_tensors()) == []
    (again,) = successor(LATE, [shard])
    assert again.passed(0, 0) is None


def test_what_is_written_is_not_written_again():
    shard = founded(LAYOUT, FREE, drawn(9))
    for version in range(3):
        moved(shard, version)
    views = {name: array for name, _, array in shard.replaced_tensors()}
    before = {name: array.copy() for name, array in views.items()}
    for version in range(3, 9):
        moved(shard, version)
    assert all(views[name].tobytes() == before[name].tobytes() for name in views)


def test_runs_that_need_none_keep_none():
    assert kinds_of(Recipe(NESTEROV)) == {}
    assert kinds_of(Recipe(NESTEROV, reanchor=True, max_age=None)) == {}
    assert kinds_of(LATE) == {"passed1": ("passed", 1), "passed2": ("passed", 2)}
    assert list(kinds_of(FREE)) == ["past1", "past2"]
    shard = founded(LAYOUT, NESTEROV, drawn(9))
    moved(shard, 0)
    assert shard.passed(0, 0) is None


def test_a_replaced_tensor_of_another_shape_is_refused():
    shard = founded(LAYOUT, LATE, drawn(9))
    moved(shard, 0)
    saved = saved_of([shard])
    name = next(iter(saved["passed1"]))
    saved["passed1"][name] = np.zeros((3, 3, 3), np.float32)
    state = {kind: shard.state_tensors(kind) for kind in LATE.state_names}
    with pytest.raises(SyncError, match="RD-424"):
        founded(LAYOUT, LATE, drawn(9)).load(shard.tensors(), state, shard.versions, saved)
    assert flat(shard.tensors()).size == LAYOUT.numel
