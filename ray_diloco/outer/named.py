"""Tensors by name, out of and into flat buffers that hold them in pieces.

A fragment may cut a tensor; a checkpoint never does.  A tensor that lies in one piece is handed out as a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import Piece, Source, describe, pieces
from ray_diloco.outer.layout import Layout, Ranges, TensorSpec

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Place(Generic[Source]):
    """A tensor and the pieces that it lies in, in order; `at` counts from its first element."""

    spec: TensorSpec
    pieces: tuple[Piece[Source], ...]

    def gather(self, buffer: Callable[[Source], torch.Tensor]) -> Array:
        """The tensor, read-only fp32 in its own shape: a view if it is in one piece, else a copy.

        Args:
          buffer: gives the flat fp32 buffer of a source.
        """
        runs = [buffer(p.source)[p.position : p.position + p.numel] for p in self.pieces]
        array: Array = (runs[0] if len(runs) == 1 else torch.cat(runs)).view(self.spec.shape).numpy()
        array.flags.writeable = False
        return array

    def scatter(self, values: torch.Tensor | Array | None, buffer: Callable[[Source], torch.Tensor]) -> None:
        """Writes the tensor into its pieces.

        Raises:
          SyncError: RD-424, it is missing or has another shape or dtype.
        """
        if values is None:
            raise load_error(f"tensor {self.spec.name} is missing")
        flat = values if isinstance(values, torch.Tensor) else from_dlpack(values)
        if flat.dtype != torch.float32 or tuple(flat.shape) != self.spec.shape:
            what = f"tensor {self.spec.name} is {flat.dtype} {tuple(flat.shape)}, not fp32 {self.spec.shape}"
            raise load_error(what)
        flat = flat.reshape(-1)
        for p in self.pieces:
            buffer(p.source)[p.position : p.position + p.numel].copy_(flat[p.at : p.at + p.numel])


def places(layout: Layout, ranges: Ranges, sources: Sequence[tuple[Source, Ranges]]) -> dict[str, Place[Source]]:
    """Where the tensors of a set lie in sources that partition it, by name in canonical order.

    Raises:
      SyncError: RD-421, the set cuts a tensor, or the sources are no partition of it.
    """
    try:
        inside = pieces(ranges, [(spec, (spec.range,)) for spec in layout.tensors], "tensors of the layout")
        for piece in inside:
            if piece.numel != piece.source.numel:
                raise _partition_error(f"elements {describe(ranges)} cut tensor {piece.source.name}")
        specs = [piece.source for piece in inside]
        found = pieces(tuple(spec.range for spec in specs), sources, "fragments")
    except SyncError as error:
        raise _partition_error(error.what) from None
    by_name: dict[str, Place[Source]] = {}
    k = at = 0
    for spec in specs:
        mine = []
        while k < len(found) and found[k].at < at + spec.numel:
            mine.append(Piece(found[k].at - at, found[k].numel, found[k].source, found[k].position))
            k += 1
        by_name[spec.name] = Place(spec, tuple(mine))
        at += spec.numel
    return by_name


def load_error(what: str) -> SyncError:
    """RD-424: something does not fit this anchor."""
    return SyncError(424, what, "use a checkpoint of this model and this outer optimiser")


def _partition_error(what: str) -> SyncError:
    return SyncError(421, what, "give shards whole tensors, and each of their elements to one fragment")
