"""Says at the start of a run what a round of it is expected to be, without keeping the run waiting.

The first anchor shard reckons it, beside its own work: it has torch and the model's layout, which the driver lacks.
What goes wrong with it is a warning.
"""

from __future__ import annotations

import asyncio

from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.calls import ActorFailed, answer
from ray_diloco.config.schema import Config
from ray_diloco.errors import DilocoError
from ray_diloco.rounds.ports import Journal

# Seconds between two looks whether the anchor is there.
LOOK_S = 0.25


async def announce(config: Config, anchor: RayAnchor, journal: Journal, said: bool) -> None:
    """Waits for the anchor, as long as its run does, and writes what is expected to the tape.

    `said`: a driver before has written it; its islands wait for the next round, and reckoning would take time from it.
    """
    if said:
        return
    while anchor.layout is None:
        await asyncio.sleep(LOOK_S)
    asked = anchor.first_shard.expect.remote(config)
    try:
        found = await answer(asked, "reckoning what a round will be", config.deadlines.exchange_s)
    except (ActorFailed, DilocoError) as failed:
        journal.event("warning", text=f"what a round will be is not known: {failed}")
        return
    journal.event("run_expected", **found)
