"""A rank's side of a round: what it holds of the canonical form, what it sends, what it adopts.

    emit     Δ = B − θ, start minus end, chunk by chunk straight into the payload (`emission`)
             with error feedback: e ← β e + s Δ is sent, and what its bytes do not say stays in e (`error_feedback`)
    adopt    (θ, B) ← Adopt(θ, θ at emission, A), chunk by chunk straight out of the payload (`adoption`)

Each rank of an island emits its own part and writes all that it holds (`held`).
Source: ../shared/algorithms.md §1, §9.6 item 54 and §10.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch

from ray_diloco.errors import SyncError
from ray_diloco.outer.adopt import Adopt, adopt_of
from ray_diloco.outer.adoption import adopt_elements, adopt_selected, versions_of
from ray_diloco.outer.chunks import describe, pieces, quiet
from ray_diloco.outer.codec import Codec
from ray_diloco.outer.emission import Emission, Emitter
from ray_diloco.outer.error_feedback import Feedback, Unheard, put_back
from ray_diloco.outer.exchange_state import restore_state, state_of
from ray_diloco.outer.held import Held, Slice, required
from ray_diloco.outer.layout import Layout, Ranges, intersect, normalise, subtract, total
from ray_diloco.outer.payload import Bytes, Meta, open_payload
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import ShapedCodec, is_shaped

__all__ = ["OVERWRITE", "Exchange", "Slice"]

OVERWRITE = adopt_of("overwrite")


class Exchange:
    """The parameters of a rank in canonical form, and the base that it measures from.

    Args:
      layout: the canonical form.
      held: slices that this rank holds, disjoint.
      emits: elements that this rank sends; a part of those it holds.
      rule: how anchors are adopted.
      feedback: error feedback of what is emitted; None: there is none.
      keeps_anchor: keep a copy of the anchor beside the base, for rules whose base is another.

    Attributes:
      holds: elements that this rank holds.
      emits: elements that this rank sends.
      versions: version of each fragment as last adopted.
      base: `B` of `emits`, packed, fp32 on the host.
      anchor: the anchor as last adopted, likewise; None unless it is kept.

    Raises:
      SyncError: RD-441, slices that overlap, leave the layout or are no flat fp32 memory, or emitted elements that are
        not held.
    """

    def __init__(
        self,
        layout: Layout,
        held: Sequence[Slice],
        emits: Ranges,
        *,
        rule: Adopt = OVERWRITE,
        feedback: Feedback | None = None,
        keeps_anchor: bool = False,
    ) -> None:
        self._held = Held(
            layout,
            held,
            emits,
            keeps_error=feedback is not None,
            keeps_anchor=keeps_anchor,
            keeps_emitted=rule.reads_emitted,
        )
        self.holds, self.emits = self._held.ranges, self._held.emits
        self.base, self.anchor = self._held.base, self._held.anchor
        self.versions: dict[int, int] = {}
        self._rule, self._feedback = rule, feedback
        self._emitter = Emitter(layout, self._held, feedback)
        self._unheard = Unheard()
        self._based: Ranges = ()

    @torch.no_grad()
    def emit(
        self, ranges: Ranges, codec: Codec | ShapedCodec, meta: Meta, selection: Selection | None = None
    ) -> Emission:
        """Encodes `B − θ` for some of the elements that this rank emits.

        Args:
          ranges: canonical elements, for example those of a fragment that one anchor shard keeps.
          codec: how they travel.
          meta: what the header shall say.
          selection: which of them travel; None: all.

        With error feedback, a part that is not finite travels as zeros and leaves the error memory as it was: whoever
        asks is told that the emission is not finite, and one such step must not poison all that follow.

        Raises:
          ValueError: a selection in a codec of whole tensors.
          SyncError: RD-442, elements that this rank does not emit, or that have no base because nothing was adopted
            or the last adoption failed half-way.
        """
        if total(intersect(ranges, self._based)) != total(ranges):
            lacking = describe(subtract(ranges, self._based))
            raise SyncError(442, f"elements {lacking} have no base to measure from", "adopt an anchor for them first")
        if selection is not None and is_shaped(codec):
            raise ValueError("random fragments do not go with codecs of whole tensors")
        said: Bytes | None = None
        with quiet():
            if selection is not None:
                writer, square = self._emitter.selected(ranges, codec, meta, selection)
            elif is_shaped(codec):
                writer, square, said = self._emitter.tensors(ranges, codec, meta)
            else:
                writer, square = self._emitter.elements(ranges, cast(Codec, codec), meta)
        payload = writer.seal(meta)
        if self._feedback is not None:
            self._unheard.add(ranges, payload if said is None else said)
        return Emission(payload, square, math.isfinite(square))

    @torch.no_grad()
    def note(self, ranges: Ranges) -> None:
        """Remembers `θ` as it is at the emission of a fragment, for rules that ask for it.

        `emit` does so of what it emits.  A rank that holds more than it emits has to be told of the whole fragment.
        """
        for part in self._held.runs(intersect(self.holds, ranges)) if self._rule.reads_emitted else ():
            required(part.emitted).copy_(part.theta)

    @torch.no_grad()
    def acknowledge(self, ranges: Ranges, merged: bool) -> None:
        """Hears whether the oldest emission of a fragment was merged; what was not is put back into the error memory.

        Args:
          ranges: elements of the fragment.
          merged: whether a commit holds it.
        """
        if self._feedback is None:
            return
        for sent in self._unheard.oldest(ranges):
            if not merged:
                put_back(self._held, sent)

    def give_up(self, ranges: Ranges) -> None:
        """Puts back all that a fragment still waits to hear of: its island joins anew and will not hear of it."""
        while self._feedback is not None and self._unheard.waiting(ranges):
            self.acknowledge(ranges, False)

    @torch.no_grad()
    def read(self, ranges: Ranges, meta: Meta) -> Bytes:
        """Encodes `θ` itself in fp32, to found the anchor of a run.

        Returns:
          uint8 [n], a read-only view of memory that the next emission of the same ranges in fp32 writes again.

        Raises:
          SyncError: RD-406, elements that this rank does not hold.
        """
        return self._emitter.parameters(ranges, meta)

    @torch.no_grad()
    def adopt(self, arrays: Sequence[Bytes], ranges: Ranges | None = None, rule: Adopt | None = None) -> dict[int, int]:
        """Takes over anchors.

        Headers and coverage are checked before anything is written.  Bodies are checked chunk by chunk, each before it
        is written, in the one pass that a rule which does not read `θ` needs: if one is damaged, these elements are
        half old and half new and have no base, so that `emit` refuses them until an adoption succeeds, and adopting
        again mends it.  For a rule that reads `θ`, and where a selection travels, all bodies are checked before the
        first write.

        Args:
          arrays: payloads of anchors; together they have each wanted element once, and may have others.
          ranges: elements to adopt, for example those of a fragment; None: all that this rank holds.
          rule: how; None: the rule of this exchange.

        Returns:
          The version of each fragment that the payloads name.

        Raises:
          SyncError: RD-401 to RD-408, a payload that cannot be used or elements that are missing or come twice.
        """
        rule = rule or self._rule
        opened = [open_payload(array) for array in arrays]
        wanted = self.holds if ranges is None else intersect(self.holds, ranges)
        pieces(wanted, [(payload, payload.header.ranges) for payload in opened], "adopted anchors")
        versions = versions_of(opened)
        selected = any(payload.header.selection is not None for payload in opened)
        if rule.reads_theta or selected:
            for payload in opened:
                payload.verify()
        parts = list(self._held.runs(wanted))
        if not selected:
            self._based = subtract(self._based, wanted)
        for payload in opened:
            adopt_one = adopt_elements if payload.header.selection is None else adopt_selected
            adopt_one(self._held, payload, parts, rule)
        if not selected:
            self._based = normalise((*self._based, *wanted))
        self.versions.update(versions)
        return versions

    @torch.no_grad()
    def measure_from_here(self, ranges: Ranges) -> None:
        """`B ← θ`: a faster channel goes on from what a slower one has adopted."""
        for part in self._held.runs(intersect(self.emits, ranges)):
            if part.base is not None:
                part.base.copy_(part.theta)

    def state(self, *, with_parameters: bool) -> dict[str, np.ndarray]:
        """Copies of what is not in any anchor: error memory, what codecs keep, and if asked for `θ` and `B`.

        Returns:
          fp32 arrays by name; `<kind>|<first canonical element>` of each run of `emits`, of `θ` each run of `holds`.
        """
        return state_of(self._held, self._emitter.memories, with_parameters)

    @torch.no_grad()
    def load_state(self, arrays_by_name: Mapping[str, np.ndarray], versions: Mapping[int, int] | None) -> bool:
        """Takes up what `state` gave, of the same cut; `versions` of the bases where `θ` and `B` are to be restored.

        Returns:
          Whether it fitted; nothing has been changed if it did not.
        """
        fitted = restore_state(self._held, self._emitter.memories, arrays_by_name, versions is not None)
        if fitted and versions is not None:
            self._based = self.emits
            self.versions.update(versions)
        return fitted

    def forget(self) -> None:
        """Makes error memory and what codecs keep those of a rank that has sent nothing."""
        if self._held.error is not None:
            self._held.error.zero_()
        self._emitter.memories.clear()
        self._unheard = Unheard()
