"""The live state of a run as small frozen values: what the driver hands to whoever watches.

A view is complete in itself (a display that missed ten of them shows the eleventh right), pickles to a few kilobytes
and holds no reference to anything of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Note:
    """An event in words.

    Args:
      seq: its number on the event tape; grows.
      t: when, in unix seconds.
      text: one line.
      level: how loud it is.
    """

    seq: int
    t: float
    text: str
    level: Level = "info"


@dataclass(frozen=True, slots=True)
class IslandView:
    """One island, now.

    Args:
      state: one word: launching, joining, ready, training, sending, waiting, adopting, evaluating, lost, done.
      step, steps: inner steps done in this round, and planned for it.
      loss: latest inner loss, nats per token.
      tokens_per_s: over the latest inner steps.
      restarts: how often it was replaced in this run.
      waiting_for: whom or what it awaits, in words; empty if it works.
    """

    name: str
    region: str
    state: str
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    restarts: int = 0
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Where the time of a round went, seconds, mean over its islands."""

    train_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    adopt_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Length of the round in seconds."""
        return self.train_s + self.send_s + self.wait_s + self.adopt_s


@dataclass(frozen=True, slots=True)
class CommitView:
    """The newest committed round.

    Args:
      mean_loss: token-weighted mean inner loss of its islands, nats per token.
      update_norm: L2 norm of the anchor's movement.
      bytes_up, bytes_down: of all islands together.
    """

    round: int
    mean_loss: float | None = None
    update_norm: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    time: TimeSplit = TimeSplit()


@dataclass(frozen=True, slots=True)
class RunView:
    """A whole run, now.

    Args:
      status: one word: starting, running, evaluating, stopping, finished, stopped, failed.
      round: rounds committed so far; it never goes back.
      rounds: rounds in total.
      tokens: tokens committed so far.
      eval_loss: newest held-out loss of the anchor, nats per token; `eval_ppl` its exponential.
      elapsed_s: since this process began the run or took it up again.
      eta_s: expected seconds until the last round is committed; None while unknown.
      waiting_for: for what the whole run waits, in words; empty if it goes on.
      notes: the latest events in words, oldest first.
    """

    run: str
    status: str
    round: int
    rounds: int
    tokens: int = 0
    islands: tuple[IslandView, ...] = ()
    last_commit: CommitView | None = None
    eval_loss: float | None = None
    eval_ppl: float | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    waiting_for: str = ""
    notes: tuple[Note, ...] = ()

    @property
    def progress(self) -> float:
        """Part of the run that is done, 0 to 1, the open round counted by its islands' inner steps."""
        if self.rounds <= 0 or self.round >= self.rounds:
            return 1.0
        parts = [min(1.0, island.step / island.steps) for island in self.islands if island.steps]
        return (self.round + (sum(parts) / len(parts) if parts else 0.0)) / self.rounds
