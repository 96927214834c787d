"""The incident of ft-diloco (users.md): a fresh node, alone for a moment, became the truth and overwrote a trained run.

Evaluation went from 2.4 to 4.0 there.  Here the same happens to every island at once, and nobody founds anything again.
"""

import numpy as np

from ray_diloco.rounds.faults import Fault, FaultPlan
from ray_diloco.simulate.conditions import Conditions
from ray_diloco.simulate.problem import start
from ray_diloco.simulate.schedules import setup_of
from ray_diloco.simulate.world import World

ALONE = Conditions(seed=3, steps_s={"i0": 0.1, "i1": 5.0, "i2": 5.0}, repair_s=20.0, silence_s=5.0)


def anchors_adopted(world: World) -> list[np.ndarray]:
    return [kept.anchor for kept in world.anchor.table.values()]


def test_a_fresh_island_that_is_alone_takes_the_committed_anchor_and_gives_none() -> None:
    # All are lost in round 2; i0 is back first, with the parameters of a new initialisation, and is the whole quorum.
    faults = [Fault("exit", name, 2, "before_inner") for name in ("i0", "i1", "i2")]
    world = World(setup_of("quorum", 3), ALONE, FaultPlan(faults))
    assert world.run().status == "finished"
    assert world.auditor is not None
    assert world.auditor.blamed == []
    assert [e.fields["reason"] for e in world.events if e.kind == "island_lost"] == ["a rank died"] * 3
    versions = [e.fields["version"] for e in world.events if e.kind == "round_committed"]
    assert versions == [1, 2, 3]
    assert all(np.linalg.norm(anchor - start(4)) > 1e-2 for anchor in anchors_adopted(world))


def test_a_new_driver_with_fresh_islands_goes_on_from_the_commit() -> None:
    faults = [Fault("driver_exit", "driver", 3, "before_inner")]
    world = World(setup_of("wait", 3), ALONE, FaultPlan(faults))
    assert world.run().status == "finished"
    assert world.auditor is not None
    assert world.auditor.blamed == []
    assert world.life == 1


def test_a_founding_of_a_run_that_has_a_commit_is_blamed() -> None:
    world = World(setup_of("wait", 3), ALONE)
    world.run()
    world.founding()
    assert world.auditor is not None
    assert world.auditor.blamed == ["a fresh initialisation was made the anchor of a run that has a commit"]
