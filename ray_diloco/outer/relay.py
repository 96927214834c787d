"""One contribution for a region: the weighted mean of those of its islands, encoded once more.

In a hierarchy the islands of a region meet first, near by, and one message leaves the region (../shared/algorithms.md
§9.4, item 39): the mean of means, weighted by the sums of the weights, is the mean over all islands.  With a codec that
loses something each relay adds an error of its own, which nobody remembers; fp32 adds none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ray_diloco.outer import chunks
from ray_diloco.outer.chunks import quiet, squared_norm
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.contribution import Contribution, check_offers, not_finite
from ray_diloco.outer.layout import Ranges
from ray_diloco.outer.merge import mean
from ray_diloco.outer.payload import Meta, Writer
from ray_diloco.outer.sources import Scratch, source_of
from ray_diloco.outer.weights import factors


class Relay:
    """Merges the contributions of one region for one part of a fragment, round after round, in the same memory.

    Args:
      region: its name, under which its contribution is offered.
      fragment: number of the fragment.
      ranges: its elements that one anchor shard keeps, not empty.
      codec: how the contribution of the region travels; one of elements, whatever the islands use.
    """

    def __init__(self, region: str, fragment: int, ranges: Ranges, codec: Codec) -> None:
        self._region = region
        self._fragment = fragment
        self._ranges = ranges
        self._codec = codec
        self._writer = Writer(codec, ranges, Meta("contribution", {fragment: 0}, region))
        self._merged = torch.empty(chunks.CHUNK).fill_(0)
        self._scratch: list[Scratch] = []

    @torch.no_grad()
    def merge(self, contributions: Sequence[Contribution], version: int, incarnation: int = 0) -> Contribution:
        """`Σ w_m Δ_m / Σ w_m` in sorted island order, offered with the weight `Σ w_m`.

        Args:
          contributions: of the islands of the region, in any order; those of weight 0 are not looked at.
          version: version of the fragment's anchor that all of them measured from.
          incarnation: how often the relay was started anew.

        Returns:
          The contribution of the region, measured from the same version; its payload is valid until the next call.

        Raises:
          BadContribution: RD-401 to RD-414, one that cannot be used; it names the island, without which the rest may
            be merged.
          SyncError: RD-413, all weights are zero.
        """
        offers = check_offers(contributions, self._fragment, self._ranges, version)
        weights = [offer.weight for offer in offers]
        shares = factors(weights)
        while len(self._scratch) < len(offers):
            self._scratch.append((torch.empty(chunks.CHUNK), torch.empty(chunks.CHUNK)))
        meta = Meta("contribution", {self._fragment: version}, self._region, incarnation)
        writer = self._begun(meta)
        sources = [source_of(offer, self._ranges, writer.numel) for offer in offers]
        with quiet():
            for k, start in enumerate(range(0, writer.numel, chunks.CHUNK)):
                stop = min(start + chunks.CHUNK, writer.numel)
                received = [source.chunk(k, scratch) for source, scratch in zip(sources, self._scratch, strict=False)]
                target = writer.target(start, stop, self._merged)
                mean(received, shares, target)
                if not math.isfinite(squared_norm(target)):
                    raise not_finite(offers, received)
                writer.put(start, target)
        return Contribution(self._region, math.fsum(weights), version, (writer.seal(meta),))

    def _begun(self, meta: Meta) -> Writer:
        if not self._writer.fits(meta):
            self._writer = Writer(self._codec, self._ranges, meta)
        self._writer.begin(meta)
        return self._writer
