"""How long the next round is, and in which order its fragments go, from what earlier rounds came to.

Rules that are published with a formula: AdaComm (1810.08313 §4) shortens rounds as the loss falls, QSR (2310.14423
eq. 2) lengthens them as the inner learning rate falls.  CoCoDC (2504.17672) lets those fragments go first that change
fastest; here every fragment goes once a round, so that none waits longer than two.  DiLoCoX (2506.21263) adapts H
as well; its rule is not published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Note:
    """What a committed round of a fragment came to.

    Attributes:
      loss: nats per token, mean over the contributions.
      rate: L2 norm of the anchor's movement per inner step.
    """

    fragment: int
    round: int
    loss: float
    rate: float


@dataclass(frozen=True, slots=True)
class Leg:
    """A round of the whole model as it is laid out: the step at which each fragment is emitted."""

    round: int
    emissions: tuple[int, ...]

    @property
    def end(self) -> int:
        """Step of the last emission."""
        return max(self.emissions)

    @property
    def closing(self) -> int:
        """The fragment that is emitted last; of several at once, the one with the highest number."""
        return max(range(len(self.emissions)), key=lambda fragment: (self.emissions[fragment], fragment))


# (H of the configuration, loss of the first round and of the last or None, step at which the round begins) → H
Length = Callable[[int, tuple[float, float] | None, int], int]


def by_loss(H: int, losses: tuple[float, float] | None, step: int) -> int:
    """AdaComm: `⌈√(loss / first loss) · H⌉`; `H` before there are losses."""
    if losses is None or not losses[0] > 0 or not math.isfinite(losses[1] / losses[0]):
        return H
    return max(1, math.ceil(math.sqrt(max(0.0, losses[1]) / losses[0]) * H))


def by_rate(rate: Callable[[int], float], growth: float) -> Length:
    """QSR: `max(H, ⌊(growth / η)²⌋)`.

    Args:
      rate: the inner learning rate at a global step.
      growth: α of the paper, in units of the rate.
    """

    def length(H: int, losses: tuple[float, float] | None, step: int) -> int:
        eta = rate(step)
        return H if eta <= 0 else max(H, int((growth / eta) ** 2))

    return length


@dataclass(frozen=True)
class Pace:
    """The rules of a run.

    Attributes:
      length: how many steps a round has; None: always `H` of the schedule.
      least, most: bounds of that; `most` 0: none.
      priority: fragments that change faster go first.
    """

    length: Length | None = None
    least: int = 1
    most: int = 0
    priority: bool = False

    def H(self, H: int, notes: Sequence[Note], step: int) -> int:
        """Steps of the round that begins at `step`, of which `notes` may be known."""
        if self.length is None:
            return H
        ordered = sorted(notes, key=lambda note: (note.round, note.fragment))
        found = self.length(H, (ordered[0].loss, ordered[-1].loss) if ordered else None, step)
        return max(self.least, min(self.most, found) if self.most else found)

    def order(self, fragments: int, notes: Sequence[Note]) -> list[int]:
        """Fragments in the order in which they go: faster ones first, those of which nothing is known before all."""
        if not self.priority:
            return list(range(fragments))
        newest = {n.fragment: n for n in sorted(notes, key=lambda n: n.round)}
        rates = [newest[p].rate if p in newest else math.inf for p in range(fragments)]
        return sorted(range(fragments), key=lambda p: (-rates[p], p))
