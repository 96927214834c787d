"""Bugs in the run loop that random schedules have found, each as the few calls that it takes."""

from typing import Any

import pytest

from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.faults import Fault, FaultPlan
from ray_diloco.rounds.ledger import Ledger
from ray_diloco.rounds.members import Member, State
from ray_diloco.rounds.own_pace import FreePlans
from ray_diloco.rounds.plans import Halt, Plans
from ray_diloco.rounds.position import Claim, Position
from ray_diloco.simulate.conditions import Conditions, LinkSpeed
from ray_diloco.simulate.schedules import changed, setup_of
from ray_diloco.simulate.world import Steer, World


class Nobody:
    """A journal that nobody reads."""

    def event(self, kind: str, **fields: Any) -> None:
        """Keeps nothing."""


def planner(kind: type, variant: str) -> tuple[Any, dict[str, Member], Position]:
    position = Position(ledgers={"blocks": Ledger("blocks")})
    rules = setup_of(variant, 2).rules(position)
    members = {name: Member(name, 0, State.READY) for name in ("i0", "i1")}
    plans = kind(rules, position, members, Nobody())
    for name in members:
        plans.launched(name)
    return plans, members, position


def test_a_segment_is_not_over_before_all_that_is_emitted_after_it_is_concluded() -> None:
    # Seed 107417: a fast island concluded the first fragment of the last round and was lost before the others.  The
    # slow one took the segment for over and waited for the end of the run, which nobody could bring about.
    plans, members, position = planner(Plans, "bins")
    last = setup_of("bins", 2).config.run.rounds
    for round_ in range(1, last + 1):
        assert plans.take(members["i1"], Halt()) is not None
        plans.concluded(Due(0, round_))
        assert not plans.over(members["i0"])
        assert plans.take(members["i0"], Halt()) is not None
        plans.concluded(Due(1, round_))
        plans.concluded(Due(2, round_))
    assert plans.over(members["i0"])
    assert position.round == last


def test_a_round_that_has_a_number_is_not_trained_for_again_when_its_island_is_lost() -> None:
    # Seeds 106436 and 109792: a loss between the number of a round and its merge freed a place that was still taken,
    # and the run had one round too many.
    plans, members, position = planner(FreePlans, "reanchored")
    rounds = 2 * setup_of("reanchored", 2).config.run.rounds
    for number in range(1, rounds + 1):
        assert plans.take(members["i0"], Halt()) is not None
        fragments = range(setup_of("reanchored", 2).fragments)
        dues = [plans.numbered(Due(fragment, 0), "i0") for fragment in fragments]
        assert dues == [Due(fragment, number) for fragment in fragments]
        if number == rounds:
            plans.withdraw("i0")
            assert plans.take(members["i1"], Halt()) is None
        for due in dues:
            plans.concluded(due)
    assert position.round == rounds


def test_nobody_trains_towards_a_round_again_that_a_lost_island_has_offered_to() -> None:
    # Seed 18848: all islands were lost while an offer of the second fragment was merged.  A successor began with the
    # segment before and offered the same once more; its refusal took away what the first was to be credited with.
    plans, members, position = planner(Plans, "streaming")
    for segment in (1, 2, 3):
        assignment = plans.take(members["i0"], Halt())
        assert assignment is not None and assignment.work.segment == segment
    first, second = Due(0, 1), Due(1, 1)
    position.claims[second, "i0", 0] = Claim((), 2, 2)
    plans.concluded(first)

    members |= {name: Member(name, 1, State.READY) for name in members}
    assert plans.take(members["i0"], Halt()) is None, "its predecessor's offer is not merged yet"
    del position.claims[second, "i0", 0]
    plans.concluded(second)
    again = plans.take(members["i0"], Halt())
    assert again is not None and again.work.segment == 4


