"""What islands offer to a round, and the checks that it passes before it counts.

A contribution that fails one costs its sender the round, never the run: the error names the island, and whoever asked
can prepare the round without it.  Source: ../shared/design.md, "Data plane and control plane".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ray_diloco.errors import BadContribution, SyncError
from ray_diloco.outer.chunks import Piece, pieces, require_within
from ray_diloco.outer.layout import Ranges
from ray_diloco.outer.payload import Bytes, Payload, open_payload, require_purpose


@dataclass(frozen=True)
class Contribution:
    """What an island offers for one fragment to one shard.

    Attributes:
      island: its name.
      weight: weight in the mean, or factor; a contribution of weight 0 is not looked at.
      base_version: version of the anchor that it measured from.
      payloads: one array per rank; together they have each element of the fragment that the shard keeps once.
      incarnation: that its payloads must be of; None: nobody knows.
    """

    island: str
    weight: float
    base_version: int
    payloads: tuple[Bytes, ...]
    incarnation: int | None = None


@dataclass(frozen=True, eq=False)
class Offer:
    """A contribution whose headers have been checked.

    Attributes:
      island: name of the sender.
      weight: as contributed, above 0.
      base_version: as contributed.
      payloads: opened.
      pieces: where the elements of the fragment lie in them.
      nbytes: bytes of its payloads.
    """

    island: str
    weight: float
    base_version: int
    payloads: tuple[Payload, ...]
    pieces: list[Piece[Payload]]
    nbytes: int


def check_offers(
    contributions: Sequence[Contribution], fragment: int, ranges: Ranges, version: int, max_age: int | None = 0
) -> list[Offer]:
    """Checks everything but the bodies, and sorts by island and age.

    Args:
      contributions: in any order.
      fragment: number of the fragment.
      ranges: its elements that are wanted.
      version: version of its anchor.
      max_age: how many versions a contribution may be behind; None: any number.

    Raises:
      BadContribution: RD-401 to RD-408 a payload that cannot be used, RD-412 one that belongs to another island,
        fragment, version or purpose, RD-414 an impossible weight.
    """
    offers: dict[tuple[str, int], Offer] = {}
    for one in sorted(contributions, key=lambda one: (one.island, one.base_version)):
        who = (one.island, one.base_version)
        try:
            if not (math.isfinite(one.weight) and one.weight >= 0):
                raise SyncError(414, f"a contribution has weight {one.weight}", "give it a weight of 0 or more")
            if one.weight == 0:
                continue
            if who in offers:
                raise SyncError(412, "two contributions to one round", "offer one for each round")
            opened = [open_payload(array) for array in one.payloads]
            for payload in opened:
                _check_header(payload, one, fragment, version, max_age)
                require_within(payload.header.ranges, ranges, "contribution")
            found = pieces(ranges, [(payload, payload.header.ranges) for payload in opened], "contribution")
        except SyncError as error:
            raise blamed(one.island, error) from None
        nbytes = sum(array.nbytes for array in one.payloads)
        offers[who] = Offer(one.island, one.weight, one.base_version, tuple(opened), found, nbytes)
    return list(offers.values())


def not_finite(offers: Sequence[Offer], received: Sequence[torch.Tensor]) -> BadContribution:
    """RD-411: names the island whose chunk is not finite; if all are (squares overflowed), the one with the largest."""
    peaks = [float(values.abs().max()) for values in received]
    finite = [math.isfinite(peak) for peak in peaks]
    k = finite.index(False) if False in finite else peaks.index(max(peaks))
    what = f"values as large as {peaks[k]:.3g}" if finite[k] else "values that are not finite"
    mend = "let it sit the round out and adopt the anchor; lower inner.lr if it happens again"
    return blamed(offers[k].island, SyncError(411, what, mend))


def _check_header(
    payload: Payload, contribution: Contribution, fragment: int, version: int, max_age: int | None
) -> None:
    require_purpose(payload, "contribution")
    meta, base = payload.header.meta, contribution.base_version
    if meta.island != contribution.island:
        raise SyncError(412, f"a payload of island {meta.island!r}", "offer payloads of the island's own ranks")
    if contribution.incarnation not in (None, meta.incarnation):
        what = f"a payload of incarnation {meta.incarnation} offered as one of {contribution.incarnation}"
        raise SyncError(412, what, "a process that was replaced has sent it; let its successor train on")
    if dict(meta.versions) != {fragment: base}:
        what = f"a payload of versions {dict(meta.versions)} offered as version {base} of fragment {fragment}"
        raise SyncError(412, what, "offer each payload as what its header says")
    age = version - base
    if age < 0 or (max_age is not None and age > max_age):
        what = f"measured from version {base} of fragment {fragment}, which is at {version}"
        raise SyncError(412, what, "adopt the newest anchor and train on")


def blamed(island: str, error: SyncError) -> BadContribution:
    """The error of an island."""
    return BadContribution(island, error.number, f"island {island}: {error.what}", error.mend)
