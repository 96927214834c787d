"""Which contributions are bad though they can be read, and what becomes of islands that send them again and again.

Judged are: no step, a norm far above the median of what was merged lately, an incarnation that was given up, an inner
loss that has left those of the others.  Payloads that cannot be read are refused by the anchor, in
`outer/contribution.py`.  Medians, since a few bad ones must not move what they are measured by.  Source:
../shared/users.md §2.6 (norms: OpenDiLoCo #46, zero steps: DeepSpeed's overflows).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from ray_diloco.errors import SyncError
from ray_diloco.rounds.members import Member
from ray_diloco.rounds.ports import Offer, Report
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import Guard

# Contributions that a median of norms is taken over, and from how many on it says something.
NORMS, ENOUGH_NORMS = 16, 8
# The same of an island's losses.
LOSSES, ENOUGH_LOSSES = 8, 3
# Nats that a loss must have risen by in any case: near 0 it is soon many times what it was.
LEAST_RISE = 1.0
# Number of the error that a contribution is from an incarnation that was given up.
STALE = 437


class Vetting:
    """The judgement of contributions in one run.

    Args:
      banish: puts an island into quarantine, with the reason; returns whether it did.
    """

    def __init__(
        self, guard: Guard, position: Position, members: dict[str, Member], banish: Callable[[str, str], bool]
    ) -> None:
        self._guard, self._position, self._members, self._banish = guard, position, members, banish
        self._losses: dict[str, deque[float]] = {}
        # By island: the rounds of its bad contributions.
        self._strikes: dict[str, list[int]] = {}

    def fault_of(self, offer: Offer) -> SyncError | None:
        """What is wrong with an offer when it is made; None: nothing."""
        member = self._members.get(offer.island)
        if member is None or member.incarnation != offer.incarnation or not member.alive:
            now = "it was given up" if member is None else f"incarnation {member.incarnation} is {member.state}"
            return SyncError(
                437, f"it is from incarnation {offer.incarnation}, and {now}", "nothing: its successor goes on"
            )
        if not offer.emission.finite:
            return SyncError(438, "the pseudo-gradient is not finite", "lower inner.lr if it happens again")
        if offer.steps == 0:
            return SyncError(
                436, "no inner step was taken", "see why its steps are skipped: overflow, or too little time"
            )
        if member.strayed:
            return SyncError(439, "its inner loss has strayed", "lower inner.lr if it happens again")
        return None

    def too_large(self, offer: Offer) -> SyncError | None:
        """Whether an offer's norm is absurd against those that were merged before."""
        norms = self._position.norms.get(offer.fragment, ())
        if self._guard.norm <= 0 or len(norms) < ENOUGH_NORMS:
            return None
        usual = median(norms)
        if offer.emission.norm <= self._guard.norm * usual or usual == 0.0:
            return None
        times = offer.emission.norm / usual
        return SyncError(
            435,
            f"its norm {offer.emission.norm:.4g} is {times:.3g} times the median {usual:.4g} of the last {len(norms)}",
            "lower inner.lr if it happens again; guard.norm says how much is too much",
        )

    def merged(self, fragment: int, offers: Sequence[Offer]) -> None:
        """Remembers the norms of what was committed."""
        kept = [*self._position.norms.get(fragment, ()), *(offer.emission.norm for offer in offers)]
        self._position.norms[fragment] = kept[-NORMS:]

    def strays(self, island: str, report: Report) -> float | None:
        """Notes the loss of a segment; returns the median that it is far above, None if it is not.

        An island that strays begins anew at the anchor, and so does what its losses are measured by: one that is as
        high again is the anchor's, which has become worse for all, and training goes on from there.
        """
        own = self._losses.setdefault(island, deque(maxlen=LOSSES))
        if self._guard.loss > 0 and len(own) >= ENOUGH_LOSSES and self._far_above(report.loss, usual := median(own)):
            others = [losses[-1] for name, losses in self._losses.items() if name != island and losses]
            if self._far_above(report.loss, usual := max(usual, median(others) if others else 0.0)):
                own.clear()
                return usual
        if math.isfinite(report.loss):
            own.append(report.loss)
        return None

    def _far_above(self, loss: float, usual: float) -> bool:
        return not loss <= max(self._guard.loss * usual, usual + LEAST_RISE)

    def strike(self, island: str, reason: str) -> None:
        """Notes a bad contribution; one too many lately puts the island into quarantine."""
        if self._guard.strikes <= 0:
            return
        round_ = self._position.round
        recent = [r for r in self._strikes.get(island, ()) if r > round_ - self._guard.rounds]
        self._strikes[island] = [*recent, round_]
        if len(self._strikes[island]) >= self._guard.strikes and self._banish(
            island, f"{len(self._strikes[island])} bad contributions, the last: {reason}"
        ):
            self._losses.pop(island, None)
            del self._strikes[island]
