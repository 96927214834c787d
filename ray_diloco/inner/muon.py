"""Muon on hidden matrices and AdamW on everything else, as the one optimiser that DeepSpeed wants.

    M ← β M + g;   U = g + β M;   O = NS5(U);   θ ← (1 − a λ) θ − a √max(1, rows / columns) O

The scale is Jordan's and the default of `torch.optim.Muon`: published rates near 0.02 go with it.  That class cannot
be used itself: it wants whole matrices, while DeepSpeed steps flat tensors in which a matrix is a stretch or, at the
edge of a rank, a part; and it always computes in bf16.  `M` is kept where the parameter is; only `U` of matrices that
several ranks share is gathered, so clipping, which comes before the step, is that of the gradient at every stage.
Sources: K. Jordan, kellerjordan.github.io/posts/muon; MuLoCo, 2505.23725; ../shared/algorithms.md §6.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ray_diloco.inner.slices import Home
from ray_diloco.inner.uncompiled import AdamW, Uncompiled
from ray_diloco.outer.layout import Layout, TensorSpec

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
# Key of a parameter group: its tensors are stepped by Muon.
HIDDEN = "hidden"


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Names of the trainable 2-D parameters that are neither embeddings nor the output head, nor tied to one.

    The head is what `get_output_embeddings()` says, as Hugging Face models do; without an answer, every linear layer
    with as many outputs as the largest embedding has rows.
    """
    outside = {id(p) for module in (*_embeddings(model), *_heads(model)) for p in module.parameters()}
    return frozenset(
        name for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2 and id(p) not in outside
    )


@torch.no_grad()
def orthogonalise(update: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`NS5(U)`: five rounds of `X ← a X + (b XXᵀ + c (XXᵀ)²) X` from `X = U / ‖U‖`, of `U` [rows, columns].

    All singular values end near 1, between 0.7 and 1.2 for those that were not tiny.

    Args:
      update: fp32.
      dtype: of the matrix products; bf16 is what the coefficients were made for, and faster.
    """
    x: torch.Tensor = (update / update.norm().clamp(min=_SMALLEST_NORM)).to(dtype)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


@dataclass(frozen=True)
class Place:
    """What a flat tensor holds of a matrix.

    Attributes:
      shape: of the whole matrix.
      at: first element of the piece in the flat tensor.
      first: the same element counted inside the matrix.
      numel: elements of the piece; may be 0.
      split: several ranks have a piece.
    """

    shape: tuple[int, ...]
    at: int
    first: int
    numel: int
    split: bool = False

    @property
    def size(self) -> int:
        """Elements of the whole matrix."""
        return math.prod(self.shape)

    @property
    def scale(self) -> float:
        """`√max(1, rows / columns)`."""
        rows, columns = self.shape
        return math.sqrt(max(1.0, rows / columns))


class MuonAdamW(Uncompiled):
    """Steps groups with `HIDDEN` set by Muon, the others by fused AdamW.

    Args:
      groups: each with `HIDDEN`, `lr` and `weight_decay`; hidden ones with `momentum`, others with `betas` and `eps`.
      dtype: of the matrix products of Muon.
      reduce: sums a tensor over the ranks of the island in place.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        dtype: torch.dtype = torch.float32,
        reduce: Callable[[torch.Tensor], object] = dist.all_reduce,
    ) -> None:
        super().__init__(list(groups), {})
        self._dtype, self._reduce = dtype, reduce
        self._places: dict[int, tuple[Place, ...]] = {}
        self._adamw = AdamW(self.param_groups, fused=True)
        self._adamw.state = self.state

    def place(self, flat: torch.Tensor, places: tuple[Place, ...]) -> None:
        """Says which matrices a flat tensor holds; the ranks name the split ones in the same order, each."""
        self._places[id(flat)] = places

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps the groups that `param_groups` has now: DeepSpeed shows one at a time. Collective if any is split."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.param_groups = [group for group in self.param_groups if not group[HIDDEN]]
        if self._adamw.param_groups:
            self._adamw.step()
        for group in self.param_groups:
            if group[HIDDEN]:
                for p in group["params"]:
                    if p.grad is not None:
                        self._step_matrices(p, p.grad, group)
        return loss

    def _step_matrices(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        lr, beta = group["lr"], group["momentum"]
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].mul_(beta).add_(gradient)
        update = gradient.add(momentum, alpha=beta).view(-1)
        places = (Place(tuple(p.shape), 0, 0, p.numel()),) if p.ndim == 2 else self._places[id(p)]
        if group["weight_decay"] > 0:
            p.mul_(1.0 - lr * group["weight_decay"])
        for place, whole in zip(places, self._wholes(update, places), strict=True):
            if place.numel:
                step = orthogonalise(whole.view(place.shape), self._dtype).reshape(-1)
                piece = step.narrow(0, place.first, place.numel)
                p.view(-1).narrow(0, place.at, place.numel).add_(piece, alpha=-lr * place.scale)

    def _wholes(self, update: torch.Tensor, places: tuple[Place, ...]) -> list[torch.Tensor]:
        """The matrices of a flat tensor; split ones are put together by adding up what the ranks have of them."""
        pieces = [update.narrow(0, place.at, place.numel) for place in places]
        buffer = update.new_zeros(sum(place.size for place in places if place.split))
        wholes, start = [], 0
        for place, piece in zip(places, pieces, strict=True):
            if place.split:
                whole = buffer.narrow(0, start, place.size)
                whole.narrow(0, place.first, place.numel).copy_(piece)
                start += place.size
            wholes.append(whole if place.split else piece)
        if start:
            self._reduce(buffer)
        return wholes


