"""From contributions to one outer gradient: `Δ = Σ w_m Δ_m / Σ w_m`, or a rule that bears more.

A rule is two functions.  `factors` looks at the inner products of the contributions, over one tensor or over all, and
says what each is multiplied by; `combine` is the heavy pass, chunk by chunk, with those factors.  Sums run in sorted
island order, in fp32, so that the order of arrival never changes a bit (../shared/algorithms.md §1, §8.1, §9.4 items
38 and 39, §9.5).  A new rule is one function and one line in `MERGES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer import robust
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.robust import Gram

# (contributions in island order, then the extra vectors of the rule, fp32 [n] each; their factors; output, fp32 [n]).
# The contributions may be views of received messages and must not be written.
Combine = Callable[[Sequence[torch.Tensor], Sequence[float], torch.Tensor], None]

# Elements of one step of a Gram matrix: as float64 they stay in the cache of one core.
GRAM_BLOCK = 8192
# A mean direction shorter than this part of what parallel contributions give is rounding in fp32.
VANISHED = 1e-6


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """What a rule may be told; each looks at its own.

    Attributes:
      byzantine: `f`, contributions that may be arbitrarily wrong.
      trim: `b` of the trimmed mean, values dropped at either end; at least `byzantine` are.
      keep: `m` of Multi-Krum; 0: `n − f`.
      iterations: of the geometric median and of centred clipping.
      tau: radius of centred clipping; 0: `relative_tau` times the median distance.
      relative_tau: see `tau`.
      plain: patterns of names of tensors that get the plain mean in rules of scope `tensor`.
    """

    byzantine: int = 0
    trim: int = 0
    keep: int = 0
    iterations: int = 3
    tau: float = 0.0
    relative_tau: float = 1.0
    plain: tuple[str, ...] = ("*embed*", "*lm_head*")


# (Gram matrix of contributions and extras, weights of the contributions, settings): a factor for each of its rows.
Factors = Callable[[Gram, Sequence[float], MergeSettings], list[float]]


def mean(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    """`Σ f_m Δ_m`, in the order given.  One, two or four equal contributions of equal weight give back their bits.

    The factors are used as they are, whatever their sum.
    """
    torch.mul(contributions[0], factors[0], out=out)
    for contribution, factor in zip(contributions[1:], factors[1:], strict=True):
        out.add_(contribution, alpha=factor)


def mean_hop_by_hop(
    codec: Codec, received: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor, nonce: int
) -> None:
    """The weighted sum as a ring makes it: every hop adds its own and encodes what it hands on."""
    wire = torch.empty(codec.nbytes(out.numel()), dtype=torch.uint8)
    torch.mul(received[0], factors[0], out=out)
    for hop, (values, factor) in enumerate(zip(received[1:], factors[1:], strict=True)):
        codec.encode(out, wire, nonce + hop)
        codec.decode(wire, out, nonce + hop)
        out.add_(values, alpha=factor)


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge rule with what it needs, for the pass and for the checker of combinations (../shared/algorithms.md §10).

    Attributes:
      combine: merges one chunk, with default settings; see `bind`.
      scope: what the Gram matrix of `factors` is taken over: one tensor, or the whole model with all its fragments and
        shards.  `element`: there is none.
      factors: what the contributions are multiplied by; None: their weights.  Weights count relative to one another.
      extras: vectors that stand behind the contributions in the Gram matrix and in `combine`: `last` is the merged `Δ`
        of the last round, zeros in the first.
      needs_individuals: the sum of the contributions is not enough.
      needs_anchors: the anchors of the neighbours take part.
      reads_weights: a contribution that claims a large weight moves the result; the others count each one once.
      minimum: least number of contributions.
      bound: makes `combine` for other settings; None: there are none that it looks at.
    """

    combine: Combine
    scope: Literal["element", "tensor", "whole"] = "element"
    factors: Factors | None = None
    extras: tuple[str, ...] = ()
    needs_individuals: bool = False
    needs_anchors: bool = False
    reads_weights: bool = True
    minimum: Callable[[MergeSettings], int] = lambda settings: 1
    bound: Callable[[MergeSettings], Combine] | None = None

    @property
    def needs_whole_vector(self) -> bool:
        """Whether factors have to be found over all fragments and shards before the pass."""
        return self.scope == "whole"

    def bind(self, settings: MergeSettings) -> Combine:
        """`combine` with these settings."""
        return self.bound(settings) if self.bound else self.combine


