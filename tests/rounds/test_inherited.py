"""What an island that goes on from a commit has still to adopt."""

import asyncio

from ray_diloco.rounds.inherited import inherited, made_by
from ray_diloco.rounds.ports import Piece, Update
from ray_diloco.rounds.position import Position


class Keeper:
    """Anchors by fragment and version; the newest is committed, of the others it has what it was given."""

    def __init__(self, kept):
        self.kept, self.asked = kept, []

    async def current(self, island):
        return [update(fragment, max(versions)) for fragment, versions in self.kept.items()]

    async def passed(self, island, fragment, version):
        self.asked.append((island, fragment, version))
        return update(fragment, version) if version in self.kept[fragment] else None


def update(fragment, version, round_=0):
    return Update(fragment, version, (Piece(0, 4, f"{fragment}/{version}"),), round_)


def found(kept, bases, made):
    keeper = Keeper(kept)
    position = Position(versions={fragment: max(versions) for fragment, versions in kept.items()}, made=made)
    return asyncio.run(inherited(keeper, "i0", bases, position)), keeper


def test_an_island_inherits_every_anchor_beyond_its_base_with_the_round_that_made_it():
    # Round 4 was void: version 4 is that of round 5.
    made = {0: [(2, 2), (3, 3), (5, 4), (6, 5)]}
    all_of, keeper = found({0: {3, 4, 5}}, {0: 2}, made)
    assert all_of == {0: [update(0, 3, 3), update(0, 4, 5), update(0, 5, 6)]}
    assert keeper.asked == [("i0", 0, 3), ("i0", 0, 4)]
    assert [made_by(all_of[0], round_).version for round_ in (3, 4, 5, 6)] == [3, 3, 4, 5]


def test_a_fragment_whose_newest_anchor_is_the_base_has_nothing_to_inherit():
    all_of, keeper = found({0: {3}, 1: {2}}, {0: 3, 1: 1}, {0: [(3, 3)], 1: [(2, 2)]})
    assert all_of == {1: [update(1, 2, 2)]} and keeper.asked == []


def test_what_is_not_kept_any_more_is_left_out():
    all_of, _ = found({0: {5}}, {0: 2}, {0: [(3, 3), (4, 4), (5, 5)]})
    assert all_of == {0: [update(0, 5, 5)]}
    # The newest stands for a round of which nothing is left.
    assert made_by(all_of[0], 3).version == 5


def test_a_commit_that_does_not_say_which_round_made_what_gives_the_newest():
    all_of, _ = found({0: {4, 5}}, {0: 3}, {})
    assert all_of == {0: [update(0, 5)]} and made_by(all_of[0], 4).version == 5


def test_a_position_keeps_which_round_made_which_version():
    position = Position()
    for round_, version in [(1, 1), (2, 2), (4, 3)]:
        position.moved(0, round_, version, kept=2)
    snapshot = position.snapshot(4, ())
    again = Position.resume(4, 0, {0: 3}, {}, snapshot.counters)
    assert position.made == again.made == {0: [(2, 2), (4, 3)]}
