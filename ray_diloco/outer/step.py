"""One outer step of one fragment: correct, merge, step, average and encode, one chunk after the other.

    q'_j   ← Stale(q_j, age_j, A, u)       measured from the newest anchor, turned towards the momentum
    Δ      ← Merge({q'_j, w_j}, {A_j})     a weighted sum with factors from inner products, or a rule by element
    A, o   ← Outer(A, o, Δ)

Factors that a rule finds for each tensor take one more pass over the contributions before.  Source:
../shared/algorithms.md §10.1, §10.3 (order of composition).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import squared_norm
from ray_diloco.outer.merge import (
    add_gram,
    consensus_factors,
    factors_of,
    is_plain,
    mean,
    mean_hop_by_hop,
)
from ray_diloco.outer.momentum import Nesterov
from ray_diloco.outer.optimizer import OuterOptimizer
from ray_diloco.outer.recipe import MERGED, Recipe
from ray_diloco.outer.sources import Scratch, Source
from ray_diloco.outer.stale import DirectionSettings, direction_factors

# A sum of factors closer to one than this is one: they are rounded to fp32.
UNNORMALISED = 1e-6
# Elements of a fragment here from which on one pass pays: numba takes 0.1 GB and half a second of every shard.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Span:
    """A tensor in a packed fragment."""

    name: str
    start: int
    stop: int


@dataclass(eq=False)
class Arrays:
    """What a step reads and writes, fp32 [numel] each; `put` takes each chunk of what is sent to the islands."""

    anchor: torch.Tensor
    state: Sequence[torch.Tensor]
    anchor_out: torch.Tensor
    state_out: Sequence[torch.Tensor]
    put: Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Norms:
    """Squared norms of `Δ` without the neighbours' pull, of the movement and of the new anchor."""

    delta: float = 0.0
    update: float = 0.0
    anchor: float = 0.0


class NotFinite(Exception):
    """A contribution to a chunk, or what they give together, is not finite; `received` are the contributions."""

    def __init__(self, received: Sequence[torch.Tensor]) -> None:
        super().__init__("not finite")
        self.received = received


