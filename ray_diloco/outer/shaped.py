"""Codecs that need the shape of a tensor: a cosine transform of its tiles, and two thin factors of its matrix.

    dct         the largest cosine coefficients of each tile (DeMo, 2411.19870; ../shared/algorithms.md §7.1)
    low_rank    M ≈ P Qᵀ by one power iteration (PowerSGD, 1905.13727; DiLoCoX, 2506.21263)

They code whole tensors, never a part of one, so who holds a whole tensor codes it: a rank that does, or the keeper.  A
tensor with more than two dimensions counts as a matrix whose rows are all but the last; one with fewer has one row.
Sizes are exact to the byte (§8.4).  A new codec is one class and one line in `SHAPED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import ClassVar, Protocol

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Codec, Fp32, Param, Traits, codec_of

Shape = tuple[int, ...]
# What a sender keeps of a tensor between rounds.
Memory = torch.Tensor | None

# Elements of a matrix that are widened to fp64 at a time, 8 MiB.
_WIDE = 1 << 20
# Largest side of a tile: a coefficient's number then fits into 16 bits.
_LARGEST_TILE = 256
# Below this part of the largest, a diagonal element of R says that a column of Q depends on the others.
_DEPENDENT = 1e-6


class ShapedCodec(Protocol):
    """Bytes for one whole fp32 tensor of known shape."""

    @property
    def name(self) -> str:
        """Key in `SHAPED`; travels in the header of a payload."""
        ...

    @property
    def params(self) -> Mapping[str, Param]:
        """Arguments that build the same codec at the receiver; they travel too."""
        ...

    @property
    def traits(self) -> Traits:
        """What it is, for the checker."""
        ...

    def nbytes(self, shape: Shape) -> int:
        """Bytes of a tensor."""
        ...

    def memory(self, shape: Shape) -> Memory:
        """What the sender keeps of a tensor between rounds, as it is before the first; None if nothing."""
        ...

    def encode(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """Writes a tensor as bytes.

        Args:
          source: fp32 [numel], finite.
          shape: of the tensor.
          target: uint8 [nbytes(shape)]; need not be aligned.
          memory: what `memory` gave, brought forward by each encoding; None: begin anew.
          nonce: number that sender and receiver know, another one for each round and tensor.
        """
        ...

    def encode_residual(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """As `encode`, and leaves in `source` what the bytes do not say: `source ← source − decode(target)`."""
        ...

    def decode(self, source: torch.Tensor, shape: Shape, out: torch.Tensor, nonce: int = 0) -> None:
        """Writes the elements of uint8 `source` [nbytes(shape)] into fp32 `out` [numel].

        Raises:
          SyncError: RD-405, the bytes are no code of such a tensor.
        """
        ...


class Dct:
    """Orthonormal cosine transform (DCT-II) of each tile, of which the `k` largest coefficients travel.

    The sides of a tile are the largest divisors of those of the matrix that are at most `block`.  The bytes are the
    numbers of the coefficients, each in `⌈log2(elements of a tile)⌉` bits, those of a tile ascending, then their
    values; both begin at a byte.  As the transform keeps norms, `‖x − C(x)‖² ≤ (1 − k/elements of a tile) ‖x‖²`.

    With `values` sign, one bit says whether a coefficient is below 0, and decodes to −1 or 1: only an outer optimiser
    that looks at signs can use it, and a tile of zeros does not decode to zeros.  As in DeMo the residual then lacks
    what the kept coefficients were, not their signs.

    Args:
      block: largest side of a tile, 1 to 256.
      k: coefficients kept of each tile, or all if it has fewer.
      values: name of the codec of the kept values, in `codec.CODECS`, or sign (1 bit).
      settings: parameters of that codec.

    Raises:
      SyncError: RD-404, one of them is impossible.
    """

    name: ClassVar[str] = "dct"
    traits: ClassVar[Traits] = Traits()

    def __init__(self, block: int = 64, k: int = 32, values: str = "fp32", **settings: Param) -> None:
        if not 1 <= block <= _LARGEST_TILE or k < 1:
            what = f"codec 'dct' does not take block {block} and k {k}"
            raise SyncError(404, what, f"use tiles of 1 to {_LARGEST_TILE}, and k above 0")
        self._block = block
        self._k = k
        self._values = None if values == "sign" else codec_of(values, settings)
        self.params: Mapping[str, Param] = {"block": block, "k": k, "values": values, **settings}

    def nbytes(self, shape: Shape) -> int:
        """`⌈kept · bits / 8⌉` for the numbers of the coefficients; 4 (fp32), 2 (bf16) or ⅛ (sign) for each value."""
        return self._index_bytes(shape) + self._value_bytes(shape)

    def memory(self, shape: Shape) -> None:
        """Nothing is kept."""
        return

    def encode(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """Keeps the largest coefficients of each tile; see `ShapedCodec`."""
        self._encode(source, shape, target, nonce)

    def encode_residual(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """As `encode`, and takes from `source` what the kept coefficients say; see `ShapedCodec`."""
        numbers, kept = self._encode(source, shape, target, nonce)
        said = kept if self._values is None else self._read_values(target, shape, nonce)
        tiles, elements, _ = self._tiles(shape)
        coefficients = torch.zeros(tiles, elements).scatter_(1, numbers, said)
        spent = torch.empty_like(source)
        self.inverse(coefficients.view(-1), shape, spent)
        source.sub_(spent)

    def decode(self, source: torch.Tensor, shape: Shape, out: torch.Tensor, nonce: int = 0) -> None:
        """The inverse transform of the coefficients that were sent; see `ShapedCodec`."""
        coefficients = torch.empty_like(out)
        self.decode_coefficients(source, shape, coefficients, nonce=nonce)
        self.inverse(coefficients, shape, out)

    def decode_coefficients(
        self, source: torch.Tensor, shape: Shape, out: torch.Tensor, sent: torch.Tensor | None = None, nonce: int = 0
    ) -> None:
        """The coefficients alone, so that they can be merged over those who sent them before `inverse`.

        Args:
          source: uint8 [nbytes(shape)].
          shape: of the tensor.
          out: fp32 [numel], tile after tile; 0 where nothing was sent.
          sent: bool [numel], whether the coefficient was sent; None: not wanted.
          nonce: that of the encoding.

        Raises:
          SyncError: RD-405, the bytes name coefficients that a tile does not have.
        """
        tiles, elements, kept = self._tiles(shape)
        numbers = _unpack(source[: self._index_bytes(shape)], tiles * kept, _bits(elements))
        if numbers.size and int(numbers.max()) >= elements:
            what = f"a tile of {elements} coefficients is said to have one with the number {int(numbers.max())}"
            raise SyncError(405, what, "run one version on all islands")
        index = torch.from_numpy(numbers.astype(np.int64)).view(tiles, kept)
        out.zero_().view(tiles, elements).scatter_(1, index, self._read_values(source, shape, nonce))
        if sent is not None:
            sent.zero_().view(tiles, elements).scatter_(1, index, True)

    def transform(self, source: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The coefficients of a tensor.

        Args:
          source: fp32 [numel].
          shape: of the tensor.

        Returns:
          fp32 [tiles, elements of a tile].
        """
        rows, columns, high, wide = self._sides(shape)
        tiles = source.view(rows, high, columns, wide).transpose(1, 2)
        return (_cosines(high) @ (tiles @ _cosines(wide).T)).reshape(rows * columns, high * wide)

    def inverse(self, coefficients: torch.Tensor, shape: Shape, out: torch.Tensor) -> None:
        """Writes the tensor of fp32 `coefficients` [numel], tile after tile, into fp32 `out` [numel]."""
        rows, columns, high, wide = self._sides(shape)
        tiles = coefficients.view(rows, columns, high, wide)
        out.view(rows, high, columns, wide).copy_((_cosines(high).T @ (tiles @ _cosines(wide))).transpose(1, 2))

    def _encode(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, nonce: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the bytes; returns numbers and values of the kept coefficients, [tiles, kept] each."""
        _, elements, kept = self._tiles(shape)
        coefficients = self.transform(source, shape)
        numbers = coefficients.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
        values = coefficients.gather(1, numbers)
        border = self._index_bytes(shape)
        _pack(numbers, _bits(elements), target[:border])
        if self._values is None:
            signs = np.packbits((values < 0).numpy().reshape(-1), bitorder="little")
            target[border:].copy_(torch.from_numpy(signs))
        else:
            _put(self._values, values.view(-1), target[border:], nonce)
        return numbers, values

    def _read_values(self, source: torch.Tensor, shape: Shape, nonce: int) -> torch.Tensor:
        tiles, _, kept = self._tiles(shape)
        stored = source[self._index_bytes(shape) :]
        if self._values is not None:
            return _get(self._values, stored, tiles * kept, nonce).view(tiles, kept)
        below = np.unpackbits(stored.numpy(), count=tiles * kept, bitorder="little")
        return torch.from_numpy(1 - 2 * below.astype(np.float32)).view(tiles, kept)

    def _index_bytes(self, shape: Shape) -> int:
        tiles, elements, kept = self._tiles(shape)
        return -(-tiles * kept * _bits(elements) // 8)

    def _value_bytes(self, shape: Shape) -> int:
        tiles, _, kept = self._tiles(shape)
        return -(-tiles * kept // 8) if self._values is None else self._values.nbytes(tiles * kept)

    def _tiles(self, shape: Shape) -> tuple[int, int, int]:
        """Number of tiles, elements of each, and how many of those are kept."""
        rows, columns, high, wide = self._sides(shape)
        return rows * columns, high * wide, min(self._k, high * wide)

    def _sides(self, shape: Shape) -> tuple[int, int, int, int]:
        """Tiles below one another and side by side; height and width of each."""
        m, n = _matrix(shape)
        high, wide = _divisor(m, self._block), _divisor(n, self._block)
        return m // high, n // wide, high, wide


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
        """Factors the matrix and leaves in `memory` where the next round begins; see `ShapedCodec`."""
        m, n, r = self._sides(shape)
        if not r:
            _put(Fp32(), source, target, nonce)
            return
        matrix = source.view(m, n)
        start = _straightened(matrix, r, nonce) if memory is None or not memory.any() else memory.double()
        border = self._values.nbytes(m * r)
        P = torch.linalg.qr(_times(matrix, start)).Q
        _put(self._values, P.float().reshape(-1), target[:border], nonce)
        # Q belongs to the P that is sent: then only the rounding of Q itself adds to what the factors cannot say.
        P = _get(self._values, target[:border], m * r, nonce).view(m, r).double()
        Q = _transposed_times(matrix, P)
        _put(self._values, Q.float().reshape(-1), target[border:], nonce)
        if memory is not None:
            _bring_forward(memory, Q)

    def encode_residual(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """As `encode`, and leaves `M − P Qᵀ` in `source`; see `ShapedCodec`."""
        self.encode(source, shape, target, memory, nonce)
        said = torch.empty_like(source)
        self.decode(target, shape, said, nonce)
        source.sub_(said)

    def decode(self, source: torch.Tensor, shape: Shape, out: torch.Tensor, nonce: int = 0) -> None:
        """`P Qᵀ`; see `ShapedCodec`."""
        m, n, r = self._sides(shape)
        if not r:
            out.copy_(_get(Fp32(), source, out.numel(), nonce))
            return
        border = self._values.nbytes(m * r)
        P = _get(self._values, source[:border], m * r, nonce).view(m, r)
        Q = _get(self._values, source[border:], n * r, nonce).view(n, r)
        torch.mm(P, Q.T, out=out.view(m, n))

    def _sides(self, shape: Shape) -> tuple[int, int, int]:
        """m, n and r of a tensor; r is 0 if it travels raw."""
        m, n = _matrix(shape)
        r = min(self._rank, m, n)
        return m, n, 0 if len(shape) < 2 or r * (m + n) >= m * n else r


SHAPED: dict[str, Callable[..., ShapedCodec]] = {"dct": Dct, "low_rank": LowRank}


def shaped_of(name: str, params: Mapping[str, Param] | None = None) -> ShapedCodec:
    """Builds a codec from what a configuration or a header says.

    Raises:
      SyncError: RD-404, no codec of that name, or not with these parameters.
    """
    given = dict(params or {})
    if name not in SHAPED:
        known = ", ".join(sorted(SHAPED))
        raise SyncError(404, f"there is no codec {name!r} of whole tensors", f"use one of {known}")
    try:
        return SHAPED[name](**given)
    except TypeError as error:
        raise SyncError(404, f"codec {name!r} does not take {given}: {error}", "use its own parameters") from None


def _matrix(shape: Shape) -> tuple[int, int]:
    """Rows and columns."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _divisor(side: int, most: int) -> int:
    """The largest divisor of `side` that is at most `most`."""
    return next(d for d in range(min(side, most), 0, -1) if side % d == 0) if side else 1


def _bits(elements: int) -> int:
    """Bits that tell `elements` coefficients apart."""
    return max(0, elements - 1).bit_length()


@lru_cache
def _cosines(n: int) -> torch.Tensor:
    """The orthonormal DCT-II, fp32 [n, n]: row k has `√(2/n) cos(π (2i + 1) k / 2n)`, row 0 has `√(1/n)`."""
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    rows[0] = np.sqrt(1 / n)
    return torch.from_numpy(rows).float()


def _pack(numbers: torch.Tensor, bits: int, target: torch.Tensor) -> None:
    """Writes numbers below 2^bits ≤ 2^16 one behind the other, lowest bit first."""
    octets = numbers.numpy().astype("<u2").reshape(-1, 1).view(np.uint8)
    packed = np.packbits(np.unpackbits(octets, axis=1, count=bits, bitorder="little"), bitorder="little")
    target.copy_(torch.from_numpy(packed))


def _unpack(source: torch.Tensor, count: int, bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    rows = np.zeros((count, 16), np.uint8)
    rows[:, :bits] = np.unpackbits(source.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    return np.packbits(rows, axis=1, bitorder="little").view("<u2").reshape(-1)


def _put(codec: Codec, values: torch.Tensor, target: torch.Tensor, nonce: int) -> None:
    """Encodes by way of memory of its own: a codec may view its bytes as wider numbers, `target` may lie anywhere."""
    aligned = torch.empty(target.numel(), dtype=torch.uint8)
    codec.encode(values, aligned, nonce=nonce)
    target.copy_(aligned)


def _get(codec: Codec, source: torch.Tensor, numel: int, nonce: int) -> torch.Tensor:
    values = torch.empty(numel)
    codec.decode(source.clone(), values, nonce=nonce)
    return values


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
