from hypothesis import given
from hypothesis import strategies as st
from outer_world import layouts, partitions

from ray_diloco.outer.layout import (
    Range,
    intersect,
    layout_of,
    normalise,
    overlaps,
    shard_ranges,
    split_evenly,
    subtract,
    total,
)

LAYOUT = layout_of([("w", (2, 3)), ("b", (2,)), ("scale", ())])


def members(ranges):
    return [e for r in ranges for e in range(r.start, r.stop)]


def test_tensors_stand_one_behind_the_other():
    assert [(t.name, t.range) for t in LAYOUT.tensors] == [
        ("w", Range(0, 6)),
        ("b", Range(6, 8)),
        ("scale", Range(8, 9)),
    ]
    assert LAYOUT.numel == 9
    assert LAYOUT.whole == (Range(0, 9),)


def test_digests_tell_names_and_shapes_apart():
    same = layout_of([("w", [2, 3]), ("b", [2]), ("scale", [])])
    assert same.digest == LAYOUT.digest
    for other in ([("w", (3, 2)), ("b", (2,)), ("scale", ())], [("v", (2, 3)), ("b", (2,)), ("scale", ())]):
        assert layout_of(other).digest != LAYOUT.digest


def test_a_layout_without_tensors_is_empty():
    assert layout_of([]).whole == ()


@given(partitions(60, 4), partitions(60, 4))
def test_set_operations_are_those_of_sets_of_elements(one, other):
    a, b = one[0], other[0]
    x, y = set(members(a)), set(members(b))
    assert members(intersect(a, b)) == sorted(x & y)
    assert members(subtract(a, b)) == sorted(x - y)
    assert members(normalise((*b, *a))) == sorted(x | y)
    assert total(a) == len(x)


@given(partitions(60, 4), partitions(60, 4))
def test_overlaps_say_where_common_elements_lie_in_both(one, other):
    a, b = members(one[0]), members(other[0])
    found = [(i + n, j + n) for i, j, count in overlaps(one[0], other[0]) for n in range(count)]
    assert found == [(a.index(e), b.index(e)) for e in sorted(set(a) & set(b))]


@given(partitions(60, 4), st.integers(1, 9))
def test_even_splits_are_consecutive_and_differ_by_one_element(sets, parts):
    split = split_evenly(sets[0], parts)
    assert len(split) == parts
    assert [e for part in split for e in members(part)] == members(sets[0])
    sizes = [total(part) for part in split]
    assert max(sizes) - min(sizes) <= 1


@given(layouts, st.integers(1, 6))
def test_shards_keep_whole_tensors_and_every_element_once(layout, count):
    kept = shard_ranges(layout, count)
    assert len(kept) == count
    assert sorted(e for ranges in kept for e in members(ranges)) == list(range(layout.numel))
    for t in layout.tensors:
        assert sorted(total(intersect((t.range,), ranges)) for ranges in kept)[-1] == t.numel


def test_large_tensors_are_dealt_first_to_the_least_loaded_shard():
    layout = layout_of([("a", (4,)), ("b", (9,)), ("c", (5,)), ("d", (1,))])
    assert shard_ranges(layout, 2) == [(Range(4, 13), Range(18, 19)), (Range(0, 4), Range(13, 18))]
