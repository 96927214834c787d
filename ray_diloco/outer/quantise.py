"""Codecs of 8, 4, 2 and 1 bits an element.

All are made of units that stand alone: a head (a scale or a codebook of fp32 numbers), then the codes of the unit's
elements, packed.  Those with a scale keep zero, sign and the largest element; those with a codebook keep the sum, as an
entry is the mean of the elements that it stands for.  Below 4 bits use error feedback.  Sources: int8 of INTELLECT-1
(arXiv 2412.01152), E3M0 of Streaming DiLoCo (2501.18512), 2 bits of MuLoCo (2505.23725) and SparseLoCo (2508.15706);
formulas in ../shared/algorithms.md §3.3, §4.1, §8.4, and where the code computes them: `scale_kernels.py`,
`e3m0_kernels.py`, `bin_mean_kernels.py` and `codebook_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ray_diloco.outer import bin_mean_kernels, codebook_kernels, e3m0_kernels, scale_kernels
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import Param, Traits, refuse_parameter

# Elements that share a scale or a codebook where nothing is said: one chunk of a pass.
UNIT = CHUNK

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_WORD = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True)
class Quantiser:
    """A codec of units with a head and packed codes; the functions below build them.

    Attributes:
      name: see `Codec`.
      params: see `Codec`.
      granularity: elements of a unit.
      head: bytes in front of the codes of each unit.
      bits: bits of a code.
      encoder: kernel `(x, unit, out, nonce)`.
      decoder: kernel `(data, unit, y, subtract)`.
    """

    name: str
    params: Mapping[str, Param]
    granularity: int
    head: int
    bits: int
    encoder: Callable[[Floats, int, Bytes, Any], None]
    decoder: Callable[[Bytes, int, Floats, bool], None]

    @property
    def plain(self) -> bool:
        """Never."""
        return False

    @property
    def traits(self) -> Traits:
        """Lossy, not linear: units have scales of their own."""
        return Traits()

    def unit_bytes(self, numel: int) -> int:
        """Bytes of one unit of so many elements: ⌈bits · numel / 8⌉ behind the head."""
        return self.head + (numel * self.bits + 7) // 8 if numel else 0

    def nbytes(self, numel: int) -> int:
        """Those of the whole units and of the shorter last one."""
        whole, rest = divmod(numel, self.granularity)
        return whole * self.unit_bytes(self.granularity) + self.unit_bytes(rest)

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Quantises unit by unit."""
        self.encode_units(source, target, self.granularity, nonce)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Looks up or multiplies unit by unit."""
        self.decode_units(source, target, self.granularity)

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Quantises and subtracts what the codes say."""
        self.encode_units(source, target, self.granularity, nonce)
        self.decoder(target.numpy(), self.granularity, source.numpy(), True)

    def encode_units(self, source: torch.Tensor, target: torch.Tensor, unit: int, nonce: int = 0) -> None:
        """As `encode`, in units of another length; `sparse.py` has one for the kept values of each block."""
        self.encoder(source.numpy(), unit, target.numpy(), np.uint64(nonce & _WORD))

    def decode_units(self, source: torch.Tensor, target: torch.Tensor, unit: int) -> None:
        """As `decode`, in units of another length."""
        self.decoder(source.numpy(), unit, target.numpy(), False)


def int8(block: int = 4096, rounding: str = "nearest", seed: int = 0) -> Quantiser:
    """Block absmax, d + 4⌈d/block⌉ bytes: a byte q = −127 … 127 for x = q · absmax / 127; error ≤ absmax/254.

    Args:
      block: elements that share an absmax; divides `CHUNK`.
      rounding: nearest (even) or stochastic: up with the probability of the fraction, unbiased, error ≤ absmax/127.
      seed: of stochastic rounding, beside the nonce, the block's absmax and the element's place in its block.

    Raises:
      SyncError: RD-404, no such block or rounding.
    """
    stochastic = _rounding("int8", block, rounding)
    word = np.uint64(seed & _WORD)
    return Quantiser(
        "int8",
        {"block": block, "rounding": rounding, "seed": seed},
        block,
        head=4,
        bits=8,
        encoder=lambda x, unit, out, nonce: scale_kernels.int8_encode(x, unit, out, stochastic, word, nonce),
        decoder=scale_kernels.int8_decode,
    )


def int4(block: int = 128, rounding: str = "nearest", seed: int = 0) -> Quantiser:
    """Linear with block absmax, two codes a byte, d/2 + 4⌈d/block⌉ bytes: q = −7 … 7; error ≤ absmax/14.

    128 elements share a scale where nothing is said: 4.25 bits an element, and one large element coarsens 127 others,
    not thousands; shorter blocks are slower.  Arguments and errors as for `int8`.
    """
    stochastic = _rounding("int4", block, rounding)
    word = np.uint64(seed & _WORD)
    return Quantiser(
        "int4",
        {"block": block, "rounding": rounding, "seed": seed},
        block,
        head=4,
        bits=4,
        encoder=lambda x, unit, out, nonce: scale_kernels.int4_encode(x, unit, out, stochastic, word, nonce),
        decoder=scale_kernels.int4_decode,
    )


