"""How a rank takes over an anchor: `(θ, B) ← Adopt(θ, θ at emission, A)`, on one chunk in place.

    overwrite             θ ← A                         B ← A     DiLoCo; discards steps made since the emission
    mix                   θ ← α θ + (1−α) A             B ← A     Streaming DiLoCo (2501.18512), EASGD
    keep                  θ stays                       B ← A     GPA (2512.17131)
    keep_own              θ stays                       B ← θ     SCAFFOLD's controls
    rebase                θ ← A + θ − θ_emit            B ← A     anchor plus local progress
    compensated_rebase    rebase, less a curvature term B ← A     CoCoDC (2504.17672), λ = 0 is rebase
    lookahead             θ ← A − ημu                   B ← same  HeLoCo (2606.00271), MLA

A rule returns two values, `θ` and the base `B` of the next pseudo-gradient, which covers the whole family
(../shared/algorithms.md §10.1 and §10.2).  A new rule is one function and one line in `ADOPTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ray_diloco.errors import SyncError


@dataclass(frozen=True, slots=True, eq=False)
class AdoptChunk:
    """One chunk of what a rule reads and writes, fp32 [n] each.

    Attributes:
      theta: live parameters `θ`; written.
      base: `B`; written.  None where the rank does not emit.
      anchor: `A`, or what the keeper sent in its place; may be a view of a message and is not written.
      emitted: `θ` as it was at the emission, for rules with `reads_emitted`; else None.
    """

    theta: torch.Tensor
    base: torch.Tensor | None
    anchor: torch.Tensor
    emitted: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adopt:
    """A rule with what it needs, for the checker of combinations (../shared/algorithms.md §10.3).

    Attributes:
      apply: writes `θ` and `B` of one chunk in place.
      reads_theta: what it writes depends on `θ`.  Such a rule cannot simply be applied again after a failure, and `θ`
        of an accelerator has to be on the host for it.
      reads_emitted: it needs the copy of `θ` that was made at the emission.
      from_lookahead: the keeper sends `A − ημu` in place of `A`: outer state never leaves it.
    """

    apply: Callable[[AdoptChunk], None]
    reads_theta: bool = False
    reads_emitted: bool = False
    from_lookahead: bool = False

    @property
    def reads_outer_state(self) -> bool:
        """Whether what a rank adopts depends on the outer optimiser's state, not on the anchor alone."""
        return self.from_lookahead


@dataclass(frozen=True, slots=True)
class AdoptSettings:
    """What the rules are told; each looks at its own.

    Attributes:
      alpha: `α` of mix, the part of the rank's own `θ` that stays, 0 to 1.
      strength: `λ` of the compensated rebase.
      delay: `τ`, inner steps between emission and adoption.
      H: inner steps between two emissions of a fragment.
    """

    alpha: float
    strength: float
    delay: int
    H: int


def overwrite(chunk: AdoptChunk) -> None:
    """`θ ← A; B ← A`.  Of a look-ahead point, that point is both."""
    chunk.theta.copy_(chunk.anchor)
    keep(chunk)


def keep(chunk: AdoptChunk) -> None:
    """`B ← A`; `θ` stays."""
    if chunk.base is not None:
        chunk.base.copy_(chunk.anchor)


def keep_own(chunk: AdoptChunk) -> None:
    """`B ← θ`; `θ` stays: the next pseudo-gradient counts from what the rank has, not from what all have."""
    if chunk.base is not None:
        chunk.base.copy_(chunk.theta)


def mix(chunk: AdoptChunk, alpha: float) -> None:
    """`θ ← α θ + (1−α) A; B ← A`, for `0 < α < 1`.  Where `θ` equals `A` it stays, bit for bit."""
    chunk.theta.lerp_(chunk.anchor, 1 - alpha)
    keep(chunk)


def rebase(chunk: AdoptChunk) -> None:
    """`θ ← A + (θ − θ_emit); B ← A`.  Without steps since the emission this is `overwrite`, bit for bit."""
    chunk.theta.sub_(_emitted(chunk)).add_(chunk.anchor)
    keep(chunk)


