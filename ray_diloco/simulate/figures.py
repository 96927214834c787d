"""What a simulated run counts while it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ray_diloco.rounds.timing import Timing


@dataclass
class Figures:
    """Sums over all islands and lives.

    Attributes:
      trained_steps, trained_tokens, trained_s: made, committed or not, and the time that took.
      train_s, send_s, wait_s, adopt_s, wall_s: of rounds that islands have taken part in.
      contributions: merged.
      counts: events by kind.
    """

    trained_steps: int = 0
    trained_tokens: int = 0
    trained_s: float = 0.0
    train_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    adopt_s: float = 0.0
    wall_s: float = 0.0
    contributions: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, timing: Timing) -> None:
        """Adds an island's part in a round."""
        self.train_s += timing.train_s
        self.send_s += timing.send_s
        self.wait_s += timing.wait_s
        self.adopt_s += timing.adopt_s
        self.wall_s += timing.wall_s
