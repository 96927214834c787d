"""When fragments are due, as a function of the step alone."""

from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.outer.schedule import Boundary, Course, Due, Lane, Schedule, Stage


def at(step, emits, adopts, early=()):
    return Boundary(step, (Stage(emits, adopts),), early)


def test_one_fragment_without_delay_is_emitted_and_adopted_every_h_steps():
    assert Schedule(5, 3).boundaries() == [at(5 * k, (Due(0, k),), (Due(0, k),)) for k in (1, 2, 3)]


def test_a_run_that_goes_on_has_the_boundaries_that_are_left():
    assert Schedule(5, 4).boundaries(10) == Schedule(5, 4).boundaries()[2:]


def test_fragments_take_turns_and_come_back_after_the_delay_but_not_after_the_last_emission():
    assert Schedule(4, 1, offsets=(0, 2), delay=1).boundaries() == [
        at(4, (Due(0, 1),), ()),
        at(5, (), (Due(0, 1),)),
        at(6, (Due(1, 1),), (), early=(Due(1, 1),)),
    ]


def test_with_a_delay_of_a_round_the_last_boundary_adopts_early_what_is_still_under_way():
    assert Schedule(4, 3, delay=4).boundaries() == [
        at(4, (Due(0, 1),), ()),
        at(8, (Due(0, 2),), (Due(0, 1),)),
        at(12, (Due(0, 3),), (Due(0, 2),), early=(Due(0, 3),)),
    ]


def test_another_h_counts_from_where_the_run_stood():
    # Three rounds of 20 are over; two of 50 follow.
    later = Schedule(50, 5, origin=(3, 60))
    assert [(b.step, b.adopts) for b in later.boundaries(60)] == [(110, (Due(0, 4),)), (160, (Due(0, 5),))]


def test_a_faster_channel_acts_first_at_a_common_step():
    found = Schedule(4, 1, lanes=(Lane(2),)).boundaries()
    fast, slow = (Due(1, 2),), (Due(0, 1),)
    assert found == [at(2, (Due(1, 1),), (Due(1, 1),)), Boundary(4, (Stage(fast, fast), Stage(slow, slow)))]


def test_a_course_finds_segments_and_rounds_of_a_run_that_goes_on():
    course = Course(Schedule(4, 3, delay=1), 8)
    assert [course.boundary(k).step for k in (1, 2)] == [9, 12] and course.over(3)
    assert (course.begin(1), course.begin(2)) == (8, 9)
    assert course.emission(Due(0, 2)) == 0
    assert course.emission(Due(0, 3)) == 2


@given(st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(0, 19), min_size=1, max_size=4), st.integers(0, 9))
def test_every_round_of_every_fragment_is_emitted_once_and_adopted_after_the_delay(H, rounds, offsets, delay):
    schedule = Schedule(H, rounds, tuple(offsets), delay)
    found = schedule.boundaries()
    emitted = {due: b.step for b in found for due in b.emits}
    adopted = {due: b.step for b in found for due in b.adopts}
    every = {Due(p, k) for p in range(len(offsets)) for k in range(1, rounds + 1)}
    assert emitted.keys() == adopted.keys() == every
    assert all(adopted[due] == min(emitted[due] + delay, max(emitted.values())) for due in every)
    assert all(schedule.emission_step(due) == emitted[due] for due in every)
    assert sum(len(b.emits) for b in found) == len(every)
