"""A part of the anchor with its outer state: merges contributions and moves in two phases.

    prepare   decode, check, merge, outer step and encode, one chunk after the other, into spare buffers
    commit    swap spare and live buffers
    abort     forget the spare ones

Until `commit`, nothing that was committed has been touched: a round that fails leaves no trace (`sides`).  How
contributions become a step is in `moves`, what goes out in `publication`.  Source: ../shared/algorithms.md §10.1
(merge, outer) and §9.4 items 38 to 43.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ray_diloco.errors import BadContribution, SyncError
from ray_diloco.outer.chunks import in_chunks, pieces, quiet, require_within
from ray_diloco.outer.codec import Codec, Fp32
from ray_diloco.outer.contribution import Contribution, check_offers, not_finite
from ray_diloco.outer.layout import Layout, Ranges, intersect, normalise
from ray_diloco.outer.merge import require_enough
from ray_diloco.outer.moves import Mover
from ray_diloco.outer.named import Array, load_error, places
from ray_diloco.outer.optimizer import OuterOptimizer
from ray_diloco.outer.payload import Bytes, Meta, gather, open_payload, require_purpose, require_whole
from ray_diloco.outer.publication import begin_average, encode, encode_published, publish, rewrite
from ray_diloco.outer.random_fragments import Draw, RandomFragments
from ray_diloco.outer.recipe import AVERAGE, Recipe
from ray_diloco.outer.replaced import encode_passed, load_replaced, remember_sent, replaced_tensors
from ray_diloco.outer.sides import Fragment, Prepared, Side, live_anchor, live_state, spans_of
from ray_diloco.outer.step import NotFinite
from ray_diloco.outer.weights import factors

__all__ = ["AnchorShard", "BadContribution", "Contribution", "Prepared"]


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
        self._founded = False
        codec = codec_down or Fp32()
        self._drawn = None if draw is None else RandomFragments(draw, recipe, codec)
        self._mover = Mover(recipe, self._drawn)
        self._codec = codec
        parts = [intersect(fragment, self.ranges) for fragment in fragments]
        self._fragments = [
            Fragment(
                k, part, Side(part, k, recipe, codec), Side(part, k, recipe, codec), spans_of(layout, part, recipe)
            )
            for k, part in enumerate(parts, start=first)
        ]
        self._tensors = places(layout, self.ranges, [(part, part.ranges) for part in self._fragments])
        self.names = tuple(self._tensors)

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
            require_whole(payload)
            if not payload.lossless:
                raise SyncError(412, f"parameters in {payload.header.codec} cannot found a run", "send them in fp32")
        sources = [(payload, payload.header.ranges) for payload in opened]
        pieces(self.ranges, sources, "founding payloads")
        for part in self._fragments:
            for start, stop, inside in in_chunks(pieces(part.ranges, sources, "founding payloads"), part.numel):
                part.live.anchor[start:stop].copy_(gather(start, stop, inside, self._mover.rooms(1)[0]))
            begin_average(self.recipe, part)
            publish(self.recipe, part)
        self._founded = True

    def found_zero(self) -> None:
        """Takes zeros for version 0 of the anchor, for control variates.  Raises as `found`."""
        if self._founded:
            raise SyncError(422, "this shard has an anchor already", "found a run on new shards")
        for part in self._fragments:
            part.live.anchor.zero_()
            publish(self.recipe, part)
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
        replaced: Mapping[str, Mapping[str, Array]] | None = None,
    ) -> None:
        """Takes anchor and outer state from a checkpoint; what was open is forgotten.

        Args:
          anchor: fp32 tensors by name; those of other shards are not looked at.
          state: for each name of a state of the optimiser, its tensors by name.
          versions: version of each fragment.
          replaced: what there is of `replaced_tensors`, by name.

        Raises:
          SyncError: RD-424, a tensor, a state or a version is missing or has another shape or dtype.
        """
        self._founded = False
        missing = {part.index for part in self._fragments} - versions.keys()
        if missing:
            raise load_error(f"no version of fragments {sorted(missing)}")
        names = self.recipe.state_names
        if state.keys() != set(names):
            raise load_error(f"outer state {sorted(state)} instead of {sorted(names)}")
        for name, place in self._tensors.items():
            place.scatter(anchor.get(name), live_anchor)
            for k, state_name in enumerate(names):
                place.scatter(state[state_name].get(name), live_state(k))
        for part in self._fragments:
            part.version, part.open, part.last = versions[part.index], None, None
            begin_average(self.recipe, part)
            publish(self.recipe, part)
        load_replaced(self.recipe, self._fragments, self._tensors, replaced or {})
        self._founded = True

    def replaced_tensors(self) -> Iterator[tuple[str, str, Array]]:
        """Anchors that were replaced and are still needed; see `replaced.replaced_tensors`."""
        return replaced_tensors(self.recipe, self._fragments, self._tensors)

    def passed(self, fragment: int, version: int) -> Bytes | None:
        """The message of an anchor that was replaced, in fp32; None if it is not kept."""
        return encode_passed(self._fragment(fragment), version)

    def tensors(self) -> dict[str, Array]:
        """The committed anchor: read-only fp32 arrays by name, in canonical order.

        A tensor that lies in one fragment is a view, valid until the second next preparation of that fragment.
        """
        return {name: place.gather(live_anchor) for name, place in self._tensors.items()}

    def live_sides(self) -> list[Side]:
        """The buffers of what is committed now; arrays that were handed out are views of them."""
        return [part.live for part in self._fragments]

    def spare_side(self, fragment: int) -> Side:
        """The buffers that the next preparation of a fragment will write."""
        return self._fragment(fragment).spare

    def renew_spare(self, fragment: int) -> None:
        """Takes new memory for the next preparation of a fragment, where somebody still reads views of the old one.

        An open preparation stays where it is.
        """
        part = self._fragment(fragment)
        if part.open is None:
            part.spare = Side(part.ranges, part.index, self.recipe, self._codec)

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
        buffer = live_state(self.recipe.state_names.index(name))
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
        return sent if part.live.selected is None else encode(self.recipe, part)

    def published(self, fragment: int) -> Bytes:
        """What is evaluated and exported of a fragment, the anchor or the average of iterates; valid as `payload`'s."""
        part = self._fragment(fragment)
        payload = self._sealed(part.live)
        averaged = self.recipe.average.count(part.version) > 0
        as_sent = not (averaged or self.recipe.lookahead or self._drawn)
        return payload if as_sent else encode_published(self.recipe, part, averaged)

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
        rewrite(self.recipe, part, [open_payload(array) for array in arrays], self._mover.rooms(1)[0][0])

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
                return self._mover.step(part, offers, [1.0] * len(offers), (), 0, None).gram(self.recipe.rule.extras)
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
                norms = self._mover.stay(part, lr, meta)
            else:
                if scale is None and self.recipe.rule.needs_whole_vector:
                    raise ValueError(f"{self.recipe.merge} needs factors over the whole model; see `gram`")
                weights = factors([offer.weight for offer in offers]) if scale is None else scale
                require_enough(self.recipe.merge, len(offers), self.recipe.settings)
                norms = self._mover.move(part, offers, weights, neighbours, own, lr, meta)
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
            self._mover.remember(part)
            remember_sent(self.recipe, part)
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

    def _fragment(self, fragment: int) -> Fragment:
        first = self._fragments[0].index
        if not 0 <= fragment - first < len(self._fragments):
            raise SyncError(421, f"there is no fragment {fragment} of {len(self._fragments)}", "use a smaller number")
        return self._fragments[fragment - first]

    def _sealed(self, side: Side) -> Bytes:
        if not self._founded or side.payload is None:
            raise SyncError(422, "this shard has no anchor yet", "found the run or load a commit first")
        return side.payload
