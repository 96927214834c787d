"""Writing beside training: one write in flight, its outcome a value.

A commit that cannot be written must not stop a run, and one that is slow must not queue up behind itself: a second
write is refused while the first one runs, and the caller decides what that means.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WriteResult:
    """How a write ended.

    Attributes:
      label: what `start` was told.
      value: what the write returned; None if it failed.
      error: what it raised; None if it succeeded.
      seconds: how long it took.
    """

    label: str
    value: Any
    error: BaseException | None
    seconds: float


class BackgroundWriter:
    """Runs one write at a time in a thread.  Safe to use from several threads.

    The thread does not keep a process alive: a write that hangs on a dead storage ends with the process, and a commit
    that was not finished is not visible.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._results: list[WriteResult] = []

    @property
    def busy(self) -> bool:
        """Whether a write is in flight."""
        return not self._idle.is_set()

    def start(self, label: str, write: Callable[[], Any]) -> bool:
        """Starts a write; False, and nothing is started, while another is in flight.

        Args:
          label: names it in its result.
          write: called once in another thread; what it reads must not change until it has ended.
        """
        with self._lock:
            if self.busy:
                return False
            self._idle.clear()
        threading.Thread(target=self._run, args=(label, write), name=f"write {label}", daemon=True).start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False if that takes longer than `timeout_s` seconds."""
        return self._idle.wait(timeout_s)

    def collect(self) -> list[WriteResult]:
        """The results since the last call, in the order in which the writes ended.  Does not wait."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def _run(self, label: str, write: Callable[[], Any]) -> None:
        began = time.perf_counter()
        value, error = None, None
        try:
            value = write()
        except BaseException as raised:  # nobody stands above this thread; whatever it was, the caller judges it
            error = raised
        with self._lock:
            self._results.append(WriteResult(label, value, error, time.perf_counter() - began))
            self._idle.set()
