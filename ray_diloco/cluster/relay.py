"""Hierarchy: the islands of a region meet near by, and one contribution leaves the region.

A relay is an actor in the region that merges what its islands have sent and encodes it once more
(`outer.relay.Relay`).  A region with one island needs none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from ray_diloco.blocks import Channel, Cut
from ray_diloco.cluster.calls import ActorFailed, actor, answers
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.errors import ClusterError
from ray_diloco.outer.layout import Layout, Ranges, intersect, shard_ranges
from ray_diloco.rounds.ports import Emission, Movement, Offer, Piece, Step

# How often a round is given to a relay of a region whose process dies.
ATTEMPTS = 3


class RelayWorker:
    """Merges the contributions of one region."""

    def __init__(self, region: str, channel: Channel) -> None:
        self._region, self._channel = region, channel
        self._relays: dict[tuple[int, int], Any] = {}

    @ray.method(num_returns=2)
    def merge(
        self,
        fragment: int,
        part: int,
        ranges: Ranges,
        version: int,
        specs: Sequence[tuple[str, float, int, int]],
        *payloads: np.ndarray,
    ) -> tuple[int, np.ndarray]:
        """One part of the region's contribution: its bytes, and the payload."""
        from ray_diloco.blocks import codec_of
        from ray_diloco.outer.contribution import Contribution
        from ray_diloco.outer.relay import Relay

        key = (fragment, part)
        if key not in self._relays:
            codec = codec_of(self._channel.up, self._channel.seed)
            self._relays[key] = Relay(self._region, fragment, ranges, codec)  # type: ignore[arg-type]
        contributions, at = [], 0
        for island, weight, base_version, count in specs:
            contributions.append(Contribution(island, weight, base_version, tuple(payloads[at : at + count])))
            at += count
        (payload,) = self._relays[key].merge(contributions, version).payloads
        return payload.nbytes, payload


RelayActor = actor(RelayWorker, num_cpus=0)


class Relays:
    """The relays of a run, started where a region has more than one island; `where` says where that is."""

    def __init__(self, channel: Channel, deadline_s: float, where: Whereabouts) -> None:
        self._channel, self._deadline_s, self._where = channel, deadline_s, where
        self._workers: dict[str, Any] = {}

    async def merged(self, step: Step, movement: Movement, parts: int, layout: Layout | None, cut: Cut) -> Movement:
        """A movement in which the contributions of each region are one.

        Raises:
          ClusterError: RD-223, a relay failed.
          SyncError: a contribution cannot be used; it names the island.
        """
        regions: defaultdict[str, list[tuple[Offer, float]]] = defaultdict(list)
        for offer, factor in movement.contributions:
            regions[offer.region or offer.island].append((offer, factor))
        if layout is None or all(len(there) == 1 for there in regions.values()):
            return movement
        kept = shard_ranges(layout, parts)
        found = []
        for region, there in sorted(regions.items()):
            if len(there) == 1:
                found.append(there[0])
                continue
            pieces = await self._region(step, region, there, [intersect(cut.fragments[step.fragment], k) for k in kept])
            first = there[0][0]
            emission = Emission(pieces, first.emission.norm, True)
            found.append(
                (replace(first, island=region, incarnation=0, emission=emission), math.fsum(f for _, f in there))
            )
        return replace(movement, contributions=tuple(sorted(found, key=lambda pair: pair[0].island)))

    async def _region(
        self, step: Step, region: str, there: Sequence[tuple[Offer, float]], kept: Sequence[Ranges]
    ) -> tuple[Piece, ...]:
        left = ATTEMPTS
        while True:
            left -= 1
            try:
                return await self._merge(step, region, there, kept)
            except ActorFailed as failed:
                if not left or not isinstance(failed.cause, RayActorError):
                    raise ClusterError(
                        223,
                        f"the relay of {region} failed: {failed}",
                        "run the same command again: it goes on from the last commit",
                    ) from failed.cause
                # A relay remembers nothing, so another one merges the same.
                self._workers.pop(region, None)

    async def _merge(
        self, step: Step, region: str, there: Sequence[tuple[Offer, float]], kept: Sequence[Ranges]
    ) -> tuple[Piece, ...]:
        calls = []
        for part, ranges in enumerate(kept):
            if not ranges:
                continue
            handles = [[p.handle for p in offer.emission.pieces if p.shard == part] for offer, _ in there]
            specs = [
                (offer.island, factor, offer.base_version, len(mine))
                for (offer, factor), mine in zip(there, handles, strict=True)
            ]
            flat = [handle for mine in handles for handle in mine]
            worker = self._worker(region)
            calls.append((part, *worker.merge.remote(step.fragment, part, ranges, step.version, specs, *flat)))
        sizes = await answers([size for _, size, _ in calls], f"merging in {region}", self._deadline_s)
        return tuple(Piece(part, size, payload) for (part, _, payload), size in zip(calls, sizes, strict=True))

    def _worker(self, region: str) -> Any:
        if region not in self._workers:
            self._workers[region] = RelayActor.options(**self._where.inside(region)).remote(region, self._channel)
        return self._workers[region]
