"""Kernel of the commonest outer step: the last of the contributions to a mean is added, then Nesterov moves the anchor.

One pass in place of seven, with the bits of the torch operations that it stands for: where torch adds a multiple of a
tensor it rounds once, and so does `fma`.  Where torch rounds otherwise the bits would differ, so `same_bits` compares
before the kernel is used.  Imported only by who merges much, since numba takes a third of a second.
Measured: docs/benchmarks.md, "An anchor shard alone".
"""

# numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="call-arg,var-annotated"

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from ray_diloco.outer.compiled import compiled

# Elements that are compared: whole vectors of every processor, and a rest.
COMPARED = 1003


@intrinsic
def fma(typing, x, y, z):
    """`x y + z`, rounded once; fp32."""

    def build(context, builder, signature, values):
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), build


@compiled()
def add_and_step(so_far, scale, last, factor, u, momentum, anchor, rate, delta, u_out, anchor_out, moved):
    """`Δ = scale so_far + factor last; u' = μ u + Δ; A' = A + rate (Δ + μ u')`, and what the anchor moved by."""
    for i in range(delta.size):
        gradient = fma(last[i], factor, so_far[i] * scale)
        velocity = u[i] * momentum + gradient
        after = fma(fma(velocity, momentum, gradient), rate, anchor[i])
        delta[i] = gradient
        u_out[i] = velocity
        anchor_out[i] = after
        moved[i] = after - anchor[i]


@torch.no_grad()
def by_torch(so_far, scale, last, factor, u, momentum, anchor, rate, delta, u_out, anchor_out, moved):
    """The operations that `add_and_step` stands for, on tensors."""
    torch.mul(so_far, scale, out=delta).add_(last, alpha=factor)
    torch.mul(u, momentum, out=u_out).add_(delta)
    torch.add(delta, u_out, alpha=momentum, out=anchor_out)
    torch.add(anchor, anchor_out, alpha=rate, out=anchor_out)
    torch.sub(anchor_out, anchor, out=moved)


def fused(
    so_far: torch.Tensor,
    scale: float,
    last: torch.Tensor,
    factor: float,
    u: torch.Tensor,
    momentum: float,
    anchor: torch.Tensor,
    rate: float,
    delta: torch.Tensor,
    u_out: torch.Tensor,
    anchor_out: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    """`add_and_step` on tensors: fp32 [n], contiguous, on the host; three times slower where two of them overlap.

    Args:
      so_far: the sum of the other contributions; with `scale` the first of two.
      scale: its factor.
      last: the last contribution.
      factor: its factor.
      u: momentum; not written.
      momentum: `μ`.
      anchor: `A`; not written.
      rate: `−η`.
      delta: where the merged `Δ` goes.
      u_out: where the new momentum goes.
      anchor_out: where the new anchor goes.
      moved: where the difference of the anchors goes.
    """
    add_and_step(
        so_far.numpy(), np.float32(scale), last.numpy(), np.float32(factor), u.numpy(), np.float32(momentum),
        anchor.numpy(), np.float32(rate), delta.numpy(), u_out.numpy(), anchor_out.numpy(), moved.numpy(),
    )  # fmt: skip


@cache
def same_bits() -> bool:
    """Whether `fused` gives the bits of torch on this machine; compiles it."""
    numbers = torch.Generator().manual_seed(0)
    a, b, u, anchor = torch.randn(4, COMPARED, generator=numbers).unbind()
    outs = []
    for step in (by_torch, fused):
        out = [torch.empty(COMPARED) for _ in range(4)]
        step(a, 0.3, b, 0.7, u, 0.9, anchor, -0.7, *out)
        outs.append(torch.cat(out))
    return torch.equal(*(out.view(torch.int32) for out in outs))
