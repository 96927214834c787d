"""A codec of whole tensors: two thin factors of the matrix, found by one power iteration.

Products with the matrix are taken in fp64, a few rows at a time, so that nothing of the size of the tensor is widened.
Source: PowerSGD (1905.13727) and DiLoCoX (2506.21263); sizes in ../shared/algorithms.md §8.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Fp32, Param, Traits, codec_of
from ray_diloco.outer.matrices import Memory, Shape, get_values, matrix_sides, put_values

# Elements of a matrix that are widened to fp64 at a time, 8 MiB.
_WIDE = 1 << 20
# Below this part of the largest, a diagonal element of R says that a column of Q depends on the others.
_DEPENDENT = 1e-6


class LowRank:
    """Factors `P` [m, r] with orthonormal columns and `Q = Mᵀ P` [n, r] of a matrix `M ≈ P Qᵀ`.

    One power iteration: `P` spans the columns of `M Q'`, where `Q'` is the `Q` of the round before, kept by the sender
    (`memory`).  Before there is one, a random matrix, drawn from the nonce, takes an iteration more: by itself it may
    lie so askew to `M` that fp32 shows it.  Exact if the rank of `M` is at most r; else `M − P Qᵀ` is orthogonal to
    `P`.  r is at most m and n.  Tensors with one row, and those whose factors would have as many elements as they,
    travel as fp32.

    Args:
      rank: r, 1 or more.
      values: name of the codec of the factors, in `codec.CODECS`.
      settings: its parameters.

    Raises:
      SyncError: RD-404, no such codec or rank.
    """

    name: ClassVar[str] = "low_rank"
    traits: ClassVar[Traits] = Traits()

    def __init__(self, rank: int = 4, values: str = "fp32", **settings: Param) -> None:
        if rank < 1:
            raise SyncError(404, f"codec 'low_rank' does not take rank {rank}", "use a rank above 0")
        self._rank = rank
        self._values = codec_of(values, settings)
        self.params: Mapping[str, Param] = {"rank": rank, "values": values, **settings}

    def nbytes(self, shape: Shape) -> int:
        """Of `m r` and of `n r` elements in the codec of the factors, fp32: `4 r (m + n)`; of a raw tensor 4 each."""
        m, n, r = self._sides(shape)
        return self._values.nbytes(m * r) + self._values.nbytes(n * r) if r else 4 * math.prod(shape)

    def memory(self, shape: Shape) -> Memory:
        """Room for `Q'`, fp32 [n, r], zeros as long as there is none; None for a tensor that travels raw."""
        _, n, r = self._sides(shape)
        return torch.zeros(n, r) if r else None

    def encode(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """Factors the matrix and leaves in `memory` where the next round begins; see `shaped.ShapedCodec`."""
        m, n, r = self._sides(shape)
        if not r:
            put_values(Fp32(), source, target, nonce)
            return
        matrix = source.view(m, n)
        start = _straightened(matrix, r, nonce) if memory is None or not memory.any() else memory.double()
        border = self._values.nbytes(m * r)
        P = torch.linalg.qr(_times(matrix, start)).Q
        put_values(self._values, P.float().reshape(-1), target[:border], nonce)
        # Q belongs to the P that is sent: then only the rounding of Q itself adds to what the factors cannot say.
        P = get_values(self._values, target[:border], m * r, nonce).view(m, r).double()
        Q = _transposed_times(matrix, P)
        put_values(self._values, Q.float().reshape(-1), target[border:], nonce)
        if memory is not None:
            _bring_forward(memory, Q)

    def encode_residual(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """As `encode`, and leaves `M − P Qᵀ` in `source`; see `shaped.ShapedCodec`."""
        self.encode(source, shape, target, memory, nonce)
        said = torch.empty_like(source)
        self.decode(target, shape, said, nonce)
        source.sub_(said)

    def decode(self, source: torch.Tensor, shape: Shape, out: torch.Tensor, nonce: int = 0) -> None:
        """`P Qᵀ`; see `shaped.ShapedCodec`."""
        m, n, r = self._sides(shape)
        if not r:
            out.copy_(get_values(Fp32(), source, out.numel(), nonce))
            return
        border = self._values.nbytes(m * r)
        P = get_values(self._values, source[:border], m * r, nonce).view(m, r)
        Q = get_values(self._values, source[border:], n * r, nonce).view(n, r)
        torch.mm(P, Q.T, out=out.view(m, n))

    def _sides(self, shape: Shape) -> tuple[int, int, int]:
        """m, n and r of a tensor; r is 0 if it travels raw."""
        m, n = matrix_sides(shape)
        r = min(self._rank, m, n)
        return m, n, 0 if len(shape) < 2 or r * (m + n) >= m * n else r


def _straightened(matrix: torch.Tensor, r: int, seed: int) -> torch.Tensor:
    """A random start after one power iteration, fp64 [n, r]."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], r, dtype=torch.float64, generator=generator)
    return _transposed_times(matrix, torch.linalg.qr(_times(matrix, start)).Q)


def _times(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`M X` in fp64: in fp32 the columns of a matrix of rank r would be found to 1e-5 only."""
    return torch.cat([rows.double() @ right for rows in torch.split(matrix, _rows(matrix))])


def _transposed_times(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`Mᵀ X` in fp64."""
    step = _rows(matrix)
    product = torch.zeros(matrix.shape[1], right.shape[1], dtype=torch.float64)
    for rows, factor in zip(torch.split(matrix, step), torch.split(right, step), strict=True):
        product.addmm_(rows.double().T, factor)
    return product


def _rows(matrix: torch.Tensor) -> int:
    return max(1, _WIDE // matrix.shape[1])


def _bring_forward(memory: torch.Tensor, Q: torch.Tensor) -> None:
    """Keeps an orthonormal basis of `Q`, unless its columns depend on one another.

    They do after a matrix of lower rank, such as zeros; what lies outside their span would then be lost for good.
    """
    basis, R = torch.linalg.qr(Q)
    diagonal = R.diagonal().abs()
    if float(diagonal.min()) > _DEPENDENT * float(diagonal.max()):
        memory.copy_(basis)
