"""The loop's own time, and waiting for tasks."""

from __future__ import annotations

import asyncio
from typing import Any


def now() -> float:
    """Seconds of the event loop's clock, which a virtual loop makes virtual."""
    return asyncio.get_running_loop().time()


async def settled(tasks: set[asyncio.Task[Any]]) -> None:
    """Returns when all tasks have ended, well or not."""
    if tasks:
        await asyncio.wait(set(tasks))