def place_matrices(
    engine: DeepSpeedEngine,
    stage: int,
    layout: Layout,
    homes: tuple[Home, ...],
    matrices: frozenset[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Tells a `MuonAdamW` where its matrices lie; other optimisers need not know.  Collective from stage 1 on.

    Args:
      engine, stage: the engine and its ZeRO stage.
      layout, homes: the canonical form and what this rank holds of it.
      matrices: names of the hidden matrices.
      group: gloo group of the island; None for a single rank.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, MuonAdamW) or stage == 0:
        return
    flats = _hidden_flats(engine, stage)
    specs = [spec for spec in layout.tensors if spec.name in matrices]
    held = {home.spec.name: home for home in homes}
    # Which of the flat tensors each matrix is in (ranks have equally many, but not a part of every matrix), and how
    # many ranks have a part of it.
    number = {id(flat): k for k, flat in enumerate(flats)}
    numbers = torch.tensor([number[id(held[s.name].flat)] if s.name in held else -1 for s in specs])
    holders = torch.tensor([int(s.name in held) for s in specs])
    if group is not None and specs:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(holders, group=group)
    found = list(zip(specs, numbers.tolist(), (holders > 1).tolist(), strict=True))
    for k, flat in enumerate(flats):
        places = (_place(spec, held.get(spec.name), split) for spec, at, split in found if at == k)
        optimizer.place(flat, tuple(place for place in places if place.numel or place.split))


def _place(spec: TensorSpec, home: Home | None, split: bool) -> Place:
    if home is None:
        return Place(spec.shape, 0, 0, 0, split)
    return Place(spec.shape, home.at, home.range.start - spec.offset, home.range.numel, split)


def _hidden_flats(engine: DeepSpeedEngine, stage: int) -> list[torch.Tensor]:
    groups = engine.basic_optimizer.param_groups
    if stage < 3:
        return [flat for group in groups if group[HIDDEN] for flat in group["params"]]
    owner = engine.optimizer.sub_group_to_group_id
    flats = engine.optimizer.fp32_partitioned_groups_flat
    return [flat for k, flat in enumerate(flats) if groups[owner[k]][HIDDEN]]


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _heads(model: nn.Module) -> list[nn.Module]:
    ask = getattr(model, "get_output_embeddings", None)
    head = ask() if ask is not None else None
    if isinstance(head, nn.Module):
        return [head]
    rows = max((embedding.num_embeddings for embedding in _embeddings(model)), default=0)
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == rows]