def e3m0(scale: str = "sampled") -> Quantiser:
    """Sign and 3 bits of exponent, d/2 + 4 bytes per unit of `UNIT`: 0 and ±2^(e−3) · s for e = 1 … 7.

    To the nearest of these 15 values; a tie goes away from zero; beyond 16 s it is 16 s.  Relative error ≤ 1/3 from s/4
    to 16 s.  Odd, and equivariant under powers of two (while s/8 and 16 s are normal numbers).

    Args:
      scale: what s is: median, that of the unit's non-zero |x|, exactly, the lower of the two middle ones; or sampled,
        the same of about `e3m0_kernels.SAMPLE` elements spread over the unit (all of them for as many or fewer), which
        is within a few percent of it and takes half of the time.  The method's paper (2501.18512) leaves s open.

    Raises:
      SyncError: RD-404, no such scale.
    """
    if scale not in ("median", "sampled"):
        raise refuse_parameter("e3m0", "scale", scale, "median or sampled")
    exact = scale == "median"
    return Quantiser(
        "e3m0",
        {"scale": scale},
        UNIT,
        head=4,
        bits=4,
        encoder=lambda x, unit, out, nonce: e3m0_kernels.e3m0_encode(x, unit, out, exact),
        decoder=e3m0_kernels.e3m0_decode,
    )


def int8_bin_mean() -> Quantiser:
    """256 equal bins between mean − 3σ and mean + 3σ (σ over n), d + 1024 bytes per unit of `UNIT`.

    What lies beyond goes to the first or the last bin.  A codebook entry is the mean of the elements in its bin, so
    that the sum is kept, and the error of what lies within all but those two bins is at most a bin, 6σ/256.
    """
    return Quantiser(
        "int8_bin_mean",
        {},
        UNIT,
        head=1024,
        bits=8,
        encoder=lambda x, unit, out, nonce: bin_mean_kernels.bin_mean8_encode(x, unit, out),
        decoder=bin_mean_kernels.bin_mean8_decode,
    )


def two_bit(codebook: str = "quantile") -> Quantiser:
    """A codebook of 4, four codes a byte, d/4 + 16 bytes per unit of `UNIT`; an entry is the mean of its elements.

    Args:
      codebook: quantile (borders are the quartiles of about `codebook_kernels.BORDER_SAMPLE` elements spread over the
        unit, all of them for as many or fewer) or bin_mean (four equal bins between mean − 3σ and mean + 3σ).

    Raises:
      SyncError: RD-404, no such codebook.
    """
    quantile = _codebook("2bit", codebook)
    return Quantiser(
        "2bit",
        {"codebook": codebook},
        UNIT,
        head=16,
        bits=2,
        encoder=lambda x, unit, out, nonce: codebook_kernels.two_bit_encode(x, unit, out, quantile),
        decoder=codebook_kernels.two_bit_decode,
    )


def one_bit(codebook: str = "bin_mean") -> Quantiser:
    """A codebook of 2, eight codes a byte, d/8 + 8 bytes per unit of `UNIT`; an entry is the mean of its elements.

    Args:
      codebook: quantile (the border is the median of a sample, as for `two_bit`) or bin_mean (it is the mean).

    Raises:
      SyncError: RD-404, no such codebook.
    """
    quantile = _codebook("1bit", codebook)
    return Quantiser(
        "1bit",
        {"codebook": codebook},
        UNIT,
        head=8,
        bits=1,
        encoder=lambda x, unit, out, nonce: codebook_kernels.one_bit_encode(x, unit, out, quantile),
        decoder=codebook_kernels.one_bit_decode,
    )


def _rounding(name: str, block: int, rounding: str) -> bool:
    """Checks the parameters of the linear codecs; whether to round stochastically."""
    if not isinstance(block, int) or block < 1 or CHUNK % block:
        raise refuse_parameter(name, "block", block, f"a power of two up to {CHUNK}")
    if rounding not in ("nearest", "stochastic"):
        raise refuse_parameter(name, "rounding", rounding, "nearest or stochastic")
    return rounding == "stochastic"


def _codebook(name: str, codebook: str) -> bool:
    """Whether it is the one of quantiles."""
    if codebook not in ("quantile", "bin_mean"):
        raise refuse_parameter(name, "codebook", codebook, "quantile or bin_mean")
    return codebook == "quantile"
