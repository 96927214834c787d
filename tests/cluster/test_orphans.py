"""A rank to which no driver speaks any more ends itself; nothing of a run stays on a cluster that lives on."""

import types

import pytest

from ray_diloco.cluster import rank
from ray_diloco.cluster.fence import fenced
from ray_diloco.cluster.misfortune import NO_FAULTS
from ray_diloco.errors import ClusterError


class Ended(BaseException):
    """The process has ended."""


def test_a_rank_ends_itself_so_long_after_the_newest_driver_has_spoken(monkeypatch):
    clock, waits = [0.0], []
    job = types.SimpleNamespace(folders=(), faults=NO_FAULTS, incarnation=0, orphan_s=0.0)
    monkeypatch.setattr(rank.time, "monotonic", lambda: clock[0])
    orphan = fenced(rank.Rank)(job, 0)

    def wait(event, seconds):
        waits.append(seconds)
        if len(waits) == 1:
            # Spoken to by its driver, and then by one that this driver has succeeded.
            clock[0] = 20.0
            orphan.progress(epoch=2)
            clock[0] = 25.0
            with pytest.raises(ClusterError, match="RD-224"):
                orphan.progress(epoch=1)
        clock[0] = sum(waits)

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(rank.threading.Event, "wait", wait)
    monkeypatch.setattr(rank.os, "_exit", end)
    job.orphan_s = 30.0
    with pytest.raises(Ended, match=str(rank.ORPHANED)):
        orphan._end_as_orphan()
    assert waits == [30.0, 20.0], "what a superseded driver says does not count"
