"""Waiting for Ray: every wait has a deadline and a name, and every failure of an actor becomes one of two things.

`ActorFailed` says that the process or its call broke: whoever owns the actor replaces it.  An error that a user can
mend (`DilocoError`) passes through as it was raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ray_diloco.errors import DilocoError

# Called with the number of a call when its answer has come.
Heard = Callable[[int], None]


class ActorFailed(Exception):
    """A remote call did not return; the text says which and why, `cause` is what Ray raised."""

    def __init__(self, text: str, cause: BaseException | None = None) -> None:
        super().__init__(text)
        self.cause = cause


def actor(cls: type, **options: Any) -> Any:
    """Makes an actor class of a plain one.  Nothing restarts or repeats by itself: owners decide."""
    return ray.remote(max_restarts=0, max_task_retries=0, **options)(cls)


async def answer(ref: ray.ObjectRef[Any], what: str, deadline_s: float | None) -> Any:
    """The value behind a reference.

    Args:
      ref: result of a remote call.
      what: the call in words, for the error.
      deadline_s: seconds after which the call counts as failed; None: somebody else watches it.

    Raises:
      ActorFailed: the actor died, its call raised, or the deadline passed.
      DilocoError: the call raised one.
    """
    try:
        # Not `asyncio.wait_for`: in Python 3.11 it forgets that it was cancelled where the answer comes in that moment.
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(ref.future())
    except TimeoutError:
        raise ActorFailed(f"{what} gave no answer within {deadline_s:g} s") from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, DilocoError):
            raise cause from None
        raise ActorFailed(f"{what} failed: {_first_line(cause or error)}", cause) from None
    except RayError as error:
        raise ActorFailed(f"{what} failed: {_first_line(error)}", error) from None


async def answers(
    refs: Iterable[ray.ObjectRef[Any]],
    what: str,
    deadline_s: float | None,
    heard: Heard | None = None,
) -> list[Any]:
    """All values, in order; raises as soon as the first call fails, without waiting for the rest."""

    async def one(number: int, ref: ray.ObjectRef[Any]) -> Any:
        value = await answer(ref, what, deadline_s)
        if heard is not None:
            heard(number)
        return value

    return await first_failure(*(one(number, ref) for number, ref in enumerate(refs)))


async def first_failure(*coroutines: Any) -> list[Any]:
    """Like `asyncio.gather`, but ends the others when one raises."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
