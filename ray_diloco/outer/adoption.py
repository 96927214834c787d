"""What a rank adopts: anchors, chunk by chunk straight out of their payloads.

    (θ, B) ← Adopt(θ, θ at emission, A)

What that is, is the affair of `adopt`; here is how its arguments are found, whatever device `θ` is on.
Source: ../shared/algorithms.md §10.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

from ray_diloco.errors import SyncError
from ray_diloco.outer import chunks
from ray_diloco.outer.adopt import Adopt, AdoptChunk
from ray_diloco.outer.chunks import in_chunks, pieces
from ray_diloco.outer.held import Held, Part
from ray_diloco.outer.layout import Range
from ray_diloco.outer.payload import Payload, require_purpose


def versions_of(opened: Sequence[Payload]) -> dict[int, int]:
    """The version of each fragment that anchors name.  Raises RD-412 if they are no anchors of one commit."""
    versions: dict[int, int] = {}
    for payload in opened:
        require_purpose(payload, "anchor")
        for fragment, version in payload.header.meta.versions.items():
            if versions.setdefault(fragment, version) != version:
                what = f"anchors of fragment {fragment} have versions {versions[fragment]} and {version}"
                raise SyncError(412, what, "adopt the payloads of one commit")
        if not payload.dense:
            raise SyncError(412, f"an anchor in {payload.header.codec}, a codec of whole tensors", "send elements")
    return versions


def adopt_elements(held: Held, payload: Payload, parts: Sequence[Part], rule: Adopt) -> None:
    """Adopts what a payload has of some parts."""
    sources = [(part, (part.range,)) for part in parts]
    found = pieces(payload.header.ranges, sources, "held slices", partial=True)
    for _, _, inside in in_chunks(found, payload.numel):
        start, stop = inside[0].at, inside[-1].at + inside[-1].numel
        anchor = payload.read(start, stop, held.scratch)
        for piece in inside:
            part = piece.source.cut(piece.position, piece.numel)
            _apply(held, rule, part, anchor[piece.at - start :][: piece.numel])


def adopt_selected(held: Held, payload: Payload, parts: Sequence[Part], rule: Adopt) -> None:
    """Adopts the elements that a payload has of its ranges; the others stay."""
    selection = payload.header.selection
    positions = from_dlpack(selection.positions(payload.header.ranges))  # type: ignore[union-attr]
    values = torch.empty(payload.numel)
    for start in range(0, payload.numel, chunks.CHUNK):
        stop = min(start + chunks.CHUNK, payload.numel)
        values[start:stop] = payload.read(start, stop, held.scratch)
    for part in parts:
        bounds = torch.tensor([part.range.start, part.range.stop])
        first, last = torch.searchsorted(positions, bounds).tolist()
        if first == last:
            continue
        at = positions[first:last] - part.range.start
        kept = {name: getattr(part, name) for name in ("theta", "base", "emitted", "anchor")}
        chosen = {name: one[at.to(one.device)] for name, one in kept.items() if one is not None}
        run = Range(int(part.range.start), int(part.range.start) + len(at))
        _apply(held, rule, Part(run, **chosen), values[first:last])
        for name, picked in chosen.items():
            kept[name][at.to(picked.device)] = picked


def _apply(held: Held, rule: Adopt, part: Part, anchor: torch.Tensor) -> None:
    if part.anchor is not None:
        part.anchor.copy_(anchor)
    if part.theta.device.type == "cpu" or not rule.reads_theta:
        rule.apply(AdoptChunk(part.theta, part.base, anchor, part.emitted))
        return
    staged = held.on_host(part.theta)
    rule.apply(AdoptChunk(staged, part.base, anchor, part.emitted))
    part.theta.copy_(staged)
