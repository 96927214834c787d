"""What travels in a simulation, with the truth about it beside it for whoever checks the run afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ray_diloco.outer.layout import Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """A pseudo-gradient on its way.

    Attributes:
      sender, incarnation, fragment, base_version: what its header says.
      values: float64 [WIDTH], as they arrive; `sent` as they were sent.
      broken: its bytes are not those of its digest.
      base: the base that it was measured from.
      blocks, steps, tokens: trained since the island's last emission, which its commit credits.
    """

    sender: str
    incarnation: int
    fragment: int
    base_version: int
    values: np.ndarray
    sent: np.ndarray
    broken: bool = False
    base: np.ndarray = field(default_factory=lambda: np.zeros(0))
    blocks: tuple[Ranges, ...] = ()
    steps: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """An anchor on its way to islands: what was stepped to, and what is sent (another point under look-ahead)."""

    fragment: int
    anchor: str
    version: int
    values: np.ndarray
