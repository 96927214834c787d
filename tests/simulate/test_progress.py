"""Progress points in the simulator: under every algorithm that waits for all, a loss changes when, and not what."""

import pytest

from ray_diloco.rounds.faults import DRIVER, Fault, FaultPlan
from ray_diloco.simulate.conditions import Conditions
from ray_diloco.simulate.schedules import changed, setup_of
from ray_diloco.simulate.world import World

WAITING = ("wait", "seldom", "delay", "lag", "streaming", "eager", "pairs", "fast", "moments")
CONDITIONS = Conditions(step_s=1.0, launch_s=1.0, write_s=0.0)


def sailed(variant: str, *faults: Fault, every: int = 1) -> World:
    setup = changed(setup_of(variant, 3), checkpoint={"progress_every": every, "progress_wait_s": 60.0})
    world = World(setup, CONDITIONS, FaultPlan(faults))
    assert world.run().status == "finished"
    assert world.auditor is not None
    assert world.auditor.blamed == []
    return world


def made(world: World) -> dict[object, bytes]:
    return {key: kept.anchor.tobytes() for key, kept in world.anchor.table.items()}


@pytest.mark.parametrize("variant", WAITING)
def test_a_run_in_which_an_island_died_equals_one_in_which_none_did(variant: str) -> None:
    whole, world = sailed(variant), sailed(variant, Fault("exit", "i1", 2, "mid_inner"))
    kinds = [event.kind for event in world.events]
    if "progress_taken_up" in kinds:
        assert made(world) == made(whole)
        assert world.position.tokens == whole.position.tokens
    else:
        # Its segment had a single step, in whose midst no point can be.
        assert variant in ("streaming", "fast"), kinds
    assert world.figures.trained_steps < whole.figures.trained_steps + 4


@pytest.mark.parametrize("variant", ["wait", "moments", "pairs"])
def test_a_run_whose_driver_died_goes_on_in_the_midst_of_its_round(variant: str) -> None:
    whole, world = sailed(variant), sailed(variant, Fault("driver_exit", DRIVER, 2, "mid_inner"))
    assert world.life == 1
    taken = {event.fields["island"] for event in world.events if event.kind == "progress_taken_up"}
    assert taken == {"i0", "i1", "i2"}
    assert made(world) == made(whole)


def test_what_was_trained_until_the_point_is_not_trained_again() -> None:
    fault = Fault("exit", "i1", 2, "mid_inner")
    lost, kept = sailed("wait", fault, every=0), sailed("wait", fault)
    assert (
        "i1"
        not in next(e for e in lost.events if e.kind == "round_committed" and e.fields["round"] == 2).fields["islands"]
    )
    assert kept.position.tokens - lost.position.tokens == 4 * lost.setup.tokens_per_block
