"""What a message says of itself: the typed header of a payload, and its text.

JSON, so that nothing in a message is executed and any language reads it.  What is read is checked field by field: a
header from elsewhere may say anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Param
from ray_diloco.outer.layout import Range, Ranges
from ray_diloco.outer.matrices import Shape
from ray_diloco.outer.selection import Selection

PURPOSES = ("contribution", "anchor", "parameters")

RESEND = "send the payload again; if it happens again, look for broken memory or a changed object store"


@dataclass(frozen=True)
class Meta:
    """What a payload is about.

    Attributes:
      purpose: contribution (`B − θ`), anchor (`A`, an update or for a joiner), parameters (`θ`, to found a run).
      versions: version of each fragment that the elements were measured from, or that they are.
      island: name of the sender; empty for an anchor.
      incarnation: how often that island was started anew.
    """

    purpose: str
    versions: Mapping[int, int] = field(default_factory=dict)
    island: str = ""
    incarnation: int = 0


@dataclass(frozen=True)
class Header:
    """Everything a payload says about its body.

    Attributes:
      codec: name of the codec of the body.
      params: parameters of that codec.
      ranges: canonical elements in the body, packed in this order; sorted, disjoint, not empty.
      meta: see `Meta`.
      selection: which of those elements travel; None: all.
      shapes: of the tensors that the ranges are, for a codec of whole tensors; else None.
    """

    codec: str
    params: Mapping[str, Param]
    ranges: Ranges
    meta: Meta
    selection: Selection | None = None
    shapes: tuple[Shape, ...] | None = None


def header_text(header: Header) -> bytes:
    """The header as it travels, not padded."""
    meta = header.meta
    fields = {
        "codec": header.codec,
        "params": dict(header.params),
        "ranges": [border for r in header.ranges for border in (r.start, r.stop)],
        "purpose": meta.purpose,
        "versions": {str(fragment): version for fragment, version in meta.versions.items()},
        "island": meta.island,
        "incarnation": meta.incarnation,
    }
    if header.selection is not None:
        fields["selection"] = header.selection.to_params()
    if header.shapes is not None:
        fields["shapes"] = header.shapes
    return json.dumps(fields, separators=(",", ":")).encode()


def parse_header(text: bytes) -> Header:
    """Reads what `header_text` wrote.  Raises SyncError RD-406 impossible ranges, RD-407 malformed."""
    try:
        fields: dict[str, Any] = json.loads(text)
        borders = [_count(border) for border in fields["ranges"]]
        versions = {int(fragment): _count(version) for fragment, version in fields["versions"].items()}
        meta = Meta(str(fields["purpose"]), versions, str(fields["island"]), _count(fields["incarnation"]))
        codec, params = str(fields["codec"]), dict(fields["params"])
        shapes = tuple(tuple(map(_count, shape)) for shape in fields["shapes"]) if "shapes" in fields else None
        selection = Selection.from_params(fields["selection"]) if "selection" in fields else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SyncError(407, f"the header of a payload cannot be read: {error!r}", RESEND) from None
    if meta.purpose not in PURPOSES:
        raise SyncError(407, f"a payload has the unknown purpose {meta.purpose!r}", f"use one of {', '.join(PURPOSES)}")
    ranges = tuple(Range(start, stop) for start, stop in zip(borders[::2], borders[1::2], strict=False))
    if len(borders) % 2 or sorted(borders) != borders or not all(r.numel for r in ranges):
        raise SyncError(406, f"the ranges of a payload are not ascending and disjoint: {borders[:8]}…", RESEND)
    return Header(codec, params, ranges, meta, selection, shapes)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
