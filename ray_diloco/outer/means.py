"""The mean of several anchors: what is evaluated and exported where every island has its own.

Replicas differ, boundedly or not, and one of them is no statement about the run (../shared/algorithms.md §10.3, last
rows; §4.2, §6.4).  Sums run in the order given, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import in_chunks, pieces
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.layout import Layout, total
from ray_diloco.outer.payload import Bytes, Meta, Writer, gather, open_payload


@torch.no_grad()
def mean_anchor(arrays: Sequence[Bytes]) -> Bytes:
    """The mean of anchors of the same elements.

    Args:
      arrays: one payload of each anchor.

    Returns:
      uint8 [n], a payload in fp32 with the ranges and versions of the first.
    """
    opened = [open_payload(array) for array in arrays]
    header = opened[0].header
    writer = Writer(Fp32(), header.ranges, Meta("anchor", header.meta.versions))
    scratch = torch.empty(chunks.CHUNK)
    for start in range(0, writer.numel, chunks.CHUNK):
        stop = min(start + chunks.CHUNK, writer.numel)
        target = writer.target(start, stop, scratch)
        for k, payload in enumerate(opened):
            values = payload.read(start, stop, torch.empty(stop - start))
            if k == 0:
                target.copy_(values)
            else:
                target.add_(values)
        writer.put(start, target.div_(len(opened)))
    return writer.seal(header.meta)


@torch.no_grad()
def tensors_of(layout: Layout, arrays: Sequence[Bytes]) -> dict[str, np.ndarray]:
    """Tensors by name, fp32, from payloads that together have every element once."""
    flat = torch.empty(layout.numel)
    sources = [(payload, payload.header.ranges) for payload in map(open_payload, arrays)]
    scratch = (torch.empty(chunks.CHUNK), torch.empty(chunks.CHUNK))
    for start, stop, inside in in_chunks(pieces(layout.whole, sources, "anchors"), total(layout.whole)):
        flat[start:stop] = gather(start, stop, inside, scratch)
    return {t.name: flat[t.offset : t.offset + t.numel].view(t.shape).numpy() for t in layout.tensors}


@torch.no_grad()
def decoded(array: Bytes) -> list[tuple[int, torch.Tensor]]:
    """What a payload says, run by run: canonical position of the first element, and fp32 values.

    Elements that a selection leaves out are 0.
    """
    payload = open_payload(array)
    header = payload.header
    flat = torch.zeros(total(header.ranges))
    if not payload.dense:
        for at, shape, data, nonce in payload.read_tensors():
            payload.shaped_codec.decode(data, shape, flat[at : at + math.prod(shape)], nonce)
    else:
        values = torch.empty(payload.numel)
        for start in range(0, payload.numel, chunks.CHUNK):
            stop = min(start + chunks.CHUNK, payload.numel)
            values[start:stop] = payload.read(start, stop, torch.empty(stop - start))
        if header.selection is None:
            flat = values
        else:
            flat[torch.from_numpy(header.selection.packed(header.ranges).copy())] = values
    runs, at = [], 0
    for r in header.ranges:
        runs.append((r.start, flat[at : at + r.numel]))
        at += r.numel
    return runs