class OuterStep:
    """A step of one fragment.

    Args:
      recipe: how.
      arrays: what it reads and writes.
      version: how often the anchor has moved before.
      factors: of the contributions, and of the extras of a rule whose factors were found over the whole model.
      sources: contributions, in island order; empty if `delta` is merged already.
      bases: for contributions that have to be measured anew, the anchor that they were measured from; else None.
      neighbours: anchors of the neighbourhood, this one among them at `own`.
      spans: the tensors of the fragment.
      delta: fp32 [numel], merged before.
      lr: learning rate; None: the optimiser's own.
      rooms: scratch memory for each source and neighbour, and two more.
    """

    def __init__(
        self,
        recipe: Recipe,
        arrays: Arrays,
        version: int,
        factors: Sequence[float],
        sources: Sequence[Source],
        *,
        bases: Sequence[torch.Tensor | None] = (),
        neighbours: Sequence[Source] = (),
        own: int = 0,
        spans: Sequence[Span] = (),
        delta: torch.Tensor | None = None,
        lr: float | None = None,
        rooms: Sequence[Scratch] = (),
    ) -> None:
        self._recipe, self._arrays, self._version = recipe, arrays, version
        self._factors, self._sources, self._spans = list(factors), sources, spans
        self._bases = list(bases) or [None] * len(sources)
        self._neighbours, self._own, self._delta = neighbours, own, delta
        self._lr = recipe.lr(version, lr)
        # Looked up once, not for each chunk.
        self._extra, self._own_states = recipe.rule.extras, len(recipe.optimizer.state_names)
        rule, whole = recipe.rule, math.fsum(self._factors[: len(sources)])
        # Rules that drop, choose or recode may hide what is not finite in one contribution.
        self._screens = (rule.needs_individuals and rule.scope != "tensor") or recipe.recode is not None
        # Factors that do not sum to one scale what a rule finds that normalises its weights or reads none.
        self._scale = whole if abs(whole - 1) > UNNORMALISED else 1.0
        self._unweighted = rule.scope == "element" and not rule.reads_weights
        self._combine = recipe.rule.bind(recipe.settings)
        self._names = recipe.state_names
        count = len(sources) + len(neighbours) + 2
        *self._scratch, (self._buffer, self._ahead), (self._sum, _) = rooms[:count] or [room() for _ in range(count)]
        self._fused = self._pass_of(recipe.optimizer)
        # Per tensor: (factor of the contribution, of the momentum) of each contribution; factors of the merge.
        self._turns: dict[str, list[tuple[float, float]]] = {}
        self._merges: dict[str, list[float]] = {}

    def run(self) -> Norms:
        """The passes.

        Raises:
          NotFinite: a merged gradient is not finite.
        """
        if self._recipe.direction is not None and self._delta is None:
            self._turns = self._find_turns(self._recipe.direction)
        if self._recipe.rule.scope == "tensor" and self._delta is None:
            self._merges = self._find_merges()
        delta_norm = update_norm = anchor_norm = 0.0
        for k, start, stop in self._chunks():
            if self._fused is None:
                delta, square = self._merged(k, start, stop)
                update, anchor = self._step(start, stop, delta)
            else:
                square, update, anchor = self._at_once(k, start, stop, self._fused)
            delta_norm += square
            update_norm += update
            anchor_norm += anchor
        return Norms(delta_norm, update_norm, anchor_norm)

    def gram(self, extras: Sequence[str]) -> np.ndarray:
        """Inner products of the contributions and of extra vectors over this fragment: float64 [K+E, K+E].

        Raises:
          NotFinite: a contribution is not finite.
        """
        size = len(self._sources) + len(extras)
        gram = np.zeros((size, size))
        for k, start, stop in self._chunks():
            received = self._corrected(k, start, stop)
            _screen(received)
            add_gram(gram, [*received, *self._extras(start, stop, extras)])
        return gram

    def _chunks(self) -> Iterator[tuple[int, int, int]]:
        numel = self._arrays.anchor.numel()
        for k, start in enumerate(range(0, numel, chunks.CHUNK)):
            yield k, start, min(start + chunks.CHUNK, numel)

    def _state(self, name: str) -> torch.Tensor:
        return self._arrays.state[self._names.index(name)]

    def _extras(self, start: int, stop: int, names: Sequence[str]) -> list[torch.Tensor]:
        return [self._state(MERGED)[start:stop] for _ in names]

    def _corrected(self, k: int, start: int, stop: int) -> list[torch.Tensor]:
        """Contributions to a chunk, after what staleness asks for."""
        found = []
        for j, source in enumerate(self._sources):
            values, base = source.chunk(k, self._scratch[j]), self._bases[j]
            if base is not None or self._turns:
                values = torch.clone(values)
            if base is not None:
                values.add_(self._arrays.anchor[start:stop]).sub_(base[start:stop])
            for span, inside in self._inside(start, stop) if self._turns else ():
                own, turned = self._turns[span.name][j]
                if turned or own != 1.0:
                    momentum = self._momentum[start + inside.start : start + inside.stop]
                    values[inside].mul_(own).add_(momentum, alpha=turned)
            found.append(values)
        return found

    @property
    def _momentum(self) -> torch.Tensor:
        name = self._recipe.optimizer.momentum_state
        if name is None:
            raise ValueError("an outer optimiser without momentum gives no direction")
        return self._state(name)

    def _inside(self, start: int, stop: int) -> Iterator[tuple[Span, slice]]:
        """Tensors in a chunk, with the part of the chunk that is theirs."""
        for span in self._spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield span, slice(first - start, last - start)

    def _find_turns(self, settings: DirectionSettings) -> dict[str, list[tuple[float, float]]]:
        grams = {span.name: [np.zeros((2, 2)) for _ in self._sources] for span in self._spans}
        for k, start, stop in self._chunks():
            found = self._corrected(k, start, stop)
            _screen(found)
            for span, inside in self._inside(start, stop):
                momentum = self._momentum[start + inside.start : start + inside.stop]
                for gram, values in zip(grams[span.name], found, strict=True):
                    add_gram(gram, [values[inside], momentum])
        return {name: [direction_factors(gram, settings) for gram in of_one] for name, of_one in grams.items()}

    def _find_merges(self) -> dict[str, list[float]]:
        rule, settings, count = self._recipe.rule, self._recipe.settings, len(self._sources)
        grams = {span.name: np.zeros((count, count)) for span in self._spans}
        for k, start, stop in self._chunks():
            found = self._corrected(k, start, stop)
            _screen(found)
            for span, inside in self._inside(start, stop):
                add_gram(grams[span.name], [values[inside] for values in found])
        factors = {name: factors_of(rule, gram, self._factors, settings, name) for name, gram in grams.items()}
        if self._scale == 1.0:
            return factors
        return {
            name: of_one if is_plain(name, settings) else [self._scale * factor for factor in of_one]
            for name, of_one in factors.items()
        }

    def _merged(self, k: int, start: int, stop: int) -> tuple[torch.Tensor, float]:
        """`Δ` of a chunk and its squared norm."""
        delta = self._buffer[: stop - start]
        received: list[torch.Tensor] = []
        if self._delta is not None:
            delta.copy_(self._delta[start:stop])
        else:
            received = self._corrected(k, start, stop)
            if self._screens:
                _screen(received)
            vectors = [*received, *self._extras(start, stop, self._extra)] if self._extra else received
            if self._recipe.recode is not None:
                nonce = (self._version << 32) + k * len(received)
                mean_hop_by_hop(self._recipe.recode, received, self._factors, delta, nonce)
            elif self._merges:
                for span, inside in self._inside(start, stop):
                    self._combine([values[inside] for values in vectors], self._merges[span.name], delta[inside])
            else:
                self._combine(vectors, self._factors, delta)
                if self._unweighted and self._scale != 1.0:
                    delta.mul_(self._scale)
        square = squared_norm(delta)
        if not math.isfinite(square):
            raise NotFinite(received)
        # After the check, as no contribution is to blame for what a neighbour's anchor does.
        if self._recipe.consensus and len(self._neighbours) > 1:
            self._pull(k, delta)
        return delta, square

    def _pass_of(self, optimizer: OuterOptimizer) -> Nesterov | None:
        """The optimiser, if merging and moving are what one pass can do at once, with the same bits."""
        anchor, late = self._arrays.anchor, any(base is not None for base in self._bases)
        # Tests run the loop in float64.
        fits = anchor.dtype == torch.float32 and len(self._sources) > 1 and not late
        if not (fits and _goes_at_once(self._recipe, anchor.numel())) or type(optimizer) is not Nesterov:
            return None
        from ray_diloco.outer.step_kernels import same_bits

        return optimizer if same_bits() else None

    def _at_once(self, k: int, start: int, stop: int, optimizer: Nesterov) -> tuple[float, float, float]:
        """`_merged` and `_step` of a chunk in one pass: squared norms of `Δ`, of the movement and of the new anchor."""
        from ray_diloco.outer.step_kernels import fused

        arrays, received = self._arrays, self._corrected(k, start, stop)
        delta, moved = self._buffer[: stop - start], self._ahead[: stop - start]
        so_far, scale = received[0], self._factors[0]
        if len(received) > 2:
            so_far, scale = self._sum[: stop - start], 1.0
            mean(received[:-1], self._factors[:-1], so_far)
        (u,), (u_out,), after = arrays.state, arrays.state_out, arrays.anchor_out[start:stop]
        rate = -(optimizer.lr if self._lr is None else self._lr)
        fused(
            so_far, scale, received[-1], self._factors[-1], u[start:stop], optimizer.momentum,
            arrays.anchor[start:stop], rate, delta, u_out[start:stop], after, moved,
        )  # fmt: skip
        square = squared_norm(delta)
        if not math.isfinite(square):
            raise NotFinite(received)
        arrays.put(start, after)
        return square, squared_norm(moved), squared_norm(after)

    def _pull(self, k: int, delta: torch.Tensor) -> None:
        """Adds `(γ/η)(A_own − mean A)`."""
        lr = self._lr if self._lr is not None else self._recipe.optimizer.lr  # type: ignore[attr-defined]
        factors = consensus_factors(len(self._neighbours), self._own, self._recipe.consensus, lr)
        for j, (neighbour, factor) in enumerate(zip(self._neighbours, factors, strict=True)):
            delta.add_(neighbour.chunk(k, self._scratch[len(self._sources) + j]), alpha=factor)

    def _step(self, start: int, stop: int, delta: torch.Tensor) -> tuple[float, float]:
        """Moves a chunk; squared norms of its movement and of the new anchor."""
        arrays, optimizer = self._arrays, self._recipe.optimizer
        anchor, moved = arrays.anchor[start:stop], arrays.anchor_out[start:stop]
        state, state_out = ([s[start:stop] for s in side] for side in (arrays.state, arrays.state_out))
        own = self._own_states
        optimizer.step(anchor, state[:own], delta, moved, state_out[:own], version=self._version, lr=self._lr)
        for name, before, after in zip(self._names[own:], state[own:], state_out[own:], strict=True):
            if name == MERGED:
                after.copy_(delta)
            else:
                self._recipe.take_average(before, after, moved, self._version + 1)
        if self._recipe.lookahead:
            ahead = self._ahead[: stop - start]
            optimizer.lookahead(moved, state_out[:own], ahead, self._lr)
            arrays.put(start, ahead)
        else:
            arrays.put(start, moved)
        anchor_norm = squared_norm(moved)
        return squared_norm(torch.sub(moved, anchor, out=delta)), anchor_norm


def compile_for(recipe: Recipe, numel: int) -> None:
    """Compiles what steps of `numel` elements need; else the first of them would, for a second on a new machine."""
    if _goes_at_once(recipe, numel):
        from ray_diloco.outer.step_kernels import same_bits

        same_bits()


def _goes_at_once(recipe: Recipe, numel: int) -> bool:
    """Whether steps of a recipe are what `step_kernels` does, and large enough for it to pay."""
    others = (recipe.direction, recipe.recode, recipe.consensus, recipe.average.kind != "none", recipe.lookahead)
    plain = recipe.rule.combine is mean and not (any(others) or recipe.rule.needs_individuals)
    return numel >= AT_ONCE and plain and type(recipe.optimizer) is Nesterov


def _screen(received: Sequence[torch.Tensor]) -> None:
    """Raises NotFinite if one of the contributions to a chunk is not finite, or too large for fp32 to square."""
    if not all(math.isfinite(squared_norm(values)) for values in received):
        raise NotFinite(received)


def room() -> Scratch:
    """Scratch memory of a source, its pages touched."""
    return torch.empty(chunks.CHUNK).fill_(0), torch.empty(chunks.CHUNK).fill_(0)
