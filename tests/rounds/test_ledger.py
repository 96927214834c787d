"""The ledger: leases, credits, returns, and the balance that must always hold."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.outer.layout import Range, total
from ray_diloco.rounds.ledger import Ledger


def test_returned_blocks_are_issued_again_lowest_first():
    ledger = Ledger("text")
    a, b, c = ledger.lease(4), ledger.lease(4), ledger.lease(4)
    ledger.release(b)
    ledger.credit(a)
    ledger.release(c)
    assert ledger.lease(6).blocks == (Range(4, 10),)
    assert ledger.lease(6).blocks == (Range(10, 16),)


def test_a_lease_lands_once():
    ledger = Ledger("text")
    lease = ledger.lease(2)
    ledger.credit(lease)
    for land in (ledger.credit, ledger.release):
        with pytest.raises(ValueError, match="lease 1 of text is not in flight"):
            land(lease)


def test_what_was_in_flight_when_a_run_stopped_is_issued_again():
    ledger = Ledger("text")
    a, _, c = ledger.lease(3), ledger.lease(3), ledger.lease(3)
    ledger.credit(a)
    ledger.credit(c)
    again = Ledger.from_json(ledger.to_json())
    assert again.lease(4).blocks == (Range(3, 6), Range(9, 10))


@given(st.lists(st.tuples(st.sampled_from(["lease", "credit", "release", "restart"]), st.integers(1, 9))))
def test_every_block_is_credited_at_most_once_and_none_is_lost(actions):
    ledger, flying, credited = Ledger("text"), [], []
    for action, n in actions:
        if action == "lease":
            flying.append(ledger.lease(n))
        elif action == "restart":
            ledger, flying = Ledger.from_json(ledger.to_json()), []
        elif flying:
            lease = flying.pop(n % len(flying))
            getattr(ledger, action)(lease)
            if action == "credit":
                credited += [v for r in lease.blocks for v in range(r.start, r.stop)]
        assert ledger.balanced()
    assert len(credited) == len(set(credited)) == total(ledger.credited)
    rest = ledger.lease(ledger.issued + 1).blocks
    in_flight = {v for lease in flying for r in lease.blocks for v in range(r.start, r.stop)}
    assert not in_flight & {v for r in rest for v in range(r.start, r.stop)}


indices = st.frozensets(st.integers(0, 40))


@given(st.lists(indices), st.integers(1, 30))
def test_a_ledger_of_many_holes_issues_credits_and_counts_as_a_set_would(parts, count):
    ledger, credited = Ledger("text"), set()
    leases = [ledger.lease(1) for _ in range(41)]
    for part in parts:
        for index in sorted(part - credited, key=lambda k: (k * 7) % 41):
            ledger.credit(leases[index])
        credited |= part
        assert {v for r in ledger.credited for v in range(r.start, r.stop)} == credited
        assert all(a.stop < b.start for a, b in pairwise(ledger.credited))
    missing = [k for k in range(41) if k not in credited]
    for index in missing[::-1]:
        ledger.release(leases[index])
    again = [v for r in ledger.lease(count).blocks for v in range(r.start, r.stop)]
    assert again == [*missing, *range(41, 41 + count)][:count]
