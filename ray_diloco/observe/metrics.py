"""Numbers of a run: `metrics.jsonl`, one line per island and round, one per commit, one per evaluation.

The three dataclasses are the contract with scripts: their fields stay as named here.  A line is
`{"kind": island|commit|eval, …fields, "t": unix seconds}`.  A resumed run drops the lines behind the commit that it
resumed from, so that no round stands there twice and progress never goes back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ray_diloco.observe.lines import LineFile


@dataclass(frozen=True, slots=True)
class IslandMetrics:
    """What one island did in one committed round.

    Args:
      steps: inner steps taken.
      tokens: tokens trained on.
      loss: mean inner loss of those steps, nats per token.
      pseudo_gradient_norm: L2 norm of `B − θ`.
      train_s, send_s, wait_s, adopt_s: seconds in inner steps; encoding and handing over; waiting for the others;
        taking the new anchor.
      bytes_up, bytes_down: payload bytes sent and received.
      tokens_per_s: tokens per second of `train_s`.
      wall_s: seconds from the start of the round's first step to the adopted anchor; 0 where nobody measured it.
    """

    kind: ClassVar[str] = "island"
    island: str
    round: int
    steps: int
    tokens: int
    loss: float
    pseudo_gradient_norm: float
    train_s: float
    send_s: float
    wait_s: float
    adopt_s: float
    bytes_up: int
    bytes_down: int
    tokens_per_s: float
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitMetrics:
    """One movement of the anchor.

    Args:
      version: how often the anchor has moved.
      anchor_norm, update_norm: L2 norms of the new anchor and of its movement.
      contributions: number of contributions merged.
      commit_s: seconds from the last contribution to the committed anchor.
      tokens_committed: in the run so far.
      fragment: which part of the model; 0 where it is exchanged whole.
      bytes_up, bytes_down: payload bytes of this round, all islands together.
    """

    kind: ClassVar[str] = "commit"
    round: int
    version: int
    anchor_norm: float
    update_norm: float
    contributions: int
    commit_s: float
    tokens_committed: int
    bytes_up: int
    bytes_down: int
    fragment: int = 0


@dataclass(frozen=True, slots=True)
class EvalMetrics:
    """The anchor after a round, on held-out blocks.

    Args:
      round: 0 is the founding anchor.
      loss: nats per token; `ppl` its exponential (see `perplexity`).
      blocks, tokens: how much was evaluated.
    """

    kind: ClassVar[str] = "eval"
    round: int
    loss: float
    ppl: float
    blocks: int
    tokens: int


Metrics = IslandMetrics | CommitMetrics | EvalMetrics


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that has no floating-point number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class MetricsLog:
    """`metrics.jsonl`, open for appending.

    Args:
      path: the file; a torn last line of it is cut (`cut_bytes` says how much).
      clock: unix seconds.

    Raises:
      CheckpointError: RD-580, RD-581 (see `lines.LineFile`).
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = LineFile(path)
        self._clock = clock
        self.cut_bytes = self._file.cut_bytes

    def append(self, metrics: Metrics) -> dict[str, Any]:
        """Write one line and return it.

        Raises:
          CheckpointError: RD-582, the disk refuses.
        """
        line = {"kind": metrics.kind, **asdict(metrics), "t": self._clock()}
        self._file.append(line)
        return line

    def truncate_after(self, round: int) -> int:
        """Drop the lines of all rounds after `round`, in one move; return how many those were."""
        return self._file.keep(lambda line: line["round"] <= round)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
