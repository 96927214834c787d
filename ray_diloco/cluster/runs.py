"""Payloads of a few MiB on their way into the object store: in runs that Ray copies at once.

Ray copies what is longer than 1 MiB with six threads that it starts for that copy.  They pay from 32 MiB on; a
payload of 4 MiB is there in half the time, and for half the work, where it goes as several runs of 1 MiB.  Ray lays
the runs down one behind the other, so whoever receives them has one array again, without a copy.
Measured: docs/benchmarks.md, "One outer round".
"""

from __future__ import annotations

from itertools import pairwise
from pickle import PickleBuffer
from typing import Any, SupportsIndex

import numpy as np
from numpy.lib.stride_tricks import as_strided

# Bytes that Ray still copies without threads, and up to where it is quicker to do without them.
RUN, LONGEST = 1 << 20, 16 << 20


class InRuns(np.ndarray):
    """Flat bytes that are pickled as runs; whoever unpickles them gets a plain array, of the same bytes."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if protocol.__index__() < 5:
            return super().__reduce_ex__(protocol)
        return _joined, tuple(PickleBuffer(self.data[at : at + RUN]) for at in range(0, self.nbytes, RUN))


def in_runs(payload: np.ndarray) -> np.ndarray:
    """The payload, uint8 [n], as what an actor should return of it."""
    return payload.view(InRuns) if RUN < payload.nbytes <= LONGEST else payload


def _joined(*runs: Any) -> np.ndarray:
    """One read-only array of runs: a view where they lie one behind the other, else a copy."""
    arrays = [np.frombuffer(run, np.uint8) for run in runs]
    starts = [array.__array_interface__["data"][0] for array in arrays]
    adjacent = all(b - a == RUN for a, b in pairwise(starts))
    # The first run keeps the whole object alive: in the store it is one piece of memory.
    size = sum(array.nbytes for array in arrays)
    whole = as_strided(arrays[0], (size,), (1,)) if adjacent else np.concatenate(arrays)
    whole.flags.writeable = False
    return whole
