"""The tape of a run: `events.jsonl`, one line per transition, from which everything else can be derived.

A line is `{"t": unix seconds, "seq": n, "event": kind, …fields}`.  `seq` starts at 0 and goes on over resumes.
`EVENTS` is the whole vocabulary: a kind that is not in it is an error, so that a reader of the tape can rely on the
list.  A process's first event is run_started or run_resumed (or log_repaired).
"""

from __future__ import annotations

import difflib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray_diloco.observe.lines import LineFile
from ray_diloco.observe.narration import narrate
from ray_diloco.observe.view import Level, Note

# kind → what happened (fields that tell more).
EVENTS: dict[str, str] = {
    "run_started": "A run without a commit began (run, islands, rounds).",
    "run_resumed": "A run went on from its newest good commit (run, round, rounds, tokens).",
    "run_expected": "What a round will be, as planned (bytes_up, bytes_down, round_s, train_s); times where known.",
    "log_repaired": "A line that a crash had torn was cut from the end of a log (file, bytes).",
    "metrics_truncated": "Metrics of rounds behind the commit that a run resumed from were dropped (round, lines).",
    "island_launching": "Placement and start of an island's ranks began (island, incarnation).",
    "island_reattached": "A driver took over an island of the driver before (island, incarnation, inner).",
    "island_joined": "An island adopted the newest commit and takes part (island, incarnation, region).",
    "island_lost": "An island failed; its work is issued again (island, incarnation, how, reason, silent_s).",
    "stacks_dumped": "Where the ranks of a lost island stood that answered (island, incarnation, stacks).",
    "anchor_shard_lost": "An anchor shard died or froze (shard, how, reason).",
    "anchor_shard_replaced": "A new one has the state of the one that was lost (shard, recovery_s).",
    "island_unplaced": "There was no room for an island; its slot waits for some (island, incarnation, reason).",
    "drain_requested": "An island was asked to leave (island, reason).",
    "island_left": "An island has left because it was asked to (island, incarnation, reason).",
    "island_quarantined": "An island left for sending bad contributions (island, incarnation, until, reason).",
    "scale_requested": "Somebody asked for numbers of islands; those that are wanted now (islands).",
    "islands_awaited": "Too few islands are here; no new segment begins (have, need, islands).",
    "islands_enough": "Enough islands are here again (have, waited_s).",
    "island_strayed": "The inner loss of an island has left the usual one (island, incarnation, loss, usual).",
    "round_laid_out": "The steps after which the fragments of a round are sent were found (round, emissions).",
    "round_opened": "Islands were given a segment of inner steps (segment, step, until, islands).",
    "contribution_rejected": "A contribution does not count (round, fragment, island, number, reason).",
    "round_closed": "No more contributions are taken for a round (round, fragment, islands, absent).",
    "fragment_committed": "A part of the model or a side channel moved (round, fragment, version, islands, weights).",
    "round_committed": "The anchor moved (round, rounds, version, loss, islands, weights, tokens, bytes_up/_down).",
    "round_aborted": "A round was given up; anchor, version and ledger are as before it (round, fragment).",
    "checkpoint_written": "A commit became durable (round, bytes, write_s).",
    "checkpoint_postponed": "The storage is slower than rounds; a later one is written instead (round, durable).",
    "checkpoint_failed": "A commit could not be made durable; the run goes on (round, reason).",
    "storage_awaited": "Too many rounds are not durable; no new round begins (round, durable, behind).",
    "storage_back": "Commits are durable again and the run goes on (durable, waited_s).",
    "inner_state_restored": "An island took up its saved inner optimiser state (island, round).",
    "inner_state_reset": "An island's inner optimiser state began anew (island, round, reason).",
    "progress_taken_up": "An island went on in the midst of a segment (island, incarnation, segment, done, steps).",
    "progress_ignored": "A progress point was not used; its work is issued again (island, incarnation, reason).",
    "network_counted": "What the network interfaces of all machines counted (bytes_sent, bytes_received, machines).",
    "evaluation": "The anchor was evaluated on held-out blocks (round, loss, ppl, blocks).",
    "stop_requested": "Somebody asked the run to stop (round).",
    "run_finished": "All rounds are committed (rounds, tokens, wall_s).",
    "run_stopped": "The run ended early and can be resumed (round, rounds, reason).",
    "run_failed": "The run ended with an error (round, reason).",
    "warning": "Something a person should know (text).",
}

_ERRORS = frozenset({"run_failed"})
_WARNINGS = frozenset(
    {
        "log_repaired",
        "island_lost",
        "island_unplaced",
        "island_quarantined",
        "islands_awaited",
        "island_strayed",
        "storage_awaited",
        "anchor_shard_lost",
        "contribution_rejected",
        "round_aborted",
        "checkpoint_failed",
        "inner_state_reset",
        "progress_ignored",
        "warning",
    }
)


def level_of(kind: str) -> Level:
    """How loud an event of this kind is."""
    if kind in _ERRORS:
        return "error"
    return "warning" if kind in _WARNINGS else "info"


class EventLog:
    """The tape, open for appending; it also keeps the newest events in words for the live view.

    A torn last line is cut and reported by an event `log_repaired`.

    Args:
      path: `events.jsonl` of the run directory.
      clock: unix seconds.
      remembered: how many notes are kept.

    Raises:
      CheckpointError: RD-580, RD-581 (see `lines.LineFile`).
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, remembered: int = 64) -> None:
        self._file = LineFile(path)
        self._clock = clock
        self._notes: deque[Note] = deque(maxlen=remembered)
        self._next = int(self._file.last["seq"]) + 1 if self._file.last else 0
        if self._file.cut_bytes:
            self.append("log_repaired", file=path.name, bytes=self._file.cut_bytes)

    def append(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Write one event and return it as written.

        Raises:
          ValueError: unknown kind, or a field named as one of the three that every event has.
          CheckpointError: RD-582, the disk refuses.
        """
        if kind not in EVENTS:
            near = difflib.get_close_matches(kind, EVENTS, n=1)
            raise ValueError(f"unknown event kind {kind!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
        if taken := {"t", "seq", "event"} & fields.keys():
            raise ValueError(f"event {kind!r}: every event already has the field {min(taken)!r}.")
        event = {"t": self._clock(), "seq": self._next, "event": kind, **fields}
        self._file.append(event)
        self._next += 1
        if text := narrate(event):
            self._notes.append(Note(event["seq"], event["t"], text, level_of(kind)))
        return event

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest events of this process in words, oldest first."""
        return tuple(self._notes)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
