"""What the run loop does for a contribution does not grow with the number of islands."""

import cProfile
import pstats
from dataclasses import replace

import pytest

from ray_diloco.simulate.conditions import Conditions
from ray_diloco.simulate.schedules import changed, setup_of
from ray_diloco.simulate.world import World


def calls_per_contribution(variant: str, islands: int) -> float:
    setup = changed(
        setup_of(variant, 3), islands={"count": islands, "max": islands}, run={"rounds": 2}, evaluate={"every": 0}
    )
    world = World(replace(setup, heldout=0), Conditions(spread=0.2), audited=False, keep_events=False)
    profile = cProfile.Profile()
    assert profile.runcall(world.run).status == "finished"
    assert world.figures.contributions == 2 * islands
    return pstats.Stats(profile).total_calls / world.figures.contributions


@pytest.mark.parametrize("variant", ["wait", "async"])
def test_calls_per_contribution_are_the_same_for_twenty_and_a_hundred_islands(variant: str) -> None:
    assert calls_per_contribution(variant, 100) < 1.3 * calls_per_contribution(variant, 20)
