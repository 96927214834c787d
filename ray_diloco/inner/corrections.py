"""What is added to the gradient, and where it is taken: FedProx, SCAFFOLD and the evaluation mix.

    FedProx     g ← g + μ (θ − B)                                             1812.06127
    SCAFFOLD    g ← g − c_m + c;   c_m⁺ = c_m − c + (B − θ) / Σ a             1910.06378
    mix         the gradient is that at  ε A + (1 − ε) θ,  the step is θ's    GPA, 2512.17131

`A`, `B`, `c` and `c_m` belong to whoever exchanges them.  They are asked for anew at each step, as `Vectors`: one flat
fp32 tensor for each of the rank's slices, in their order, on any device, nothing of which is written.
At ZeRO stage 0 a correction comes between the backward pass and clipping.  From stage 1 on gradients are whole only
when the optimiser is about to step, after DeepSpeed has clipped them: there corrections need `inner.clip=0`.
Source: ../shared/algorithms.md §2.5, §6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ray_diloco.config.schema import InnerConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner.slices import Home
from ray_diloco.outer.exchange import Slice
from ray_diloco.outer.layout import Layout, Ranges, total

Vectors = Callable[[], Sequence[torch.Tensor]]


class Correction(Protocol):
    """Changes gradients before the step."""

    def __call__(self, gradients: dict[int, torch.Tensor], slices: Sequence[Slice]) -> None:
        """Changes in place the gradients that are at hand, by number of the slice; the slices hold `θ`."""


@dataclass(frozen=True)
class Proximal:
    """`g ← g + μ (θ − B)`: pulls each step back to the base."""

    mu: float
    base: Vectors

    def __call__(self, gradients: dict[int, torch.Tensor], slices: Sequence[Slice]) -> None:
        """See `Correction`."""
        base = self.base()
        for k, gradient in gradients.items():
            theta = slices[k].values
            gradient.add_(theta - base[k].to(theta.device), alpha=self.mu)


@dataclass(frozen=True)
class ControlVariate:
    """`g ← g − c_m + c`: takes away what the island's gradient differs from everybody's on average.

    Attributes:
      own: `c_m`.
      shared: `c`.
    """

    own: Vectors
    shared: Vectors

    def __call__(self, gradients: dict[int, torch.Tensor], slices: Sequence[Slice]) -> None:
        """See `Correction`."""
        own, shared = self.own(), self.shared()
        for k, gradient in gradients.items():
            gradient.sub_(own[k].to(gradient.device)).add_(shared[k].to(gradient.device))


def next_control(
    own: torch.Tensor, shared: torch.Tensor, base: torch.Tensor, theta: torch.Tensor, rate_sum: float
) -> torch.Tensor:
    """`c_m⁺ = c_m − c + (B − θ) / Σ a` of any elements, as a new tensor; `c_m` itself if no step was done.

    Args:
      own, shared, base, theta: `c_m`, `c`, `B` and `θ` of the same elements, on one device.
      rate_sum: sum of the learning rates of the steps since `B` was adopted (`InnerRank.rate_sum`).
    """
    if rate_sum == 0.0:
        return own.clone()
    return (base - theta).div_(rate_sum).add_(own).sub_(shared)


class EvaluationMix:
    """Lets gradients be taken at `y = ε A + (1 − ε) θ`.

    Args:
      epsilon: `ε`, GPA's `μ_y`.
      anchor: `A`.
    """

    def __init__(self, epsilon: float, anchor: Vectors) -> None:
        self._epsilon, self._anchor = epsilon, anchor
        self._theta: list[torch.Tensor] = []

    @torch.no_grad()
    def enter(self, slices: Sequence[Slice]) -> None:
        """Keeps `θ` and writes `y` in its place."""
        if not self._theta:
            self._theta = [torch.empty_like(s.values) for s in slices]
        for s, theta, anchor in zip(slices, self._theta, self._anchor(), strict=True):
            theta.copy_(s.values)
            s.values.mul_(1.0 - self._epsilon).add_(anchor.to(theta.device), alpha=self._epsilon)

    @torch.no_grad()
    def leave(self, slices: Sequence[Slice]) -> None:
        """Writes `θ` back."""
        for s, theta in zip(slices, self._theta, strict=True):
            s.values.copy_(theta)


@torch.no_grad()
def correct(
    correction: Correction,
    homes: Sequence[Home],
    slices: Sequence[Slice],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Applies a correction to the gradients of the groups that the optimiser has now (DeepSpeed may show one)."""
    shown = {id(p) for group in optimizer.param_groups for p in group["params"]}
    gradients = {
        k: home.part_of(home.flat.grad)
        for k, home in enumerate(homes)
        if id(home.flat) in shown and home.flat.grad is not None
    }
    correction(gradients, slices)


def before_each_step(optimizer: torch.optim.Optimizer, do: Callable[[], None]) -> None:
    """Has `do` called whenever the optimiser is about to step."""

    def hook(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        do()

    optimizer.register_step_pre_hook(hook)


def over_slices(
    packed: torch.Tensor,
    emits: Ranges,
    slices: Sequence[Slice],
    layout: Layout,
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """A vector that the ranks have by what they emit, as one by what they hold (`Vectors`).

    Collective where a rank holds more than it emits: ZeRO stage 0 with several ranks.

    Args:
      packed: fp32 [total(emits)] on the CPU, this rank's part.
      emits, slices: elements of that part, and what the rank holds, ascending.
      layout: the canonical form.
      group: gloo group of the island; None for a single rank.

    Returns:
      One flat tensor for each slice; views of `packed` where nothing had to be fetched.
    """
    sizes = [s.range.numel for s in slices]
    if group is None or total(emits) == sum(sizes):
        return list(torch.split(packed, sizes))
    # Every rank holds everything: the parts, each in its place, add up to the whole.
    whole = torch.zeros(layout.numel)
    start = 0
    for r in emits:
        whole[r.start : r.stop] = packed[start : start + r.numel]
        start += r.numel
    dist.all_reduce(whole, group=group)
    return [whole[s.range.start : s.range.stop] for s in slices]


def check_correction(inner: InnerConfig) -> None:
    """Refuses a correction that DeepSpeed's clipping would come before.

    Raises:
      InnerError: RD-715.
    """
    if inner.correction != "none" and inner.zero_stage > 0 and inner.clip > 0:
        raise InnerError(
            715,
            f"inner.correction={inner.correction} with inner.zero_stage={inner.zero_stage} and "
            f"inner.clip={inner.clip:g}: DeepSpeed clips gradients before they can be corrected",
            "set inner.clip=0, or inner.zero_stage=0",
        )


def check_given(inner: InnerConfig, correction: object, mix: object) -> None:
    """Refuses to train without what the settings ask for.

    Raises:
      InnerError: RD-716.
    """
    for key, wanted, given in (
        (f"inner.correction={inner.correction}", inner.correction != "none", correction is not None),
        (f"inner.mix={inner.mix:g}", inner.mix > 0, mix is not None),
    ):
        if wanted and not given:
            raise InnerError(
                716,
                f"{key}, but this rank was not given the vectors that it needs",
                "set `InnerRank.correction` or `InnerRank.mix` first; in a run this is a defect, please report it",
            )
