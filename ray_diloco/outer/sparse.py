"""Codecs that send some elements and leave the others out: the largest of each block, or random ones.

Both are chains: the kept values of a block are one unit of another codec, `values`.  Top-k (DeMo, arXiv 2411.19870;
SparseLoCo, 2508.15706) also sends where they were, with as many bits as a place in the block needs, and must be used
with error feedback.  A random mask (SPARTA) sends no places: receivers draw the same ones from seed and nonce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ray_diloco.errors import SyncError
from ray_diloco.outer import sparse_kernels
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import CODECS, Codec, Param, Traits, codec_of, refuse_parameter
from ray_diloco.outer.quantise import Quantiser

_VALUES = ("fp32", "bf16", "fp16", "int8", "int8_bin_mean", "int4", "e3m0", "2bit", "1bit")
_WORD = 0xFFFF_FFFF_FFFF_FFFF


class TopK:
    """The k elements of largest magnitude of each block, exactly; among equals the first ones.

    Bytes of a block of n elements, with k′ = min(k, n): ⌈k′ · log2(block) / 8⌉ for the indices, ascending, packed from
    the least significant bit on; then one unit of `values` with k′ elements: 4 k′ (fp32), 2 k′ (bf16, fp16), 4 + k′
    (int8), 1024 + k′ (int8_bin_mean), 4 + ⌈k′/2⌉ (int4, e3m0), 16 + ⌈k′/4⌉ (2bit), 8 + ⌈k′/8⌉ (1bit).  For fp32,
    ‖x − C(x)‖² ≤ (1 − k′/n) ‖x‖².

    Args:
      k: kept per block.
      block: elements of a block, a power of two up to `CHUNK`; 4096 is a tile of 64 × 64.
      values: codec of the kept values; its own block does not matter.
      codebook: of the codec `values`, if it has one; empty for its own default.
      rounding: of the codec `values`, if it rounds; empty for its own default.
      seed: of stochastic rounding.

    Raises:
      SyncError: RD-404, parameters that cannot be.
    """

    name = "topk"
    plain = False

    def __init__(
        self,
        k: int = 128,
        block: int = 4096,
        values: str = "fp32",
        codebook: str = "",
        rounding: str = "",
        seed: int = 0,
    ) -> None:
        if not isinstance(block, int) or block < 1 or CHUNK % block:
            raise refuse_parameter(self.name, "block", block, f"a power of two up to {CHUNK}")
        if not isinstance(k, int) or not 1 <= k <= block:
            raise refuse_parameter(self.name, "k", k, f"from 1 to block, {block}")
        self.k = k
        self.granularity = block
        self.traits = Traits()
        self.params: Mapping[str, Param] = {
            "k": k,
            "block": block,
            "values": values,
            "codebook": codebook,
            "rounding": rounding,
            "seed": seed,
        }
        self._values = _Values(self.name, values, codebook, rounding, seed)
        self._width = block.bit_length() - 1

    def nbytes(self, numel: int) -> int:
        """See the class."""
        return sum(rows * self._block_bytes(length) for _, rows, length in self._runs(numel))

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Selects, packs the indices, encodes the kept values."""
        self._encode(source, target, nonce, residual=False)

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """As `encode`; what was not kept stays, and of what was kept the error of `values`."""
        self._encode(source, target, nonce, residual=True)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Zero but for the kept values.

        Raises:
          SyncError: RD-405, an index lies outside its block.
        """
        target.zero_()
        at = 0
        for start, rows, length in self._runs(target.numel()):
            width = self._block_bytes(length)
            lines = source[at : at + rows * width].view(rows, width)
            at += rows * width
            self._put(lines, length, target[start : start + rows * length], subtract=False)

    def _encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int, residual: bool) -> None:
        at = 0
        for start, rows, length in self._runs(source.numel()):
            k, width = min(self.k, length), self._block_bytes(length)
            part = source[start : start + rows * length]
            lines = target[at : at + rows * width].view(rows, width)
            at += rows * width
            kept = torch.empty(rows * k)
            sparse_kernels.top_k(part.numpy(), length, k, self._width, lines.numpy(), kept.numpy())
            encoded = torch.empty(rows * self._values.nbytes(k), dtype=torch.uint8)
            self._values.encode(kept, k, encoded, nonce)
            lines[:, self._index_bytes(k) :].copy_(encoded.view(rows, -1))
            if residual:
                self._put(lines, length, part, subtract=True)

    def _put(self, lines: torch.Tensor, length: int, target: torch.Tensor, subtract: bool) -> None:
        k = min(self.k, length)
        kept = torch.empty(lines.shape[0] * k)
        # A copy: fp32 values behind an odd number of bytes could not be viewed as such.
        encoded = lines[:, self._index_bytes(k) :].clone(memory_format=torch.contiguous_format).view(-1)
        self._values.decode(encoded, k, kept)
        outside = sparse_kernels.scatter(lines.numpy(), length, k, self._width, kept.numpy(), target.numpy(), subtract)
        if outside:
            what = f"{outside} indices of a top-k payload lie outside their block of {length} elements"
            raise SyncError(
                405, what, "send the payload again; look for an island with another version of this package"
            )

    def _runs(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """`(start, rows, length)` of the whole blocks, then of the shorter last one."""
        rows, rest = divmod(numel, self.granularity)
        if rows:
            yield 0, rows, self.granularity
        if rest:
            yield numel - rest, 1, rest

    def _index_bytes(self, k: int) -> int:
        return (k * self._width + 7) // 8

    def _block_bytes(self, length: int) -> int:
        k = min(self.k, length)
        return self._index_bytes(k) + self._values.nbytes(k)


class Mask:
    """max(1, ⌊p n + 1/2⌋) random elements of each unit of n, the same at sender and receiver.

    Bytes of a unit: those of `values` for as many elements, 4 p n for fp32.  The places are those of a random
    permutation that seed, nonce and n determine; all whole units of one call have the same ones, so calls chunk by
    chunk with a nonce for each draw anew for each.

    Args:
      p: part that is kept, in (0, 1].
      seed: shared by all islands.
      scaled: 1 multiplies by n / kept at the receiver, which makes the code unbiased; 0 does not.
      block: elements of a unit, a power of two up to `CHUNK`.
      values: codec of the kept values; its own block does not matter.

    Raises:
      SyncError: RD-404, parameters that cannot be.
    """

    name = "mask"
    plain = False

    def __init__(
        self, p: float = 0.01, seed: int = 0, scaled: int = 0, block: int = CHUNK, values: str = "fp32"
    ) -> None:
        if not isinstance(p, int | float) or not 0.0 < p <= 1.0:
            raise refuse_parameter(self.name, "p", p, "above 0 and at most 1")
        if not isinstance(block, int) or block < 1 or CHUNK % block:
            raise refuse_parameter(self.name, "block", block, f"a power of two up to {CHUNK}")
        self.p = p
        self.seed = seed
        self.scaled = bool(scaled)
        self.granularity = block
        self.params: Mapping[str, Param] = {
            "p": p,
            "seed": seed,
            "scaled": int(scaled),
            "block": block,
            "values": values,
        }
        self.traits = Traits(linear=values == "fp32", shared_seed=True)
        self._values = _Values(self.name, values, "", "", seed)

    def kept(self, numel: int) -> int:
        """Elements that are sent of a unit of so many."""
        return max(1, int(self.p * numel + 0.5)) if numel else 0

    def positions(self, numel: int, nonce: int) -> torch.Tensor:
        """Their places, int64 [kept], each once, in no order."""
        places = np.empty(self.kept(numel), np.int64)
        sparse_kernels.positions(numel, _key(self.seed, nonce, numel), places)
        return torch.from_numpy(places)

    def nbytes(self, numel: int) -> int:
        """See the class."""
        whole, rest = divmod(numel, self.granularity)
        return whole * self._values.nbytes(self.kept(self.granularity)) + self._values.nbytes(self.kept(rest))

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Gathers, and encodes what is kept."""
        for units, places, data in self._units(source, target, nonce):
            self._values.encode(units[:, places].reshape(-1), places.numel(), data, nonce)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Zero but for the kept values."""
        target.zero_()
        for units, places, data in self._units(target, source, nonce):
            units[:, places] = self._decoded(units, places, data)

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """As `encode`; what was not kept stays."""
        self.encode(source, target, nonce)
        for units, places, data in self._units(source, target, nonce):
            units[:, places] -= self._decoded(units, places, data)

    def _units(
        self, elements: torch.Tensor, data: torch.Tensor, nonce: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """`(elements [rows, n], places, their bytes)` of the whole units, then of the shorter last one."""
        whole = elements.numel() // self.granularity * self.granularity
        split = self.nbytes(whole)
        if whole:
            yield elements[:whole].view(-1, self.granularity), self.positions(self.granularity, nonce), data[:split]
        rest = elements.numel() - whole
        if rest:
            yield elements[whole:].view(1, -1), self.positions(rest, nonce), data[split:]

    def _decoded(self, units: torch.Tensor, places: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        kept = torch.empty(units.shape[0] * places.numel())
        self._values.decode(data, places.numel(), kept)
        if self.scaled:
            kept.mul_(units.shape[1] / places.numel())
        return kept.view(units.shape[0], -1)


class _Values:
    """The codec of kept values, where the k values of a row are one unit whatever the codec's own block."""

    def __init__(self, owner: str, name: str, codebook: str, rounding: str, seed: int) -> None:
        if name not in _VALUES:
            raise refuse_parameter(owner, "values", name, f"one of {', '.join(v for v in _VALUES if v in CODECS)}")
        params: dict[str, Param] = {}
        if codebook:
            params["codebook"] = codebook
        if rounding:
            params |= {"rounding": rounding, "seed": seed}
        self._codec: Codec = codec_of(name, params)

    def nbytes(self, k: int) -> int:
        return self._codec.unit_bytes(k) if isinstance(self._codec, Quantiser) else self._codec.nbytes(k)

    def encode(self, values: torch.Tensor, k: int, target: torch.Tensor, nonce: int) -> None:
        if isinstance(self._codec, Quantiser):
            self._codec.encode_units(values, target, k, nonce)
        else:
            self._codec.encode(values, target)

    def decode(self, source: torch.Tensor, k: int, target: torch.Tensor) -> None:
        if isinstance(self._codec, Quantiser):
            self._codec.decode_units(source, target, k)
        else:
            self._codec.decode(source, target)


def _key(seed: int, nonce: int, numel: int) -> NDArray[np.uint64]:
    """Four random words from three numbers (splitmix64)."""
    state = 0
    words = []
    for number in (seed, nonce, numel, 1, 2, 3, 4):
        state = (state + 0x9E3779B97F4A7C15 + (number & _WORD)) & _WORD
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        state = z ^ (z >> 31)
        words.append(state)
    return np.array(words[-4:], np.uint64)
