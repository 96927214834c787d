import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outer_world import chunk_size, partitions

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import Piece, describe, in_chunks, pieces, quiet, require_within, squared_norm
from ray_diloco.outer.layout import Range


def test_pieces_say_where_each_element_lies_in_its_source():
    wanted = (Range(2, 6), Range(8, 10))
    sources = [("even", (Range(0, 4), Range(9, 12))), ("odd", (Range(4, 9),))]
    assert pieces(wanted, sources, "test") == [
        Piece(0, 2, "even", 2),
        Piece(2, 2, "odd", 0),
        Piece(4, 1, "odd", 4),
        Piece(5, 1, "even", 4),
    ]


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        ([("a", (Range(0, 4),)), ("b", (Range(6, 10),))], r"\[4, 6\) \(2 in all\) are missing"),
        ([("a", (Range(0, 7),)), ("b", (Range(5, 10),))], r"\[5, 7\) \(2 in all\) come twice"),
        ([("a", (Range(0, 10),)), ("b", (Range(2, 3),))], r"\[2, 3\) \(1 in all\) come twice"),
        ([], r"\[0, 10\) \(10 in all\) are missing"),
    ],
)
def test_missing_and_doubled_elements_are_named(sources, word):
    with pytest.raises(SyncError, match=rf"RD-406: island i7: elements {word}"):
        pieces((Range(0, 10),), sources, "island i7")


def test_partial_pieces_leave_gaps():
    assert pieces((Range(0, 10),), [("a", (Range(3, 5),))], "test", partial=True) == [Piece(3, 2, "a", 0)]


def test_elements_outside_the_limit_are_named():
    require_within((Range(1, 3),), (Range(0, 4),), "test")
    with pytest.raises(SyncError, match=r"RD-406: test: elements \[4, 6\) \(2 in all\) do not belong here"):
        require_within((Range(1, 6),), (Range(0, 4),), "test")


@given(partitions(90, 4), partitions(90, 4), st.integers(1, 50))
def test_every_element_is_handed_out_once_and_no_piece_crosses_a_chunk(wanted, sources, size):
    position = {}
    for k, ranges in enumerate(sources):
        position |= {e: (k, at) for at, e in enumerate(e for r in ranges for e in range(r.start, r.stop))}
    for ranges in wanted:
        elements = [e for r in ranges for e in range(r.start, r.stop)]
        with chunk_size(size):
            found = list(in_chunks(pieces(ranges, list(enumerate(sources)), "test"), len(elements)))
        seen = []
        for start, stop, inside in found:
            assert start % size == 0
            assert stop == min(start + size, len(elements))
            assert all(start <= p.at and p.at + p.numel <= stop for p in inside)
            seen += [(p.at + n, (p.source, p.position + n)) for p in inside for n in range(p.numel)]
        assert seen == [(at, position[e]) for at, e in enumerate(elements)]


def test_squared_norm_is_the_sum_of_squares_and_shows_what_is_not_finite():
    assert squared_norm(torch.tensor([3.0, -4.0])) == 25.0
    assert squared_norm(torch.empty(0)) == 0.0
    with quiet():
        assert math.isnan(squared_norm(torch.tensor([1.0, float("nan")])))
        assert squared_norm(torch.tensor([1.0, -float("inf")])) == np.inf
        assert squared_norm(torch.tensor([1e20, 1.0])) == np.inf


def test_a_set_is_described_by_its_first_ranges():
    assert describe(()) == "none"
    assert (
        describe(tuple(Range(4 * k, 4 * k + 2) for k in range(5)))
        == "[0, 2), [4, 6), [8, 10) and 2 more ranges (10 in all)"
    )