def mean_over_senders(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    """Per element the weighted mean over those who sent one, that is, whose element is not 0 (DeMo, 2411.19870).

    As in `mean`, factors whose sum is not 1 scale the result; where everybody sent, it has the bits of `mean`.
    """
    mean(contributions, factors, out)
    sent = torch.empty_like(out)
    senders = torch.zeros_like(out)
    whole = torch.zeros(1, dtype=out.dtype)
    for contribution, factor in zip(contributions, factors, strict=True):
        senders.add_(torch.ne(contribution, 0, out=sent), alpha=factor)
        whole.add_(1.0, alpha=factor)
    # Where nobody sent, the sum is 0 and stays 0.
    senders.masked_fill_(senders == 0, 1.0)
    out.mul_(torch.div(whole, senders, out=sent))


def chosen_mean(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    """`mean` that does not read what has factor 0."""
    chosen = [k for k, factor in enumerate(factors) if factor]
    mean([contributions[k] for k in chosen], [factors[k] for k in chosen], out)


def rda_factors(gram: Gram, weights: Sequence[float], settings: MergeSettings) -> list[float]:
    """Radial and directional average: `(Σ w ‖Δ_m‖ / Σ w) · φ(Σ w φ(Δ_m))`, `φ(x) = x / ‖x‖` (2604.21428).

    Keeps the norm where the mean of orthogonal contributions shrinks it by `1/√M`.  Zero vectors are ignored, in the
    direction and in the norm: an island that has nothing to say of a tensor does not shorten what the others say.  If
    the directions cancel out, the factors are those of the plain mean.
    """
    w = np.asarray(weights, dtype=np.float64)
    norms = np.sqrt(np.diag(gram))
    w = np.where(norms > 0, w, 0)
    directions = np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)
    length = math.sqrt(max(float(directions @ gram @ directions), 0))
    if not length > VANISHED * w.sum():
        return [float(weight) / math.fsum(weights) for weight in weights]
    radius = float(w @ norms) / float(w.sum())
    return [radius / length * float(direction) for direction in directions]


def add_gram(gram: Gram, vectors: Sequence[torch.Tensor]) -> None:
    """Adds the inner products of one chunk of each vector (fp32 [n], on the host) to a Gram matrix, in float64."""
    for start in range(0, vectors[0].numel(), GRAM_BLOCK):
        rows = np.stack([vector[start : start + GRAM_BLOCK].numpy() for vector in vectors]).astype(np.float64)
        gram += rows @ rows.T


def merge_rule(kind: str) -> Merge:
    """The rule of a `merge.kind`.

    Raises:
      SyncError: RD-432, there is none of that name.
    """
    if kind not in MERGES:
        raise SyncError(432, f"there is no merge rule {kind!r}", f"use one of {', '.join(sorted(MERGES))}")
    return MERGES[kind]


def require_enough(kind: str, count: int, settings: MergeSettings) -> None:
    """Raises RD-431 if a rule has fewer contributions than its guarantee needs."""
    least = merge_rule(kind).minimum(settings)
    if count < least:
        own = {"multi_krum": ("byzantine", "keep"), "trimmed_mean": ("byzantine", "trim")}.get(kind, ("byzantine",))
        told = ", ".join(f"{key}={getattr(settings, key)}" for key in own)
        what = f"{kind} with {told} needs at least {least} contributions, got {count}"
        raise SyncError(431, what, "raise the quorum, or lower merge.byzantine")


def is_plain(tensor: str, settings: MergeSettings) -> bool:
    """Whether a tensor of this name gets the plain mean in a rule of scope `tensor`."""
    return any(fnmatchcase(tensor, pattern) for pattern in settings.plain)


def factors_of(
    rule: Merge, gram: Gram, weights: Sequence[float], settings: MergeSettings, tensor: str | None = None
) -> list[float]:
    """What a rule multiplies contributions, and then its extras, by.

    Args:
      rule: one of `MERGES`.
      gram: of contributions and extras; not looked at where the weights are the factors.
      weights: of the contributions.
      settings: of the rule.
      tensor: name of the tensor, in a rule of scope `tensor`.
    """
    if rule.factors is None or (rule.scope == "tensor" and tensor is not None and is_plain(tensor, settings)):
        return [*weights, *(0.0 for _ in rule.extras)]
    return rule.factors(gram, weights, settings)


def consensus_factors(count: int, own: int, gamma: float, lr: float) -> list[float]:
    """Factors on the anchors of a neighbourhood whose sum is added to its merged `Δ`: `(γ/η)(A_own − mean A)`.

    NoLoCo (2506.10911): heavy ball on the sum, with rate `η`, pulls the anchors together by `γ` a round.
    """
    pull = gamma / lr
    return [pull * ((1.0 if k == own else 0.0) - 1 / count) for k in range(count)]


def _median(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
    robust.median(contributions, out)


def _trimmed_mean(settings: MergeSettings) -> Combine:
    def combine(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
        robust.trimmed_mean(contributions, _trim(settings), out)

    return combine


def _bulyan(settings: MergeSettings) -> Combine:
    def combine(contributions: Sequence[torch.Tensor], factors: Sequence[float], out: torch.Tensor) -> None:
        chosen = [contribution for contribution, factor in zip(contributions, factors, strict=True) if factor]
        robust.mean_near_median(chosen, 2 * settings.byzantine, out)

    return combine


def _trim(settings: MergeSettings) -> int:
    return max(settings.trim, settings.byzantine)


# By `merge.kind`.
MERGES: dict[str, Merge] = {
    "mean": Merge(mean),
    "mean_over_senders": Merge(mean_over_senders, needs_individuals=True),
    "rda": Merge(mean, "tensor", rda_factors, needs_individuals=True),
    "median": Merge(
        _median,
        needs_individuals=True,
        reads_weights=False,
        minimum=lambda s: 2 * s.byzantine + 1,
    ),
    "trimmed_mean": Merge(
        _trimmed_mean(MergeSettings()),
        needs_individuals=True,
        reads_weights=False,
        minimum=lambda s: 2 * _trim(s) + 1,
        bound=_trimmed_mean,
    ),
    "krum": Merge(
        chosen_mean,
        "whole",
        lambda gram, weights, s: robust.krum(gram, s.byzantine),
        needs_individuals=True,
        reads_weights=False,
        minimum=lambda s: 2 * s.byzantine + 3,
    ),
    "multi_krum": Merge(
        chosen_mean,
        "whole",
        lambda gram, weights, s: robust.multi_krum(gram, s.byzantine, s.keep),
        needs_individuals=True,
        reads_weights=False,
        minimum=lambda s: max(2 * s.byzantine + 3, s.keep + s.byzantine),
    ),
    "bulyan": Merge(
        _bulyan(MergeSettings()),
        "whole",
        lambda gram, weights, s: robust.bulyan_selection(gram, s.byzantine),
        needs_individuals=True,
        reads_weights=False,
        minimum=lambda s: 4 * s.byzantine + 3,
        bound=_bulyan,
    ),
    "geometric_median": Merge(
        mean,
        "whole",
        lambda gram, weights, s: robust.geometric_median(gram, weights, s.iterations),
        needs_individuals=True,
        minimum=lambda s: 2 * s.byzantine + 1,
    ),
    "centred_clipping": Merge(
        mean,
        "whole",
        lambda gram, weights, s: robust.centred_clipping(gram, weights, s.iterations, s.tau, s.relative_tau),
        extras=("last",),
        needs_individuals=True,
        minimum=lambda s: 2 * s.byzantine + 1,
    ),
}
