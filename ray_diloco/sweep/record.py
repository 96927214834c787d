"""What is known of the trials of a sweep: `trials.jsonl`, a line for every change; the last one of a trial counts.

Tune keeps no state of its own that a sweep goes on from.  A trial is a run, which goes on from its last commit, and how
it ended stands here and in the run's own files; so the same command goes on whatever ended the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_diloco.observe.lines import LineFile, read_lines

FILE = "trials.jsonl"
# What a trial can be.  Decided ones are not run again; failed ones are, since a machine may have been at fault.
BEGUN, STOPPED, FAILED = "begun", "stopped", "failed"
FINISHED, HALTED, DIVERGED, REFUSED = "finished", "halted", "diverged", "refused"
DECIDED = (FINISHED, HALTED, DIVERGED, REFUSED)


@dataclass(frozen=True)
class Entry:
    """The newest word on a trial.

    Attributes:
      reason: why it was halted, diverged, failed or refused.
      loss: its newest held-out loss, nats per token; `tokens`: after so many.
    """

    label: str
    parameters: dict[str, Any]
    status: str
    reason: str | None = None
    loss: float | None = None
    tokens: int = 0


class Record:
    """The trials of a sweep.

    Args:
      folder: of the sweep.

    Raises:
      CheckpointError: RD-580 or RD-581, its file cannot be opened or is broken.
    """

    def __init__(self, folder: Path) -> None:
        self._file = LineFile(folder / FILE)
        self.entries = read_record(folder)

    def note(self, label: str, parameters: Mapping[str, Any], status: str, **more: Any) -> Entry:
        """Writes what a trial has become."""
        entry = Entry(label, dict(parameters), status, **more)
        # What is the same again says nothing.
        if self.entries.get(label) != entry:
            self.entries[label] = entry
            self._file.append(vars(entry))
        return entry

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_record(folder: Path) -> dict[str, Entry]:
    """The newest word on each trial, in the order in which they were first spoken of."""
    entries: dict[str, Entry] = {}
    for line in read_lines(folder / FILE):
        entries[line["label"]] = Entry(**line)
    return entries
