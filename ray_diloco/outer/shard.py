"""A part of the anchor with its outer state: merges contributions and moves in two phases.

    prepare   decode, check, merge, outer step and encode, one chunk after the other, into spare buffers
    commit    swap spare and live buffers
    abort     forget the spare ones

Until `commit`, nothing that was committed has been touched: a round that fails leaves no trace.  Every buffer exists
twice and is written once at the start, as new pages cost ten times a copy (../shared/numbers.md).  Where the codec
towards the islands is plain, the anchor lives inside its own payload, so sending it costs no copy: 16 bytes a parameter
for Nesterov.  Source: ../shared/algorithms.md §10.1 (merge, outer) and §9.4 items 38 to 43.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK, in_chunks, pieces, quiet, require_within, squared_norm
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.contribution import BadContribution, Contribution, Offer, check_offers, not_finite
from ray_diloco.outer.layout import Layout, Ranges, intersect, normalise, total
from ray_diloco.outer.merge import MERGES, Merge
from ray_diloco.outer.named import Array, load_error, places
from ray_diloco.outer.optimizer import OuterOptimizer
from ray_diloco.outer.payload import Bytes, Meta, Writer, gather, open_payload, require_purpose
from ray_diloco.outer.weights import factors

__all__ = ["AnchorShard", "BadContribution", "Contribution", "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """Figures of a prepared outer step, over the elements of this shard.

    Attributes:
      key: key of the preparation.
      fragment: number of the fragment.
      version: version that a commit makes.
      squared_anchor_norm: `‖A‖²` after the step.
      squared_update_norm: `‖A after − A before‖²`.
      squared_delta_norm: `‖Δ‖²` of the merged outer gradient.
      bytes_in: bytes of all payloads received.
      bytes_out: bytes of the payload that goes to each rank.
      digest: digest of that payload.
    """

    key: str
    fragment: int
    version: int
    squared_anchor_norm: float
    squared_update_norm: float
    squared_delta_norm: float
    bytes_in: int
    bytes_out: int
    digest: str


class _Side:
    """One of the two copies of a fragment: anchor, state, and the payload made from them."""

    def __init__(self, ranges: Ranges, fragment: int, optimizer: OuterOptimizer, codec: Codec) -> None:
        self.writer = Writer(codec, ranges, Meta("anchor", {fragment: 0}))
        plain = self.writer.elements
        self.anchor = torch.empty(total(ranges)).fill_(0) if plain is None else plain
        self.state = tuple(torch.empty(total(ranges)).fill_(optimizer.initial) for _ in optimizer.state_names)
        self.payload: Bytes | None = None


@dataclass(eq=False)
class _Fragment:
    index: int
    ranges: Ranges
    live: _Side
    spare: _Side
    version: int = 0
    open: Prepared | None = None
    last: Prepared | None = None

    @property
    def numel(self) -> int:
        return self.live.writer.numel


class AnchorShard:
    """Anchor and outer state of the tensors that one shard keeps.

    A preparation is named by a key; asking for the same key again gives the same answer, so that a caller who lost the
    answer can ask again.  A fragment has at most one open preparation; one key may open several fragments, which then
    commit or abort together.

    Args:
      layout: the canonical form.
      ranges: elements that this shard keeps: whole tensors; may be none.
      fragments: all fragments of the run; their parts in `ranges` must partition it.
      optimizer: the outer optimiser.
      codec_down: how anchors travel to the islands; default fp32.
      merge: how contributions become one outer gradient.

    Attributes:
      ranges: elements that this shard keeps.
      names: names of its tensors.

    Raises:
      SyncError: RD-421, ranges that cut a tensor or fragments that are no partition.
    """

    def __init__(
        self,
        layout: Layout,
        ranges: Ranges,
        fragments: Sequence[Ranges],
        optimizer: OuterOptimizer,
        codec_down: Codec | None = None,
        merge: Merge = MERGES["mean"],
    ) -> None:
        self.ranges = normalise(ranges)
        self._optimizer = optimizer
        self._merge = merge
        self._founded = False
        codec = codec_down or Fp32()
        parts = [intersect(fragment, self.ranges) for fragment in fragments]
        self._fragments = [
            _Fragment(k, part, _Side(part, k, optimizer, codec), _Side(part, k, optimizer, codec))
            for k, part in enumerate(parts)
        ]
        self._tensors = places(layout, self.ranges, [(part, part.ranges) for part in self._fragments])
        self.names = tuple(self._tensors)
        self._delta = torch.empty(CHUNK).fill_(0)
        self._scratch: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def versions(self) -> dict[int, int]:
        """How often the anchor of each fragment has moved."""
        return {part.index: part.version for part in self._fragments}

    def found(self, arrays: Sequence[Bytes]) -> None:
        """Takes version 0 of the anchor from the parameters of an island.

        Args:
          arrays: payloads in fp32 that together have each element of this shard once, and no others.

        Raises:
          SyncError: RD-401 to RD-412, payloads that cannot be used; RD-422, there is an anchor already.
        """
        if self._founded:
            raise SyncError(422, "this shard has an anchor already", "found a run on new shards")
        opened = [open_payload(array) for array in arrays]
        for payload in opened:
            require_purpose(payload, "parameters")
            require_within(payload.header.ranges, self.ranges, "founding payload")
            if not payload.codec.traits.lossless:
                raise SyncError(412, f"parameters in {payload.codec.name} cannot found a run", "send them in fp32")
        sources = [(payload, payload.header.ranges) for payload in opened]
        pieces(self.ranges, sources, "founding payloads")
        for part in self._fragments:
            for start, stop, inside in in_chunks(pieces(part.ranges, sources, "founding payloads"), part.numel):
                part.live.anchor[start:stop].copy_(gather(start, stop, inside, self._scratch_of(0)))
            _publish(part)
        self._founded = True

    def load(
        self,
        anchor: Mapping[str, torch.Tensor | Array],
        state: Mapping[str, Mapping[str, torch.Tensor | Array]],
        versions: Mapping[int, int],
    ) -> None:
        """Takes anchor and outer state from a checkpoint; what was open is forgotten.

        Args:
          anchor: fp32 tensors by name; those of other shards are not looked at.
          state: for each name of a state of the optimiser, its tensors by name.
          versions: version of each fragment.

        Raises:
          SyncError: RD-424, a tensor, a state or a version is missing or has another shape or dtype.
        """
        self._founded = False
        missing = {part.index for part in self._fragments} - versions.keys()
        if missing:
            raise load_error(f"no version of fragments {sorted(missing)}")
        if state.keys() != set(self._optimizer.state_names):
            wanted = sorted(self._optimizer.state_names)
            raise load_error(f"outer state {sorted(state)} instead of {wanted}")
        for name, place in self._tensors.items():
            place.scatter(anchor.get(name), _live_anchor)
            for k, state_name in enumerate(self._optimizer.state_names):
                place.scatter(state[state_name].get(name), _live_state(k))
        for part in self._fragments:
            part.version, part.open, part.last = versions[part.index], None, None
            _publish(part)
        self._founded = True

    def tensors(self) -> dict[str, Array]:
        """The committed anchor: read-only fp32 arrays by name, in canonical order.

        A tensor that lies in one fragment is a view, valid until the second next preparation of that fragment.
        """
        return {name: place.gather(_live_anchor) for name, place in self._tensors.items()}

    def state_tensors(self, name: str) -> dict[str, Array]:
        """One committed state of the optimiser, as `tensors` gives the anchor.

        Raises:
          SyncError: RD-424, the optimiser has no such state.
        """
        if name not in self._optimizer.state_names:
            raise load_error(f"outer state {name!r} is not one of {self._optimizer.state_names}")
        buffer = _live_state(self._optimizer.state_names.index(name))
        return {name: place.gather(buffer) for name, place in self._tensors.items()}

    def payload(self, fragment: int) -> Bytes:
        """The committed anchor of a fragment, the very bytes that were sent to all islands when it was committed.

        Returns:
          uint8 [n], a read-only view, valid until the second next preparation of that fragment.

        Raises:
          SyncError: RD-422, there is no anchor yet.
        """
        return self._sealed(self._fragment(fragment).live)

    def prepare(
        self, key: str, fragment: int, contributions: Sequence[Contribution], lr: float | None = None
    ) -> tuple[Prepared, Bytes]:
        """Merges contributions and makes the outer step, in spare buffers.

        Args:
          key: name of this preparation.
          fragment: which fragment.
          contributions: in any order.
          lr: outer learning rate of this step; None: the optimiser's own.

        Returns:
          Figures, and the payload for all islands: uint8 [n], a read-only view, valid until the second next
          preparation of that fragment (the next one after an abort).  It must not be adopted before the commit.

        Raises:
          BadContribution: one of RD-401 to RD-412, with the island's name; the round can be prepared without it.
          SyncError: RD-413, all weights are 0; RD-422, there is no anchor yet; RD-423, another preparation is open;
            RD-417, the step makes the anchor infinite.
        """
        part = self._fragment(fragment)
        for known, side in ((part.open, part.spare), (part.last, part.live)):
            if known is not None and known.key == key:
                return known, self._sealed(side)
        if part.open is not None:
            what = f"fragment {fragment} has the open preparation {part.open.key!r}, so {key!r} cannot begin"
            raise SyncError(423, what, "commit or abort the open one")
        self._sealed(part.live)
        offers = check_offers(contributions, fragment, part.ranges, part.version)
        with quiet():
            delta, update, anchor = self._step(part, offers, lr)
        if not math.isfinite(update + anchor):
            what = f"the outer step of fragment {fragment} gives an anchor of squared norm {anchor}"
            raise SyncError(417, what, "lower outer.lr or outer.momentum")
        version = part.version + 1
        part.spare.payload = payload = part.spare.writer.seal(Meta("anchor", {fragment: version}))
        part.open = Prepared(
            key=key,
            fragment=fragment,
            version=version,
            squared_anchor_norm=anchor,
            squared_update_norm=update,
            squared_delta_norm=delta,
            bytes_in=sum(offer.nbytes for offer in offers),
            bytes_out=payload.nbytes,
            digest=part.spare.writer.digest,
        )
        return part.open, payload

    def commit(self, key: str) -> None:
        """Makes what was prepared under a key the anchor; nothing happens if it is already.

        Raises:
          SyncError: RD-423, nothing was prepared under this key, or it was aborted.
        """
        opened = [part for part in self._fragments if part.open is not None and part.open.key == key]
        if not opened and not self._committed(key):
            raise SyncError(423, f"there is no preparation {key!r} to commit", "prepare it (again) first")
        for part in opened:
            part.live, part.spare = part.spare, part.live
            part.last, part.open = part.open, None
            part.version += 1

    def abort(self, key: str) -> None:
        """Forgets what was prepared under a key; nothing happens if there is nothing, so that all shards can be told.

        Raises:
          SyncError: RD-423, it was committed.
        """
        if self._committed(key):
            raise SyncError(423, f"{key!r} was committed and cannot be aborted", "go on from the commit")
        for part in self._fragments:
            if part.open is not None and part.open.key == key:
                part.open = None

    def _committed(self, key: str) -> bool:
        return any(part.last is not None and part.last.key == key for part in self._fragments)

    def _fragment(self, fragment: int) -> _Fragment:
        if not 0 <= fragment < len(self._fragments):
            raise SyncError(421, f"there is no fragment {fragment} of {len(self._fragments)}", "use a smaller number")
        return self._fragments[fragment]

    def _sealed(self, side: _Side) -> Bytes:
        if not self._founded or side.payload is None:
            raise SyncError(422, "this shard has no anchor yet", "found the run or load a commit first")
        return side.payload

    def _scratch_of(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._scratch) <= k:
            self._scratch.append((torch.empty(CHUNK).fill_(0), torch.empty(CHUNK).fill_(0)))
        return self._scratch[k]

    def _step(self, part: _Fragment, offers: Sequence[Offer], lr: float | None) -> tuple[float, float, float]:
        """One pass over a fragment; returns the squared norms of `Δ`, of the update and of the new anchor."""
        live, spare, step = part.live, part.spare, self._optimizer.step
        weights = factors([offer.weight for offer in offers])
        scratch = [self._scratch_of(k) for k in range(len(offers))]
        delta_norm = update_norm = anchor_norm = 0.0
        for chunk in zip(*(in_chunks(offer.pieces, part.numel) for offer in offers), strict=True):
            start, stop = chunk[0][:2]
            received = [
                offer.chunk(start, stop, at[2], buffers)
                for offer, at, buffers in zip(offers, chunk, scratch, strict=True)
            ]
            delta, anchor, moved = self._delta[: stop - start], live.anchor[start:stop], spare.anchor[start:stop]
            self._merge.combine(received, weights, delta)
            square = squared_norm(delta)
            if not math.isfinite(square):
                raise not_finite(offers, received)
            delta_norm += square
            state, state_out = ([s[start:stop] for s in side.state] for side in (live, spare))
            step(anchor, state, delta, moved, state_out, version=part.version, lr=lr)
            spare.writer.put(start, moved)
            anchor_norm += squared_norm(moved)
            update_norm += squared_norm(torch.sub(moved, anchor, out=delta))
        return delta_norm, update_norm, anchor_norm


def _live_anchor(part: _Fragment) -> torch.Tensor:
    return part.live.anchor


def _live_state(k: int) -> Callable[[_Fragment], torch.Tensor]:
    return lambda part: part.live.state[k]


def _publish(part: _Fragment) -> None:
    """Encodes the live anchor as it is."""
    square, anchor = 0.0, part.live.anchor
    with quiet():
        for start in range(0, part.numel, CHUNK):
            values = anchor[start : start + CHUNK]
            square += squared_norm(values)
            part.live.writer.put(start, values)
    if not math.isfinite(square):
        what = f"the anchor of fragment {part.index} has squared norm {square}"
        raise SyncError(417, what, "start from parameters that are finite")
    part.live.payload = part.live.writer.seal(Meta("anchor", {part.index: part.version}))
