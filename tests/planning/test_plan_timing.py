"""The time of a round, by hand."""

import pytest

from ray_diloco.planning.timing import Link, Load, Site, Speeds, bandwidth_for, exchange_time, round_time

# 1 MB up and 2 MB down at 1 MB/s: an island far away needs 1 + 2 s.
FAST, MEGA = Link(), 1_000_000
NAMES = ("a", "b", "c")


def load(delay=0, times=1.0, up=MEGA, down=2 * MEGA):
    return Load(1000, dict.fromkeys(NAMES, up), down, delay, times)


def sites(link=None, step_s=0.1, steps=10, names=("a", "b")):
    return {name: Site(step_s, steps, link or Link(MEGA, MEGA)) for name in names}


def timed(loads, where, **more):
    return round_time(loads, where, "a", Speeds(), 1, 1, **more)


def test_an_exchange_waits_for_the_link_both_ways():
    # Utilisation 1 s of steps in 1 + 1 + 2 s.
    found = timed([load()], sites())
    assert found.round_s == pytest.approx(4.0)
    assert found.utilisation == pytest.approx(0.25)


def test_the_side_of_the_anchor_carries_the_messages_of_all_others():
    # Two islands send over the one link of a: 2 s up, 4 s down.
    assert timed([load()], sites(names=NAMES)).round_s == pytest.approx(1 + 2 + 4)


def test_steps_made_meanwhile_hide_the_exchange():
    # Ten steps of 0.5 s hide all of it, four leave 1 s.
    assert timed([load(delay=10)], sites(step_s=0.5)).utilisation == 1.0
    assert timed([load(delay=4)], sites(step_s=0.5)).exposed_s["b"] == pytest.approx(1.0)


def test_a_round_is_never_shorter_than_the_link_is_busy():
    # 0.1 s of steps with all of it hidden, but 2 s of messages down in each.
    assert timed([load(delay=1000)], sites(steps=1)).round_s == pytest.approx(2.0)


def test_encoding_and_adopting_stop_an_island_whatever_is_hidden():
    speeds = Speeds(emit=1e-4, merge=3.0, adopt=2e-4)
    exchange = exchange_time(load(), sites(), "a", speeds, shards=1, ranks=2)
    assert exchange.exposed(1e9) == pytest.approx(1000 * 1e-4 / 2 + 1000 * 2e-4)


def test_latency_counts_for_each_message_that_waits_for_another():
    far = {"a": Site(0.1, 10, FAST), "b": Site(0.1, 10, Link(rtt_s=0.09))}
    assert timed([load()], far).exposed_s["b"] == pytest.approx(5 * 0.09)
    # With steps meanwhile, what they do not hide: a report and the next call at emission, and at adoption.
    assert timed([load(delay=5)], far).exposed_s["b"] == pytest.approx(2 * 0.09)
    assert timed([load(delay=5, up=0, down=700_000)], sites(Link(MEGA, MEGA, 0.09))).exposed_s["b"] == pytest.approx(
        0.7 + 5 * 0.09 - 5 * 0.1
    )


def test_the_slowest_island_holds_the_others_up_unless_nobody_waits():
    slow = {"a": Site(0.1, 10, FAST), "b": Site(0.3, 10, FAST)}
    assert timed([load()], slow).utilisation == pytest.approx((1 / 3 + 1) / 2)
    assert timed([load()], slow, free=True).utilisation == 1.0


def test_a_quorum_closes_with_the_islands_that_it_waits_for():
    three = {"a": Site(0.1, 10, FAST), "b": Site(0.2, 10, FAST), "c": Site(0.9, 10, FAST)}
    assert timed([load()], three, quorum=2, grace_s=0.5).round_s == pytest.approx(2.5)


def test_the_bandwidth_for_a_utilisation_is_that_which_the_formula_needs():
    # CU = Hc / (Hc + 8 bits x 3 MB / B): half of 1 s of steps needs 3 MB in 1 s, each way at that rate.
    assert bandwidth_for(0.5, [load()], 0.1, 10, "a") == pytest.approx(3 * MEGA, rel=1e-6)


def test_two_exchanges_in_a_round_are_exposed_twice():
    one, two = (timed([load(times=n)], sites()).exposed_s["b"] for n in (1, 2))
    assert two == pytest.approx(2 * one)
