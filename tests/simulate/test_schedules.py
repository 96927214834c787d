"""Ten thousand random runs, each with its own algorithm, world and faults, held to what must always hold."""

import pytest

from ray_diloco.simulate.schedules import VARIANTS, setup_of, try_seed, world_of
from ray_diloco.simulate.world import World

SEEDS, CHUNKS = 10_000, 50


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_runs_keep_what_must_always_hold(chunk: int) -> None:
    verdicts = [try_seed(seed) for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS)]
    failed = [(verdict.command, verdict.variant, verdict.blamed[0]) for verdict in verdicts if verdict.blamed]
    assert not failed, "\n".join("  ".join(row) for row in failed)
    finished = sum(verdict.ending is not None and verdict.ending.status == "finished" for verdict in verdicts)
    assert finished > 0.9 * len(verdicts)


def test_a_seed_is_the_same_run_to_the_last_bit() -> None:
    for seed in range(12):
        (_, one), (_, other) = world_of(seed), world_of(seed)
        one.run()
        other.run()
        assert one.events == other.events
        assert one.store.commits.keys() == other.store.commits.keys()
        tables = [{key: kept.anchor.tobytes() for key, kept in world.anchor.table.items()} for world in (one, other)]
        assert tables[0] == tables[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_without_faults_finishes_in_one_life_without_a_loss(variant: str) -> None:
    for islands in (2, 4):
        world = World(setup_of(variant, islands))
        assert world.run().status == "finished"
        assert world.auditor is not None
        assert world.auditor.blamed == []
        assert world.life == 0
        unusual = {"island_lost", "round_aborted", "contribution_rejected"} & {event.kind for event in world.events}
        # Who comes after its round has closed is refused there.
        assert unusual <= ({"contribution_rejected"} if variant in ("carry", "rebase", "robust") else set())
