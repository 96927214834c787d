"""Every kind of fault at every point under every policy for late islands: each run ends well and nothing is blamed."""

import itertools

import pytest

from ray_diloco.rounds.faults import DRIVER, ISLAND, PASSES, SHARD, STORAGE, STRIKES, Fault, FaultPlan
from ray_diloco.simulate.conditions import Conditions, LinkSpeed
from ray_diloco.simulate.schedules import setup_of
from ray_diloco.simulate.world import World

POLICIES = ("wait", "quorum", "deadline", "async", "streaming")
TARGETS = {ISLAND: "i0", SHARD: "shard:0", DRIVER: DRIVER, STORAGE: STORAGE}
CASES = [
    (kind, TARGETS[target], phase)
    for kind, targets in STRIKES.items()
    for target in targets
    for phase in PASSES[target]
]
CONDITIONS = Conditions(
    seed=1, spread=0.1, link=LinkSpeed(0.1, 100.0, 100.0), silence_s=5.0, exchange_s=20.0, restart_s=1.0
)


def sailed(policy: str, *faults: Fault) -> tuple[World, list[str]]:
    world = World(setup_of(policy, 3), CONDITIONS, FaultPlan(faults))
    ending = world.run()
    assert (ending.status, ending.error) == ("finished", None)
    assert world.auditor is not None
    assert world.auditor.blamed == []
    return world, [event.kind for event in world.events]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "target"), sorted({(kind, target) for kind, target, _ in CASES}))
def test_a_run_survives_a_fault_at_every_point_and_what_it_commits_is_right(
    policy: str, kind: str, target: str
) -> None:
    for phase in [phase for one, other, phase in CASES if (one, other) == (kind, target)]:
        fault = Fault(kind, target, 2, phase, seconds=3.0, bytes_per_s=4.0 if kind == "slow_link" else 0.0)
        world, events = sailed(policy, fault)
        assert not world.plan, f"{fault} never struck"
        lost = [event for event in world.events if event.kind == "island_lost"]
        if (kind, target) == ("exit", "i0"):
            assert [event.fields["reason"] for event in lost] == ["a rank died"]
        elif kind in ("corrupt_payload", "nan_delta", "stale_epoch"):
            # After the last emission of a round the next one is spoilt.
            assert "contribution_rejected" in events or (policy == "async" and phase == "after_commit")
        elif kind == "driver_exit" or (kind, target) == ("exit", "shard:0"):
            assert world.life == 1
        elif kind == "storage_error":
            assert ("checkpoint_failed" in events) == (phase != "after_commit")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "target", "phase"), [("freeze", "i0", "mid_inner"), ("drop_link", "i0", "mid_send")])
def test_trouble_that_does_not_end_costs_the_island_and_not_the_run(
    policy: str, kind: str, target: str, phase: str
) -> None:
    _, events = sailed(policy, Fault(kind, target, 2, phase))
    assert events.count("island_lost") == 1
    _, events = sailed(policy, Fault(kind, target, 2, phase, seconds=1.0))
    assert events.count("island_lost") == 0


def test_faults_of_two_targets_in_one_round_are_survived() -> None:
    island = [("exit", "i1", phase) for phase in PASSES[ISLAND]]
    others = [
        ("exit", "i2", "mid_inner"),
        ("driver_exit", DRIVER, "before_commit"),
        ("storage_error", STORAGE, "mid_send"),
    ]
    for first, second in itertools.product(island, others):
        sailed("wait", *(Fault(kind, target, 2, phase) for kind, target, phase in (first, second)))


def test_a_driver_that_ends_at_every_point_of_every_round_leaves_the_anchor_of_an_undisturbed_run() -> None:
    straight, _ = sailed("wait")
    faults = [
        Fault("driver_exit", DRIVER, round_, phase, incarnation=life)
        for life, (round_, phase) in enumerate(itertools.product((1, 2, 3), PASSES[DRIVER]))
    ]
    broken, _ = sailed("wait", *faults)
    assert broken.life >= 12
    assert [kept.anchor.tolist() for kept in broken.anchor.table.values()] == [
        kept.anchor.tolist() for kept in straight.anchor.table.values()
    ]


def test_a_commit_whose_files_rot_is_passed_over_for_the_one_before() -> None:
    faults = (Fault("storage_error", STORAGE, 2, "after_commit"), Fault("driver_exit", DRIVER, 3, "mid_inner"))
    world, _ = sailed("wait", *faults)
    closed = [event.fields["round"] for event in world.events if event.kind == "round_committed"]
    assert closed == [1, 2, 2, 3]
