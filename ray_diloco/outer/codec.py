"""How numbers travel: fp32 vectors to bytes and back, exactly or with a loss that the codec's name tells.

A codec works on runs of whole units of `granularity` elements, each of which stands alone in the bytes: any such run
can be encoded and decoded by itself, which is what the cache-sized passes of `shard.py` and `exchange.py` do.  Sizes
are exact to the byte (../shared/algorithms.md §8.4).  What is not finite is the caller's to refuse; a codec only
promises not to fail on it.  A new codec is one class or function and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, Protocol

import torch

from ray_diloco.errors import SyncError

Param = int | float | str

# Elements that are converted at a time where a conversion needs room of its own: they stay in the cache.
_PIECE = 32768
_LARGEST_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class Traits:
    """What a codec is, for the checker of combinations (../shared/algorithms.md §10.3).

    Attributes:
      lossless: decoding gives back every bit.
      linear: a sum of codes is the code of the sum.
      stateful: it remembers what it left out (error feedback).
      integer: codes are elements of an integer ring.
      shared_seed: sender and receiver draw from the same seed.
    """

    lossless: bool = False
    linear: bool = False
    stateful: bool = False
    integer: bool = False
    shared_seed: bool = False


class Codec(Protocol):
    """Bytes for fp32 elements."""

    @property
    def name(self) -> str:
        """Key in `CODECS`; travels in the header of a payload."""
        ...

    @property
    def params(self) -> Mapping[str, Param]:
        """Arguments that build the same codec at the receiver; they travel too."""
        ...

    @property
    def granularity(self) -> int:
        """Elements per unit; divides `chunks.CHUNK`.  Only the last unit of a vector may be shorter."""
        ...

    @property
    def plain(self) -> bool:
        """Whether the bytes are the fp32 elements themselves, so that a pass may read and write them in place."""
        ...

    @property
    def traits(self) -> Traits:
        """What it is, for the checker."""
        ...

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements; additive over runs of whole units."""
        ...

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Writes fp32 `source` [n] as bytes into `target` [nbytes(n)], uint8.

        `nonce` differs per round and chunk and is the same at the receiver; random masks and stochastic rounding use
        it, others do not.
        """
        ...

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Writes the elements of uint8 `source` [nbytes(n)] into fp32 `target` [n]."""
        ...

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """As `encode`, and leaves in `source` what the bytes do not say: source ← source − decode(target)."""
        ...


class Fp32:
    """4 bytes an element, exact."""

    name: ClassVar[str] = "fp32"
    granularity: ClassVar[int] = 1
    plain: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(lossless=True, linear=True)
    params: ClassVar[Mapping[str, Param]] = {}

    def nbytes(self, numel: int) -> int:
        """4 per element."""
        return 4 * numel

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Copies."""
        target.view(torch.float32).copy_(source)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Copies."""
        target.copy_(source.view(torch.float32))

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Copies; nothing is left."""
        self.encode(source, target)
        source.zero_()


class Bf16:
    """2 bytes an element: sign, 8 bits of exponent, 7 of fraction; rounds to nearest even, error ≤ 2^-9 relative."""

    name: ClassVar[str] = "bf16"
    granularity: ClassVar[int] = 1
    plain: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits()
    params: ClassVar[Mapping[str, Param]] = {}

    def nbytes(self, numel: int) -> int:
        """2 per element."""
        return 2 * numel

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Rounds to nearest even."""
        target.view(torch.bfloat16).copy_(source)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Exact."""
        target.copy_(source.view(torch.bfloat16))

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Leaves the rounding errors."""
        self.encode(source, target)
        source.sub_(target.view(torch.bfloat16))


class Fp16:
    """2 bytes an element: sign, 5 bits of exponent, 10 of fraction; rounds to nearest even.

    Error ≤ 2^-11 relative from 2^-14 on and ≤ 2^-25 below.  What lies beyond ±65504, the largest number, becomes that;
    error feedback then keeps the rest.
    """

    name: ClassVar[str] = "fp16"
    granularity: ClassVar[int] = 1
    plain: ClassVar[bool] = False
    traits: ClassVar[Traits] = Traits()
    params: ClassVar[Mapping[str, Param]] = {}

    def nbytes(self, numel: int) -> int:
        """2 per element."""
        return 2 * numel

    def encode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Rounds to nearest even within ±65504."""
        halves = target.view(torch.float16)
        room = torch.empty(min(_PIECE, source.numel()))
        for start in range(0, source.numel(), _PIECE):
            values = source[start : start + _PIECE]
            inside = torch.clamp(values, -_LARGEST_FP16, _LARGEST_FP16, out=room[: values.numel()])
            halves[start : start + _PIECE].copy_(inside)

    def decode(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Exact."""
        target.copy_(source.view(torch.float16))

    def encode_residual(self, source: torch.Tensor, target: torch.Tensor, nonce: int = 0) -> None:
        """Leaves the rounding errors and what lies beyond the largest number."""
        self.encode(source, target)
        source.sub_(target.view(torch.float16))


def _from(module: str, name: str) -> Callable[..., Codec]:
    """A builder that imports its module when it is called: those need numba, which takes a second."""

    def build(**params: Param) -> Codec:
        builder: Callable[..., Codec] = getattr(import_module(f"ray_diloco.outer.{module}"), name)
        return builder(**params)

    return build


CODECS: dict[str, Callable[..., Codec]] = {
    "fp32": Fp32,
    "bf16": Bf16,
    "fp16": Fp16,
    "int8": _from("quantise", "int8"),
    "int8_bin_mean": _from("quantise", "int8_bin_mean"),
    "int4": _from("quantise", "int4"),
    "e3m0": _from("quantise", "e3m0"),
    "2bit": _from("quantise", "two_bit"),
    "1bit": _from("quantise", "one_bit"),
    "topk": _from("sparse", "TopK"),
    "mask": _from("sparse", "Mask"),
}


def refuse_parameter(codec: str, parameter: str, value: object, wanted: str) -> SyncError:
    """The error for a parameter of a codec that cannot be (RD-404)."""
    return SyncError(404, f"codec {codec!r} does not take {parameter}={value!r}", f"{parameter} is {wanted}")


def codec_of(name: str, params: Mapping[str, Param] | None = None) -> Codec:
    """Builds a codec from what a configuration or a header says.

    Raises:
      SyncError: RD-404, no codec of that name, or not with these parameters.
    """
    given = dict(params or {})
    if name not in CODECS:
        known = ", ".join(sorted(CODECS))
        raise SyncError(404, f"there is no codec {name!r}", f"use one of {known}, and one version on all islands")
    try:
        return CODECS[name](**given)
    except TypeError as error:
        raise SyncError(404, f"codec {name!r} does not take {given}: {error}", "use its own parameters") from None