def compensated_rebase(chunk: AdoptChunk, strength: float, delay: int, H: int) -> None:
    """`θ ← A + d − λ/(τH) · d⊙d⊙(A − θ_emit)` with `d = θ − θ_emit`; `B ← A`, for `τ ≥ 1`.

    The `τ` steps since the emission moved `θ` by `d = τ g`, so `g` is a velocity that points *along* the descent: in
    SGD with rate `a`, `g = −a ∇f(θ_emit)`.  They shall be replayed from `A`, where the gradient is
    `∇f(A) ≈ ∇f(θ_emit) + λ' ∇f⊙∇f⊙(A − θ_emit)`: a diagonal curvature, never negative, guessed as `λ'` times the
    squared gradient (DC-ASGD, 1609.08326).  Times `−a` this is `g − (λ'/a) g⊙g⊙(A − θ_emit)`.  With `λ/H` for `λ'/a`,
    replaying `τ` steps gives the formula above.  Where the anchor went further than `θ_emit` in the direction of
    descent, the local steps are shortened.

    ../shared/algorithms.md §4.3 prints `+λ`, from memory and to be re-derived: that sign holds for the velocity
    `(θ_emit − θ)/τ`, which points against the descent.  A negative `λ` gives the printed one.
    """
    emitted = _emitted(chunk)
    progress = chunk.theta.sub_(emitted)
    correction = torch.sub(chunk.anchor, emitted).mul_(progress).mul_(progress)
    progress.add_(correction, alpha=-strength / (delay * H)).add_(chunk.anchor)
    keep(chunk)


def adopt_of(kind: str, *, alpha: float = 0.5, strength: float = 0.0, delay: int = 0, H: int = 1) -> Adopt:
    """Builds a rule from what a configuration says.

    Args:
      kind: key of `ADOPTS`.
      alpha: see `AdoptSettings`, like the other arguments.
      strength: see there.
      delay: see there.
      H: see there.

    Raises:
      SyncError: RD-453, there is no such rule, or not with these settings.
    """
    if kind not in ADOPTS:
        raise _setting_error(f"there is no adoption {kind!r}", f"use one of {', '.join(sorted(ADOPTS))}")
    if not 0 <= alpha <= 1:
        raise _setting_error(f"adopt.alpha is {alpha}", "use a number from 0 to 1")
    if not math.isfinite(strength):
        raise _setting_error(f"adopt.strength is {strength}", "use a finite number; 0 is rebase")
    if delay < 0 or H < 1:
        raise _setting_error(f"an adoption {delay} steps after emissions every {H}", "use a delay of 0 or more, H ≥ 1")
    return ADOPTS[kind](AdoptSettings(alpha, strength, delay, H))


def _mix(settings: AdoptSettings) -> Adopt:
    # The ends are rules of their own: 0 · θ is not 0 if θ is not finite, and a sum would change the sign of −0.
    if settings.alpha == 0:
        return Adopt(overwrite)
    if settings.alpha == 1:
        return Adopt(keep)
    return Adopt(lambda chunk: mix(chunk, settings.alpha), reads_theta=True)


def _compensated(settings: AdoptSettings) -> Adopt:
    """Rebase if λ = 0, or if no step lies between emission and adoption: then there is nothing to replay."""
    strength, delay, H = settings.strength, settings.delay, settings.H
    if strength == 0 or delay == 0:
        return Adopt(rebase, reads_theta=True, reads_emitted=True)
    return Adopt(lambda chunk: compensated_rebase(chunk, strength, delay, H), reads_theta=True, reads_emitted=True)


def _emitted(chunk: AdoptChunk) -> torch.Tensor:
    if chunk.emitted is None:
        raise SyncError(454, "a rebase lacks θ as it was at the emission", "emit the fragment before it is adopted")
    return chunk.emitted


def _setting_error(what: str, mend: str) -> SyncError:
    return SyncError(453, what, mend)


ADOPTS: dict[str, Callable[[AdoptSettings], Adopt]] = {
    "overwrite": lambda _: Adopt(overwrite),
    "mix": _mix,
    "keep": lambda _: Adopt(keep),
    "keep_own": lambda _: Adopt(keep_own, reads_theta=True),
    "rebase": lambda _: Adopt(rebase, reads_theta=True, reads_emitted=True),
    "compensated_rebase": _compensated,
    "lookahead": lambda _: Adopt(overwrite, from_lookahead=True),
}
