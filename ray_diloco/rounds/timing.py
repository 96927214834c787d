"""What an island's part in a round came to: seconds of each stage, and amounts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_diloco.rounds.ports import Report


@dataclass
class Timing:
    """Seconds and amounts of one island in one round."""

    steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    norm: float = 0.0
    train_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    adopt_s: float = 0.0
    wall_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def trained(self, report: Report) -> None:
        """Notes what a segment of training came to."""
        self.steps, self.tokens, self.loss, self.train_s = report.steps, report.tokens, report.loss, report.seconds
        self.adopt_s += report.adopt_s
        self.send_s += report.send_s

    def followed_by(self, later: Timing) -> Timing:
        """Both together; the norm is the later one's."""
        tokens = self.tokens + later.tokens
        loss = (self.loss * self.tokens + later.loss * later.tokens) / tokens if tokens else later.loss
        numbers = ("steps", "tokens", "train_s", "send_s", "wait_s", "adopt_s", "wall_s", "bytes_up", "bytes_down")
        summed = {name: getattr(self, name) + getattr(later, name) for name in numbers}
        return Timing(**summed, loss=loss, norm=later.norm or self.norm)
