"""Progress of anything that may take longer than two seconds: reading, training a tokenizer, tokenising.

A stage reports nothing in its first two seconds and then about once a second, so that a caller can print every
report.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# What is done, in words; bytes of text so far; bytes of text in all (None: unknown).
Progress = Callable[[str, int, int | None], None]

_QUIET_S = 2.0
_INTERVAL_S = 1.0


class Reporter:
    """Hands the progress of one stage after the other to a sink."""

    def __init__(self, sink: Progress | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self.begin("", None)

    def begin(self, what: str, total: int | None) -> None:
        """Starts a stage of `total` bytes (None: unknown)."""
        self._what, self._total, self._done = what, total, 0
        self._next = self._clock() + _QUIET_S
        self._spoke = False

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        self._done += count
        if self._sink is not None and self._clock() >= self._next:
            self._next = self._clock() + _INTERVAL_S
            self._spoke = True
            self._sink(self._what, self._done, self._total)

    def end(self) -> None:
        """The stage is complete: says so if it has said anything before."""
        if self._sink is not None and self._spoke:
            self._sink(self._what, self._done, self._done)
