"""Rounds that are laid out as a run goes: their length, the order of their fragments, and what is due when."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.outer.pace import Leg, Note, Pace, by_loss, by_rate
from ray_diloco.outer.schedule import Course, Due, PacedCourse, Schedule, course_of


def test_a_round_is_shorter_by_the_root_of_the_part_of_the_loss_that_is_left():
    assert by_loss(20, None, 0) == 20
    assert by_loss(20, (4.0, 1.0), 100) == 10
    assert by_loss(20, (4.0, 1.1), 100) == 11, "20 · √0.275 = 10.49, and up"
    assert by_loss(20, (4.0, 0.0), 100) == 1


def test_a_round_is_longer_by_the_square_of_the_part_of_the_rate_that_is_left():
    length = by_rate({0: 0.01, 50: 0.004, 90: 0.0}.__getitem__, 0.02)
    assert length(4, None, 0) == 4
    assert length(4, None, 50) == 25
    assert length(4, None, 90) == 4, "a rate of nothing says nothing"


@pytest.mark.parametrize(("least", "most", "expected"), [(1, 0, 10), (12, 0, 12), (1, 7, 7)])
def test_rounds_stay_within_bounds(least, most, expected):
    notes = [Note(0, 1, 4.0, 0.1), Note(0, 2, 2.0, 0.1), Note(0, 3, 1.0, 0.1)]
    assert Pace(by_loss, least, most).H(20, notes, 60) == expected


def test_what_changes_faster_goes_first_and_the_unknown_before_all():
    notes = [Note(0, 1, 1.0, 0.5), Note(2, 1, 1.0, 0.9), Note(0, 2, 1.0, 1.5)]
    assert Pace(priority=True).order(4, notes) == [1, 3, 0, 2]
    assert Pace().order(4, notes) == [0, 1, 2, 3]


def test_fragments_take_the_turns_of_their_order_and_the_last_one_closes_the_round():
    legs, notes = [], []
    course = PacedCourse(Schedule(6, 3, (0, 2, 4)), Pace(priority=True), 0, 0, legs, notes)
    assert [steps(course, n) for n in (1, 2, 3)] == [(6, 0), (8, 1), (10, 2)]
    notes += [Note(0, 1, 1.0, 0.1), Note(1, 1, 1.0, 0.3), Note(2, 1, 1.0, 0.2)]
    assert [steps(course, n) for n in (4, 5, 6)] == [(12, 1), (14, 2), (16, 0)]
    assert legs[-1] == Leg(2, (16, 12, 14))
    assert legs[-1].closing == 0
    assert not course.over(9), "three turns of the last round are left"


def steps(course, number):
    assert course.reaches(number)
    boundary = course.boundary(number)
    (due,) = boundary.emits
    return boundary.step, due.fragment


@st.composite
def settings(draw):
    """A schedule, and the seed of what its rounds come to."""
    fragments = draw(st.integers(1, 4))
    H = draw(st.integers(fragments, 12))
    spread = draw(st.booleans())
    delay, lag = draw(st.integers(0, H - 1)), draw(st.integers(0, 2))
    offsets = tuple(p * H // fragments if spread else 0 for p in range(fragments))
    return Schedule(H, draw(st.integers(1, 7)), offsets, delay + lag * H), draw(st.integers(0, 10**6))


@given(settings())
def test_a_pace_that_changes_nothing_gives_the_boundaries_of_the_schedule(found):
    schedule, _ = found
    course, plain = PacedCourse(schedule, Pace(), 0, 0, [], []), Course(schedule, 0)
    count = len(schedule.boundaries())
    assert course.reaches(count) and not course.reaches(count + 1) and course.over(count + 1)
    assert [course.boundary(n) for n in range(1, count + 1)] == schedule.boundaries()
    every = [Due(p, k) for p in range(schedule.main) for k in range(1, schedule.rounds + 1)]
    assert [course.emission(due) for due in every] == [plain.emission(due) for due in every]


@given(settings())
def test_every_round_is_emitted_and_adopted_once_in_order_whatever_the_pace(found):
    schedule, seed = found
    boundaries, _ = walked(schedule, seed, 0, 0, [], [])
    every = sorted((k, p) for p in range(schedule.main) for k in range(1, schedule.rounds + 1))
    emitted = {due: b.step for b in boundaries for due in b.emits}
    adopted = [(due, b.step) for b in boundaries for due in b.adopts]
    assert sorted((due.round, due.fragment) for due in emitted) == every
    assert sorted((due.round, due.fragment) for due, _ in adopted) == every
    assert all(step >= emitted[due] for due, step in adopted)
    for p in range(schedule.main):
        mine = [emitted[Due(p, k)] for k in range(1, schedule.rounds + 1)]
        assert mine == sorted(set(mine))


@given(settings(), st.data())
def test_a_course_that_goes_on_from_any_round_is_that_of_a_run_without_a_stop(found, data):
    schedule, seed = found
    stop, legs, notes = data.draw(st.integers(1, schedule.rounds)), [], []
    straight, _ = walked(schedule, seed, 0, 0, [], [])
    _, at = walked(schedule, seed, 0, 0, legs, notes, stop)
    rest, _ = walked(schedule, seed, at, stop, legs, notes)
    assert rest == [boundary for boundary in straight if boundary.step > at]


def walked(schedule, seed, start, round_, legs, notes, stop=None):
    """The boundaries from `start` to the end, or to the end of round `stop`; what rounds come to is random."""

    def length(H, losses, step):
        return random.Random(seed * 1009 + step).randint(1, 2 * H)

    pace = Pace(length, priority=True)
    course, found = PacedCourse(schedule, pace, start, round_, legs, notes), []
    while course.reaches(len(found) + 1):
        found.append(course.boundary(len(found) + 1))
        for due in found[-1].emits:
            # Committed at once: a course must not look at what not all islands can have adopted.
            rate = random.Random(f"{seed} {due.fragment} {due.round}").random()
            notes.append(Note(due.fragment, due.round, 1.0, rate))
            if due.round == stop and any(leg.round == stop and leg.closing == due.fragment for leg in legs):
                return found, found[-1].step
    return found, None


def test_a_run_whose_rounds_were_alike_goes_on_at_a_pace():
    schedule = Schedule(6, 4, (0, 3), 2, pace=Pace())
    course = course_of(schedule, 15, 2, [], [])
    plain = Course(Schedule(6, 4, (0, 3), 2), 15)
    assert [course.boundary(n) for n in range(1, 5) if course.reaches(n)] == [plain.boundary(n) for n in range(1, 5)]
