"""A part of the anchor with its outer state: merges contributions and moves in two phases.

    prepare   decode, check, merge, outer step and encode, one chunk after the other, into spare buffers
    commit    swap spare and live buffers
    abort     forget the spare ones

Until `commit`, nothing that was committed has been touched: a round that fails leaves no trace.  Every buffer exists
twice and is written once at the start, as new pages cost ten times a copy (../shared/numbers.md).  Where the codec
towards the islands is plain, the anchor lives inside its own payload, so sending it costs no copy: 16 bytes a parameter
for Nesterov.  What happens in between is `step.OuterStep`.  Source: ../shared/algorithms.md §10.1 (merge, outer) and
§9.4 items 38 to 43.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK, in_chunks, pieces, quiet, require_within, squared_norm
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.contribution import BadContribution, Contribution, Offer, check_offers, not_finite
from ray_diloco.outer.layout import Layout, Ranges, intersect, normalise, total
from ray_diloco.outer.merge import mean_over_senders, require_enough
from ray_diloco.outer.named import Array, load_error, places
from ray_diloco.outer.optimizer import OuterOptimizer
from ray_diloco.outer.payload import Bytes, Meta, Payload, Writer, gather, open_payload, require_purpose
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.sources import (
    Message,
    Scratch,
    Source,
    merged_coefficients,
    picked,
    selected_source,
    source_of,
    transform_of,
)
from ray_diloco.outer.step import AVERAGE, Arrays, Norms, NotFinite, OuterStep, Recipe, Span, room
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


@dataclass(eq=False)
class _Selected:
    """The elements of a round of random fragments: where they lie, what they become, and the message of them."""

    at: torch.Tensor
    writer: Writer
    anchor: torch.Tensor
    state: tuple[torch.Tensor, ...]


class _Side:
    """One of the two copies of a fragment: anchor, state, and the payload made from them."""

    def __init__(self, ranges: Ranges, fragment: int, recipe: Recipe, codec: Codec) -> None:
        self.writer = Writer(codec, ranges, Meta("anchor", {fragment: 0}))
        plain = None if recipe.lookahead else self.writer.elements
        self.anchor = torch.empty(total(ranges)).fill_(0) if plain is None else plain
        self.state = tuple(torch.empty(total(ranges)).fill_(initial) for initial in recipe.initials)
        self.payload: Bytes | None = None
        # Where only a selection of elements travels, a message is as large as what it holds.
        self.selected: _Selected | None = None


@dataclass(eq=False)
class _Fragment:
    index: int
    ranges: Ranges
    live: _Side
    spare: _Side
    spans: tuple[Span, ...]
    version: int = 0
    open: Prepared | None = None
    last: Prepared | None = None
    # Anchors by version, for contributions that were measured from them.
    past: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return self.live.writer.numel


@dataclass(frozen=True)
class Draw:
    """Random fragments: of each round only some elements travel; see `selection.Selection`."""

    draw: str
    p: float
    seed: int

    def of(self, version: int) -> Selection:
        """What travels in the round that moves an anchor of this version."""
        return Selection(self.draw, self.p, self.seed, version)


# Anchors that are kept for late contributions to be measured anew from, where any age is allowed.
PAST = 4


class AnchorShard:
    """Anchor and outer state of the tensors that one shard keeps.

    A preparation is named by a key; asking for the same key again gives the same answer, so that a caller who lost the
    answer can ask again.  A fragment has at most one open preparation; one key may open several fragments, which then
    commit or abort together.

    Args:
      layout: the canonical form.
      ranges: elements that this shard keeps: whole tensors; may be none.
      fragments: all fragments of the run; their parts in `ranges` must partition it.
      recipe: how anchors move; an outer optimiser alone stands for the plain mean of contributions of this version.
      codec_down: how anchors travel to the islands; default fp32.
      draw: random fragments; None: all elements travel.
      first: number of the first fragment, where other channels have fragments as well.

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
        recipe: Recipe | OuterOptimizer,
        codec_down: Codec | None = None,
        draw: Draw | None = None,
        *,
        first: int = 0,
    ) -> None:
        self.ranges = normalise(ranges)
        self.recipe = recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
        self._draw = draw
        self._founded = False
        self._codec = codec = codec_down or Fp32()
        parts = [intersect(fragment, self.ranges) for fragment in fragments]
        self._fragments = [
            _Fragment(
                k, part, _Side(part, k, recipe, codec), _Side(part, k, recipe, codec), _spans(layout, part, recipe)
            )
            for k, part in enumerate(parts, start=first)
        ]
        self._tensors = places(layout, self.ranges, [(part, part.ranges) for part in self._fragments])
        self.names = tuple(self._tensors)
        self._rooms: list[Scratch] = []
        self._published: dict[int, Writer] = {}

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
            _require_whole(payload)
            if not payload.lossless:
                raise SyncError(412, f"parameters in {payload.header.codec} cannot found a run", "send them in fp32")
        sources = [(payload, payload.header.ranges) for payload in opened]
        pieces(self.ranges, sources, "founding payloads")
        for part in self._fragments:
            for start, stop, inside in in_chunks(pieces(part.ranges, sources, "founding payloads"), part.numel):
                part.live.anchor[start:stop].copy_(gather(start, stop, inside, self._scratch(1)[0]))
            self._begin_average(part)
            self._publish(part)
        self._founded = True

    def found_zero(self) -> None:
        """Takes zeros for version 0 of the anchor, for control variates.  Raises as `found`."""
        if self._founded:
            raise SyncError(422, "this shard has an anchor already", "found a run on new shards")
        for part in self._fragments:
            part.live.anchor.zero_()
            self._publish(part)
        self._founded = True

    def new_state(self) -> dict[str, dict[str, Array]]:
        """Outer state as it is before the first step, by state and tensor, for `load`."""
        return {
            state: {name: np.full(place.spec.shape, initial, np.float32) for name, place in self._tensors.items()}
            for state, initial in zip(self.recipe.state_names, self.recipe.initials, strict=True)
        }

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
        names = self.recipe.state_names
        if state.keys() != set(names):
            wanted = sorted(names)
            raise load_error(f"outer state {sorted(state)} instead of {wanted}")
        for name, place in self._tensors.items():
            place.scatter(anchor.get(name), _live_anchor)
            for k, state_name in enumerate(names):
                place.scatter(state[state_name].get(name), _live_state(k))
        for part in self._fragments:
            part.version, part.open, part.last = versions[part.index], None, None
            part.past.clear()
            self._begin_average(part)
            self._publish(part)
        self._founded = True

    def tensors(self) -> dict[str, Array]:
        """The committed anchor: read-only fp32 arrays by name, in canonical order.

        A tensor that lies in one fragment is a view, valid until the second next preparation of that fragment.
        """
        return {name: place.gather(_live_anchor) for name, place in self._tensors.items()}

    @property
    def averaged(self) -> bool:
        """Whether what is published is an average of outer iterates, not the anchor."""
        return any(self.recipe.average.count(part.version) > 0 for part in self._fragments)

    def published_tensors(self) -> dict[str, Array]:
        """What is evaluated and exported, as `tensors` gives the anchor."""
        return self.state_tensors(AVERAGE) if self.averaged else self.tensors()

    def state_tensors(self, name: str) -> dict[str, Array]:
        """One committed state of the optimiser, as `tensors` gives the anchor.

        Raises:
          SyncError: RD-424, the optimiser has no such state.
        """
        if name not in self.recipe.state_names:
            raise load_error(f"outer state {name!r} is not one of {self.recipe.state_names}")
        buffer = _live_state(self.recipe.state_names.index(name))
        return {name: place.gather(buffer) for name, place in self._tensors.items()}

    def payload(self, fragment: int) -> Bytes:
        """The committed anchor of a fragment, the very bytes that were sent to all islands when it was committed.

        Where only a selection was sent, the whole anchor all the same: those who ask are behind.

        Returns:
          uint8 [n], a read-only view, valid until the second next preparation of that fragment.

        Raises:
          SyncError: RD-422, there is no anchor yet.
        """
        part = self._fragment(fragment)
        sent = self._sealed(part.live)
        # Who asks for the last preparation again shall get what was sent, a selection.
        return sent if part.live.selected is None else self._encode(part)

    def published(self, fragment: int) -> Bytes:
        """What is evaluated and exported of a fragment: the anchor itself, or the average of outer iterates.

        Returns:
          uint8 [n], a read-only view, valid until it is asked for again or, for the anchor, as `payload`'s.
        """
        part = self._fragment(fragment)
        payload = self._sealed(part.live)
        averaged = self.recipe.average.count(part.version) > 0
        if not (averaged or self.recipe.lookahead or self._draw):
            return payload
        meta = Meta("anchor", {fragment: part.version})
        if fragment not in self._published:
            self._published[fragment] = Writer(Fp32(), part.ranges, meta)
        writer = self._published[fragment]
        values = part.live.state[self.recipe.state_names.index(AVERAGE)] if averaged else part.live.anchor
        _write(writer, values, meta)
        return writer.seal(meta)

    def rewrite(self, fragment: int, arrays: Sequence[Bytes]) -> None:
        """Sets elements of the committed anchor to those of a slower channel's new anchor; its version stays.

        So a faster channel does not count the slower one's movement as its own (../shared/algorithms.md §10.6).

        Raises:
          SyncError: RD-401 to RD-412, payloads that cannot be used; RD-422, there is no anchor yet; RD-423, a
            preparation is open, which began at the anchor as it was.
        """
        part = self._fragment(fragment)
        self._sealed(part.live)
        if part.open is not None:
            what = f"fragment {fragment} has the open preparation {part.open.key!r} and cannot be rewritten"
            raise SyncError(423, what, "commit or abort the open one")
        opened = [open_payload(array) for array in arrays]
        for payload in opened:
            require_purpose(payload, "anchor")
            _require_whole(payload)
            payload.verify()
        sources = [(payload, payload.header.ranges) for payload in opened]
        scratch = self._scratch(1)[0][0]
        for _, _, inside in in_chunks(pieces(part.ranges, sources, "anchors", partial=True), part.numel):
            for piece in inside:
                values = piece.source.read(piece.position, piece.position + piece.numel, scratch)
                part.live.anchor[piece.at : piece.at + piece.numel].copy_(values)
        self._publish(part)

    def gram(self, fragment: int, contributions: Sequence[Contribution]) -> np.ndarray:
        """Inner products of contributions, and of the extras of the merge rule, over this shard's part of a fragment.

        Returns:
          float64 [K + extras, K + extras], contributions in sorted island order; the sum over shards is that of whole
          vectors.

        Raises:
          BadContribution: as `prepare`.
        """
        part = self._fragment(fragment)
        offers = check_offers(contributions, fragment, part.ranges, part.version, self.recipe.max_age)
        with quiet():
            try:
                return self._outer_step(part, offers, [1.0] * len(offers), (), 0, None).gram(self.recipe.rule.extras)
            except NotFinite as bad:
                raise not_finite(offers, bad.received) from None

    def prepare(
        self,
        key: str,
        fragment: int,
        contributions: Sequence[Contribution],
        lr: float | None = None,
        *,
        scale: Sequence[float] | None = None,
        neighbours: Sequence[Sequence[Bytes]] = (),
        own: int = 0,
        idle: bool = False,
    ) -> tuple[Prepared, Bytes]:
        """Merges contributions and makes the outer step, in spare buffers.

        Args:
          key: name of this preparation.
          fragment: which fragment.
          contributions: in any order; their weights are normalised.
          lr: outer learning rate of this step; None: the optimiser's own.
          scale: factors that are used as they are instead, of the contributions in sorted island order and then of the
            extras of the merge rule.
          neighbours: anchors of the neighbourhood, each as its payloads, for rules that pull towards them; this
            shard's own is number `own`.
          idle: there are no contributions, and nothing moves but the version.

        Returns:
          Figures, and the payload for all islands: uint8 [n], a read-only view, valid until the second next
          preparation of that fragment (the next one after an abort).  It must not be adopted before the commit.

        Raises:
          BadContribution: one of RD-401 to RD-412, with the island's name; the round can be prepared without it.
          SyncError: RD-413, all weights are 0; RD-422, there is no anchor yet; RD-423, another preparation is open;
            RD-417, the step makes the anchor infinite; RD-431, too few contributions for the merge rule.
          ValueError: no `scale`, but the rule needs factors that were found over the whole model.
        """
        part = self._fragment(fragment)
        for known, side in ((part.open, part.spare), (part.last, part.live)):
            if known is not None and known.key == key:
                return known, self._sealed(side)
        if part.open is not None:
            what = f"fragment {fragment} has the open preparation {part.open.key!r}, so {key!r} cannot begin"
            raise SyncError(423, what, "commit or abort the open one")
        self._sealed(part.live)
        offers = check_offers(contributions, fragment, part.ranges, part.version, self.recipe.max_age)
        version = part.version + 1
        meta = Meta("anchor", {fragment: version})
        with quiet():
            if idle:
                norms = self._stay(part, lr, meta)
            else:
                if scale is None and self.recipe.rule.needs_whole_vector:
                    raise ValueError(f"{self.recipe.merge} needs factors over the whole model; see `gram`")
                weights = factors([offer.weight for offer in offers]) if scale is None else scale
                require_enough(self.recipe.merge, len(offers), self.recipe.settings)
                norms = self._move(part, offers, weights, neighbours, own, lr, meta)
        if not math.isfinite(norms.update + norms.anchor):
            what = f"the outer step of fragment {fragment} gives an anchor of squared norm {norms.anchor}"
            raise SyncError(417, what, "lower outer.lr or outer.momentum")
        writer = part.spare.writer if part.spare.selected is None else part.spare.selected.writer
        part.spare.payload = payload = writer.seal(meta)
        part.open = Prepared(
            key=key,
            fragment=fragment,
            version=version,
            squared_anchor_norm=norms.anchor,
            squared_update_norm=norms.update,
            squared_delta_norm=norms.delta,
            bytes_in=sum(offer.nbytes for offer in offers),
            bytes_out=payload.nbytes,
            digest=writer.digest,
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
            self._remember(part)
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
        first = self._fragments[0].index
        if not 0 <= fragment - first < len(self._fragments):
            raise SyncError(421, f"there is no fragment {fragment} of {len(self._fragments)}", "use a smaller number")
        return self._fragments[fragment - first]

    def _sealed(self, side: _Side) -> Bytes:
        if not self._founded or side.payload is None:
            raise SyncError(422, "this shard has no anchor yet", "found the run or load a commit first")
        return side.payload

    def _scratch(self, count: int) -> list[Scratch]:
        while len(self._rooms) < count:
            self._rooms.append(room())
        return self._rooms

    def _remember(self, part: _Fragment) -> None:
        """Keeps the anchor that is about to be replaced, for contributions that will have been measured from it."""
        if not self.recipe.reanchor:
            return
        kept = PAST if self.recipe.max_age is None else self.recipe.max_age
        oldest = part.past.pop(part.version - kept, None)
        if kept:
            memory = torch.empty(part.numel) if oldest is None else oldest
            part.past[part.version] = memory.copy_(part.live.anchor)

    def _stay(self, part: _Fragment, lr: float | None, meta: Meta) -> Norms:
        live, spare = part.live, part.spare
        spare.anchor.copy_(live.anchor)
        for before, after in zip(live.state, spare.state, strict=True):
            after.copy_(before)
        self._average(part)
        if self._draw is not None:
            spare.selected = selected = self._select(part)
            selected.anchor.copy_(spare.anchor[selected.at])
            _write(selected.writer, selected.anchor, meta)
        else:
            _write(spare.writer, self._sent(spare, self.recipe.lr(part.version, lr)), meta)
        return Norms(anchor=_squared_norm(spare.anchor))

    def _move(
        self,
        part: _Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        neighbours: Sequence[Sequence[Bytes]],
        own: int,
        lr: float | None,
        meta: Meta,
    ) -> Norms:
        """Steps into the spare side."""
        part.spare.writer.begin(meta)
        opened = [[open_payload(array) for array in arrays] for arrays in neighbours]
        around: list[Source] = []
        for payloads in opened:
            for payload in payloads:
                require_purpose(payload, "anchor")
                _require_whole(payload)
            found = pieces(part.ranges, [(payload, payload.header.ranges) for payload in payloads], "neighbour")
            around.append(Message(found, part.numel))
        step = self._outer_step(part, offers, weights, around, own, lr)
        try:
            norms = step.run()
        except NotFinite as bad:
            raise not_finite(offers, bad.received) from None
        return norms if self._draw is None else replace(norms, anchor=self._spread(part))

    def _outer_step(
        self,
        part: _Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        around: Sequence[Source],
        own: int,
        lr: float | None,
    ) -> OuterStep:
        recipe, live, spare = self.recipe, part.live, part.spare
        rooms = self._scratch(len(offers) + len(around) + 1)
        bases = [self._base_of(part, offer) for offer in offers]
        if self._draw is not None:
            return self._selected_step(part, offers, weights, bases, around, own, lr)
        step = partial(
            OuterStep,
            recipe,
            Arrays(live.anchor, live.state, spare.anchor, spare.state, spare.writer.put),
            part.version,
            weights,
            neighbours=around,
            own=own,
            spans=part.spans,
            lr=lr,
            rooms=rooms,
        )
        # Who sent a coefficient cannot be seen any more in elements, nor after a correction, which is not sparse.
        corrected = recipe.direction is not None or any(base is not None for base in bases)
        if recipe.rule.combine is mean_over_senders and not corrected and transform_of(offers) is not None:
            delta = merged_coefficients(offers, weights, part.ranges, part.numel, mean_over_senders)
            return step((), delta=delta)
        return step([source_of(offer, part.ranges, part.numel) for offer in offers], bases=bases)

    def _base_of(self, part: _Fragment, offer: Offer) -> torch.Tensor | None:
        """The anchor that a contribution was measured from, if it is to be measured anew."""
        if not self.recipe.reanchor or offer.base_version == part.version:
            return None
        if offer.base_version not in part.past:
            what = f"island {offer.island}: measured from version {offer.base_version}, which is not kept any more"
            raise BadContribution(offer.island, 412, what, "lower stale.max_age, or let it adopt the newest anchor")
        return part.past[offer.base_version]

    def _selected_step(
        self,
        part: _Fragment,
        offers: Sequence[Offer],
        weights: Sequence[float],
        bases: Sequence[torch.Tensor | None],
        around: Sequence[Source],
        own: int,
        lr: float | None,
    ) -> OuterStep:
        """A step of the selected elements alone; the others stay."""
        live = part.live
        part.spare.selected = selected = self._select(part)
        at, state = selected.at, tuple(one[selected.at] for one in live.state)
        selection = self._selection(part)
        positions = selection.positions(part.ranges)
        return OuterStep(
            self.recipe,
            Arrays(live.anchor[at], state, selected.anchor, selected.state, selected.writer.put),
            part.version,
            weights,
            [selected_source(offer, selection, positions) for offer in offers],
            bases=[None if base is None else base[at] for base in bases],
            neighbours=[picked(source, part.numel, at) for source in around],
            own=own,
            lr=lr,
            rooms=self._scratch(len(offers) + len(around) + 1),
        )

    def _selection(self, part: _Fragment) -> Selection:
        """What travels in the round that moves the live anchor."""
        if self._draw is None:
            raise ValueError("all elements travel")
        return self._draw.of(part.version)

    def _select(self, part: _Fragment) -> _Selected:
        """Room for the selected elements of a round."""
        selection = self._selection(part)
        at = torch.from_numpy(selection.packed(part.ranges))
        meta = Meta("anchor", {part.index: part.version + 1})
        writer = Writer(self._codec, part.ranges, meta, selection, numel=len(at))
        return _Selected(at, writer, torch.empty(len(at)), tuple(torch.empty(len(at)) for _ in part.live.state))

    def _spread(self, part: _Fragment) -> float:
        """Puts stepped elements of a selection beside what stayed, into the spare side; squared norm of its anchor."""
        live, spare, selected = part.live, part.spare, part.spare.selected
        if selected is None:
            raise ValueError("all elements travel")
        for before, after, moved in zip(
            (live.anchor, *live.state), (spare.anchor, *spare.state), (selected.anchor, *selected.state), strict=True
        ):
            after.copy_(before)
            after[selected.at] = moved
        self._average(part)
        return _squared_norm(spare.anchor)

    def _average(self, part: _Fragment) -> None:
        """Takes the whole spare anchor into the average, where no step has."""
        if self.recipe.average.kind != "none":
            k = self.recipe.state_names.index(AVERAGE)
            before, after = part.live.state[k], part.spare.state[k]
            self.recipe.take_average(before, after, part.spare.anchor, part.version + 1)

    def _begin_average(self, part: _Fragment) -> None:
        """Before anchors are averaged, the average is the anchor itself."""
        if self.recipe.average.kind != "none" and not self.recipe.average.count(part.version):
            part.live.state[self.recipe.state_names.index(AVERAGE)].copy_(part.live.anchor)

    def _sent(self, side: _Side, lr: float | None) -> torch.Tensor:
        """What islands get of a side: its anchor, or where its momentum takes it."""
        if not self.recipe.lookahead:
            return side.anchor
        optimizer, ahead = self.recipe.optimizer, torch.empty_like(side.anchor)
        optimizer.lookahead(side.anchor, side.state[: len(optimizer.state_names)], ahead, lr)
        return ahead

    def _publish(self, part: _Fragment) -> None:
        """Makes the live anchor, as it is, what was sent last."""
        part.live.payload = self._encode(part)
        part.live.selected = None

    def _encode(self, part: _Fragment) -> Bytes:
        """Encodes the whole live anchor as it is."""
        meta = Meta("anchor", {part.index: part.version})
        # The learning rate of the step that made it.
        lr = self.recipe.lr(max(part.version - 1, 0), None)
        square = _write(part.live.writer, self._sent(part.live, lr), meta)
        if not math.isfinite(square):
            what = f"the anchor of fragment {part.index} has squared norm {square}"
            raise SyncError(417, what, "start from parameters that are finite")
        return part.live.writer.seal(meta)


def _live_anchor(part: _Fragment) -> torch.Tensor:
    return part.live.anchor


def _live_state(k: int) -> Callable[[_Fragment], torch.Tensor]:
    return lambda part: part.live.state[k]


def _write(writer: Writer, values: torch.Tensor, meta: Meta) -> float:
    """Encodes a whole vector; returns its squared norm."""
    square = 0.0
    writer.begin(meta)
    with quiet():
        for start in range(0, values.numel(), CHUNK):
            square += squared_norm(values[start : start + CHUNK])
            writer.put(start, values[start : start + CHUNK])
    return square


def _squared_norm(values: torch.Tensor) -> float:
    return math.fsum(squared_norm(values[start : start + CHUNK]) for start in range(0, values.numel(), CHUNK))


def _require_whole(payload: Payload) -> None:
    """Raises RD-412 if a payload does not simply have the elements of its ranges."""
    if payload.header.selection is not None or not payload.dense:
        what = f"an {payload.header.meta.purpose} payload has a selection or codes of whole tensors"
        raise SyncError(412, what, "send all elements, each by itself")


def _spans(layout: Layout, ranges: Ranges, recipe: Recipe) -> tuple[Span, ...]:
    """The tensors of a fragment, where a rule needs to know them; they have to be whole then."""
    if recipe.rule.scope != "tensor" and recipe.direction is None:
        return ()
    found = pieces(ranges, [(spec, (spec.range,)) for spec in layout.tensors], "tensors of the layout")
    for piece in found:
        if piece.numel != piece.source.numel:
            what = f"a fragment cuts tensor {piece.source.name}, but a rule works on whole tensors"
            raise SyncError(421, what, "cut fragments along tensors")
    return tuple(Span(piece.source.name, piece.at, piece.at + piece.numel) for piece in found)
