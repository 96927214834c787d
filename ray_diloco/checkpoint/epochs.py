"""Epochs: which driver of a run may commit.

Every driver takes the next number when it begins, a file of its own below `checkpoints/epochs/`.  Who finds a higher
number there than its own has been succeeded, and its commits are refused: a driver that was cut off or stopped for a
while must not write over what its successor does.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass

from ray_diloco.checkpoint.files import Files, storage_errors
from ray_diloco.checkpoint.names import FOLDER
from ray_diloco.errors import CheckpointError

EPOCHS = f"{FOLDER}/epochs"
# Number of the error that a driver has been succeeded.
SUCCEEDED = 565
# So many are left lying, for people who ask who has driven a run.
KEPT = 8


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run, in the storage of its commits."""

    files: Files
    url: str

    def newest(self) -> int:
        """Number of the newest epoch; 0: there was none.  Raises CheckpointError 503 to 506."""
        return max(self._all(), default=0)

    def claim(self) -> int:
        """Begins a new epoch, the caller's; returns its number.  Raises CheckpointError 503 to 506."""
        past = self._all()
        epoch = max(past, default=0) + 1
        holder = {"epoch": epoch, "host": socket.gethostname(), "process": os.getpid(), "since": time.time()}
        with storage_errors(f"begin epoch {epoch}", self.url):
            self.files.write(_path(epoch), [json.dumps(holder).encode()])
            for old in past[:-KEPT]:
                self.files.remove(_path(old))
        return epoch

    def check(self, epoch: int) -> None:
        """Sees that an epoch is still the newest.

        Raises:
          CheckpointError: 565, another driver has taken over; 503 to 506.
        """
        newest = self.newest()
        if newest > epoch:
            raise CheckpointError(
                565,
                f"this driver is of epoch {epoch}, and one of epoch {newest} has taken over the run in {self.url}",
                "nothing: this driver ends and its successor goes on",
            )

    def _all(self) -> list[int]:
        with storage_errors("list the epochs", self.url):
            return sorted(int(name) for name in self.files.entries(EPOCHS) if name.isdecimal())


def _path(epoch: int) -> str:
    return f"{EPOCHS}/{epoch:06d}"
