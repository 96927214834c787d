"""What of a rank's exchange a checkpoint has to hold: what is in no anchor.

Arrays have names that say what they are of, so that a rank that holds or emits other elements than the one that saved
them sees it, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from ray_diloco.outer.held import Held, required
from ray_diloco.outer.layout import Range, Ranges, intersect, total

Memories = dict[int, torch.Tensor | None]


def state_of(held: Held, memories: Memories, with_parameters: bool) -> dict[str, np.ndarray]:
    """See `exchange.Exchange.state`."""
    kinds = {"error": held.error}
    if with_parameters:
        theta = torch.cat([held.on_host(p.theta).clone() for p in held.parts] or [torch.empty(0)])
        kinds |= {"theta": theta, "base": held.base, "kept": held.anchor}
        if held.keeps_emitted:
            kinds["emitted"] = torch.cat([required(p.emitted) for p in held.parts] or [torch.empty(0)])
    found = {}
    for kind, values in kinds.items():
        if values is not None:
            at = 0
            for r in _runs(held, kind):
                found[f"{kind}|{r.start}"] = values[at : at + r.numel].numpy().copy()
                at += r.numel
    for start, memory in memories.items():
        if memory is not None:
            found[f"memory|{start}"] = memory.numpy().copy()
    return found


def restore_state(
    held: Held, memories: Memories, arrays_by_name: Mapping[str, np.ndarray], with_parameters: bool
) -> bool:
    """See `exchange.Exchange.load_state`."""
    wanted = ["error"] if held.error is not None else []
    if with_parameters:
        wanted += ["theta", "base"]
        wanted += ["kept"] if held.anchor is not None else []
        wanted += ["emitted"] if held.keeps_emitted else []
    arrays = {(kind, r): arrays_by_name.get(f"{kind}|{r.start}") for kind in wanted for r in _runs(held, kind)}
    saved = sum(name.split("|")[0] in wanted for name in arrays_by_name)
    if saved != len(arrays) or any(a is None or a.size != r.numel for (_, r), a in arrays.items()):
        return False
    for (kind, r), array in arrays.items():
        at = total(intersect(held.emits, (Range(0, r.start),)))
        values = from_dlpack(np.ascontiguousarray(array))
        flat = {"error": held.error, "base": held.base, "kept": held.anchor}.get(kind)
        if flat is not None:
            flat[at : at + r.numel].copy_(values)
            continue
        for piece in held.plan((r,)):
            part = piece.source.cut(piece.position, piece.numel)
            target = part.theta if kind == "theta" else required(part.emitted)
            target.copy_(values[piece.at : piece.at + piece.numel])
    for name, array in arrays_by_name.items():
        if name.startswith("memory|"):
            memories[int(name.removeprefix("memory|"))] = from_dlpack(np.array(array))
    return True


def _runs(held: Held, kind: str) -> Ranges:
    """What a kind of saved array is kept of."""
    return held.ranges if kind in ("theta", "emitted") else held.emits
