"""Waiting for Ray: deadlines, and cancellation that comes when the answer does."""

import asyncio
import concurrent.futures

import pytest

from ray_diloco.cluster.calls import ActorFailed, answer
from ray_diloco.simulate.clock import run_virtual


class Ref:
    """A reference as Ray's, to an answer that is yet to come."""

    def __init__(self):
        self.returned = concurrent.futures.Future()

    def future(self):
        return self.returned


@pytest.mark.parametrize("steps", range(6))
def test_a_wait_that_is_cancelled_ends_even_if_the_answer_comes_in_that_moment(steps):
    async def run():
        ref = Ref()
        waits = asyncio.create_task(answer(ref, "a call", 5.0))
        await asyncio.sleep(0)
        ref.returned.set_result(7)
        for _ in range(steps):
            await asyncio.sleep(0)
        heard = waits.cancel()
        await asyncio.wait({waits})
        return heard, waits.cancelled()

    heard, ended = run_virtual(run())
    assert heard == ended, "who is told that it was cancelled must not go on"


def test_an_answer_that_does_not_come_is_a_failure_with_a_name():
    async def run():
        began = asyncio.get_running_loop().time()
        with pytest.raises(ActorFailed, match="a call gave no answer within 5 s") as failed:
            await answer(Ref(), "a call", 5.0)
        return asyncio.get_running_loop().time() - began, failed.value.cause

    assert run_virtual(run()) == (5.0, None)
