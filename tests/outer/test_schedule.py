"""When fragments are due, as a function of the step alone."""

from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.outer.schedule import Boundary, Due, Schedule


def boundaries(schedule, step=0):
    found = []
    while (boundary := schedule.next(step)) is not None:
        found.append(boundary)
        step = boundary.step
    return found


def test_one_fragment_without_delay_is_emitted_and_adopted_every_h_steps():
    assert boundaries(Schedule(5, 3)) == [Boundary(5 * k, (Due(0, k),), (Due(0, k),)) for k in (1, 2, 3)]


def test_a_run_that_goes_on_has_the_boundaries_that_are_left():
    assert boundaries(Schedule(5, 4), 10) == boundaries(Schedule(5, 4))[2:]


def test_fragments_take_turns_and_come_back_after_the_delay():
    assert boundaries(Schedule(4, 1, offsets=(0, 2), delay=1)) == [
        Boundary(4, (Due(0, 1),), ()),
        Boundary(5, (), (Due(0, 1),)),
        Boundary(6, (Due(1, 1),), ()),
        Boundary(7, (), (Due(1, 1),)),
    ]


def test_another_h_counts_from_where_the_run_stood():
    # Three rounds of 20 are over; two of 50 follow.
    later = Schedule(50, 5, origin=(3, 60))
    assert [(b.step, b.adopts) for b in boundaries(later, 60)] == [(110, (Due(0, 4),)), (160, (Due(0, 5),))]


@given(st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(0, 19), min_size=1, max_size=4), st.integers(0, 9))
def test_every_round_of_every_fragment_is_emitted_once_and_adopted_after_the_delay(H, rounds, offsets, delay):
    schedule = Schedule(H, rounds, tuple(offsets), delay)
    emitted = {due: b.step for b in boundaries(schedule) for due in b.emits}
    adopted = {due: b.step for b in boundaries(schedule) for due in b.adopts}
    every = {Due(p, k) for p in range(len(offsets)) for k in range(1, rounds + 1)}
    assert emitted.keys() == adopted.keys() == every
    assert all(adopted[due] - emitted[due] == delay for due in every)
    assert all(schedule.emission_step(due) == emitted[due] for due in every)
    assert sum(len(b.emits) for b in boundaries(schedule)) == len(every)
