"""Simulated links: latency, the narrowest part of the way, the queue at the anchor's side, cuts and slow spells."""

import asyncio
import math

import pytest

from ray_diloco.rounds.ports import IslandLost
from ray_diloco.simulate.clock import Stuck, run_virtual
from ray_diloco.simulate.conditions import LinkSpeed
from ray_diloco.simulate.links import DOWN, UP, Hub, Link

SPEED = LinkSpeed(0.5, 100.0, 50.0)


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    link = Link(SPEED, Hub(LinkSpeed()), 60.0)
    assert link.ready_at(1000, UP, now=7.0) == 7.0 + 0.5 + 10.0
    assert link.ready_at(1000, DOWN, now=7.0) == 7.0 + 0.5 + 20.0


def test_what_all_share_goes_through_one_after_the_other() -> None:
    hub = Hub(LinkSpeed(0.0, 200.0, 0.0))
    links = [Link(SPEED, hub, 60.0) for _ in range(3)]
    assert [link.ready_at(1000, UP, now=0.0) for link in links] == [10.5, 10.5, 15.0]
    assert [link.ready_at(1000, DOWN, now=0.0) for link in links] == [20.5] * 3


def test_a_cut_link_waits_and_a_slow_one_is_slow_for_a_while() -> None:
    link = Link(SPEED, Hub(LinkSpeed()), 60.0)
    link.cut(now=0.0, seconds=5.0)
    link.slow(now=0.0, seconds=30.0, bytes_per_s=10.0)
    assert link.ready_at(100, UP, now=0.0) == 5.0 + 0.5 + 10.0
    assert link.ready_at(100, UP, now=30.0) == 30.0 + 0.5 + 1.0
    link.cut(now=40.0, seconds=0.0)
    assert link.ready_at(100, UP, now=50.0) == math.inf


def test_a_transfer_that_takes_longer_than_the_deadline_costs_the_island() -> None:
    link = Link(SPEED, Hub(LinkSpeed()), 60.0)

    async def send() -> float:
        await link.transfer(5000, UP)
        with pytest.raises(IslandLost, match="no answer within 60 s"):
            await link.transfer(6000, UP)
        return asyncio.get_running_loop().time()

    assert run_virtual(send()) == 50.5 + 60.0


def test_a_loop_whose_tasks_wait_for_one_another_says_so() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="waits for ever"):
        run_virtual(wait())


def test_a_loop_may_begin_later_than_at_zero() -> None:
    async def later() -> float:
        await asyncio.sleep(2.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(later(), start=40.0) == 42.0
