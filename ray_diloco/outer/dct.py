"""A codec of whole tensors: the largest cosine coefficients of each tile.

Nearby elements of a matrix that move together need few coefficients, so a tile of thousands is sent as some dozens of
numbers and what they count.  Source: DeMo (2411.19870); ../shared/algorithms.md §7.1, sizes in §8.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Param, Traits, codec_of
from ray_diloco.outer.matrices import Memory, Shape, get_values, matrix_sides, put_values

# Largest side of a tile: a coefficient's number then fits into 16 bits.
_LARGEST_TILE = 256


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
        """Keeps the largest coefficients of each tile; see `shaped.ShapedCodec`."""
        self._encode(source, shape, target, nonce)

    def encode_residual(
        self, source: torch.Tensor, shape: Shape, target: torch.Tensor, memory: Memory = None, nonce: int = 0
    ) -> None:
        """As `encode`, and takes from `source` what the kept coefficients say; see `shaped.ShapedCodec`."""
        numbers, kept = self._encode(source, shape, target, nonce)
        said = kept if self._values is None else self._read_values(target, shape, nonce)
        tiles, elements, _ = self._tiles(shape)
        coefficients = torch.zeros(tiles, elements).scatter_(1, numbers, said)
        spent = torch.empty_like(source)
        self.inverse(coefficients.view(-1), shape, spent)
        source.sub_(spent)

    def decode(self, source: torch.Tensor, shape: Shape, out: torch.Tensor, nonce: int = 0) -> None:
        """The inverse transform of the coefficients that were sent; see `shaped.ShapedCodec`."""
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
            put_values(self._values, values.view(-1), target[border:], nonce)
        return numbers, values

    def _read_values(self, source: torch.Tensor, shape: Shape, nonce: int) -> torch.Tensor:
        tiles, _, kept = self._tiles(shape)
        stored = source[self._index_bytes(shape) :]
        if self._values is not None:
            return get_values(self._values, stored, tiles * kept, nonce).view(tiles, kept)
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
        m, n = matrix_sides(shape)
        high, wide = _divisor(m, self._block), _divisor(n, self._block)
        return m // high, n // wide, high, wide


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
