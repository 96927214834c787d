"""How numbers travel: fp32 vectors to bytes and back, exactly or with a loss that the codec's name tells.

A codec works on runs of whole units of `granularity` elements, each of which stands alone in the bytes: any such run
can be encoded and decoded by itself, which is what the cache-sized passes of `shard.py` and `exchange.py` do.  Sizes
are exact to the byte (../shared/algorithms.md §8.4).  A new codec is one class and one line in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ray_diloco.errors import SyncError

Param = int | float | str


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

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Writes fp32 `source` [n] as bytes into `target` [nbytes(n)], uint8."""
        ...

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Writes the elements of uint8 `source` [nbytes(n)] into fp32 `target` [n]."""
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

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies."""
        target.view(torch.float32).copy_(source)

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies."""
        target.copy_(source.view(torch.float32))


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

    def encode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Rounds to nearest even."""
        target.view(torch.bfloat16).copy_(source)

    def decode(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Exact."""
        target.copy_(source.view(torch.bfloat16))


CODECS: dict[str, Callable[..., Codec]] = {"fp32": Fp32, "bf16": Bf16}


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