def test_nobody_who_joins_trains_towards_a_round_that_its_slot_has_offered_to() -> None:
    # Seed 11413: an island was drained when it had offered to the second fragment.  The other one had its segments
    # still before it; the successor was given one of them too and offered again, in the place of the first offer,
    # whose blocks were neither credited nor issued again.
    plans, members, position = planner(Plans, "streaming")
    for segment in (1, 2):
        assignment = plans.take(members["i0"], Halt())
        assert assignment is not None and assignment.work.segment == segment
    assert plans.take(members["i1"], Halt()) is not None
    position.claims[Due(1, 1), "i1", 0] = Claim((), 2, 2)
    members["i1"] = Member("i1", 1, State.READY)

    last = plans.take(members["i0"], Halt())
    assert last is not None and last.work.segment == 3
    assert plans.take(members["i1"], Halt()) is None
    del position.claims[Due(1, 1), "i1", 0]
    plans.concluded(Due(0, 1))
    plans.concluded(Due(1, 1))
    for member in members.values():
        again = plans.take(member, Halt())
        assert again is not None and again.work.segment == 4


@pytest.mark.parametrize("repair_s", [1.0, 3.0, 4.5])
@pytest.mark.parametrize("islands", [2, 3, 4])
def test_two_rounds_of_a_fragment_that_close_in_one_moment_are_concluded_in_their_order(
    islands: int, repair_s: float
) -> None:
    # Seed 113472: with a lag, two rounds had waited for a lost island when its successor had nothing to go on with.
    # The second one got the turn and waited for the first, which waited for the turn.
    setup = changed(setup_of("lag", islands, 2), checkpoint={"progress_every": 1, "progress_wait_s": 60.0})
    conditions = Conditions(
        step_s=1.0, spread=0.0, jitter=0.0, launch_s=1.0, repair_s=repair_s, detect_s=0.0, merge_s=0.01, commit_s=1.0
    )
    world = World(setup, conditions, FaultPlan((Fault("exit", "i0", 1, "mid_send"),)))
    ending = world.run()
    assert (ending.status, ending.error) == ("finished", None)
    assert world.auditor is not None and not world.auditor.blamed
    committed = [event.fields["round"] for event in world.events if event.kind == "round_committed"]
    assert committed == [1, 2]


def test_a_progress_point_is_not_taken_up_by_who_has_not_trained_what_came_before_it() -> None:
    # Seed 688153: a late island went on with what it had trained besides, as rebase lets it.  The run was lost
    # and went on from a commit; the island's successor took up a point with that work in it, whose blocks others had.
    setup = changed(setup_of("rebase", 2, 3), checkpoint={"progress_every": 1, "progress_wait_s": 3.0})
    link = LinkSpeed(0.05, 100.0, 100.0)
    times = {"repair_s": 0.0, "detect_s": 0.0, "silence_s": 5.0, "exchange_s": 20.0, "merge_s": 2.0, "write_s": 0.5}
    conditions = Conditions(688153, 1.0, spread=0.8, jitter=0.2, link=link, launch_s=0.1, restart_s=1.0, **times)
    world = World(setup, conditions, FaultPlan((Fault("exit", "shard:0", 3, "after_commit"),)))
    assert world.run().status == "finished"
    assert world.auditor is not None and not world.auditor.blamed


@pytest.mark.parametrize("drained_at", [12.0, 12.072])
def test_what_a_round_beyond_the_last_was_to_be_credited_with_is_in_flight_no_more(drained_at: float) -> None:
    # Seed 653032: islands that train at their own pace had left between two fragments, so that one fragment had a round
    # more than the run; it was merged when the run ended, and its blocks stayed in flight.
    setup = changed(setup_of("reanchored", 3, 2), islands={"drain_s": 0.5, "away_s": 5.0})
    times = {"launch_s": 0.1, "repair_s": 0.0, "detect_s": 0.0, "merge_s": 2.0, "commit_s": 0.0, "write_s": 0.0}
    conditions = Conditions(0, 0.1, spread=0.0, jitter=0.0, link=LinkSpeed(0.0, 100.0, 100.0), **times)
    leave = [Steer(1.188, "i2", returns=True), Steer(drained_at, "i1", returns=True)]
    world = World(setup, conditions, FaultPlan(()), [], leave)
    assert world.run().status == "finished"
    assert world.auditor is not None and not world.auditor.blamed
