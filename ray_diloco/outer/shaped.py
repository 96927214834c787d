"""Codecs that need the shape of a tensor.

    dct         the largest cosine coefficients of each tile (DeMo, 2411.19870; ../shared/algorithms.md §7.1)
    low_rank    M ≈ P Qᵀ by one power iteration (PowerSGD, 1905.13727; DiLoCoX, 2506.21263)

They code whole tensors, never a part of one, so who holds a whole tensor codes it: a rank that does, or the keeper.
Sizes are exact to the byte (§8.4).  A new codec is one class and one line in `SHAPED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeGuard

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Codec, Param, Traits, codec_of
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.low_rank import LowRank
from ray_diloco.outer.matrices import Memory, Shape


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


def is_shaped(codec: Codec | ShapedCodec) -> TypeGuard[ShapedCodec]:
    """Whether a codec takes whole tensors."""
    return codec.name in SHAPED


def codec_by_name(kind: str, params: Mapping[str, Param] | None = None) -> Codec | ShapedCodec:
    """The codec of a `codec.kind`, of elements or of whole tensors.  Raises RD-404."""
    return shaped_of(kind, params) if kind in SHAPED else codec_of(kind, params)
