"""What a rank exchanges: one `Exchange` for each channel, over its parameters or over SCAFFOLD's controls.

A slower channel regards a faster one as part of its inner steps: when it has adopted, the faster one measures from
there.  Vectors that the inner step asks for (base, anchor, controls) are handed on after each adoption.
Source: ../shared/algorithms.md §10.6, §2.5.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ray_diloco.blocks import CONTROL, Channel, Cut, adopt_of, codec_of, draw_of, feedback_of
from ray_diloco.inner.corrections import ControlVariate, EvaluationMix, Proximal, next_control
from ray_diloco.inner.rank import InnerRank
from ray_diloco.outer.adopt import Adopt, AdoptChunk
from ray_diloco.outer.emission import Emission
from ray_diloco.outer.exchange import OVERWRITE, Exchange, Slice
from ray_diloco.outer.layout import Ranges
from ray_diloco.outer.payload import Bytes, Meta, open_payload
from ray_diloco.rounds.ports import Base

_PREFIX = "exchange|"


class Exchanges:
    """The exchanges of a rank.

    Args:
      inner: the rank.
      channels: of the run; the main one first, then the others in the order in which they act.
    """

    def __init__(self, inner: InnerRank, channels: Sequence[Channel]) -> None:
        self._inner, self._channels = inner, list(channels)
        zeros = [Slice(s.range, torch.zeros(s.range.numel, device=s.values.device)) for s in inner.slices]
        controlled = any(channel.signal == CONTROL for channel in channels)
        self._own = zeros if controlled else []
        self._exchanges = [
            Exchange(
                inner.layout,
                self._own if channel.signal == CONTROL else inner.slices,
                inner.emits,
                rule=adopt_of(channel),
                feedback=feedback_of(channel),
                keeps_anchor=channel.signal == CONTROL,
            )
            for channel in channels
        ]
        self._codecs = [codec_of(channel.up, self._seed_of(channel)) for channel in channels]
        self._draws = [draw_of(channel) for channel in channels]
        self._fragments: dict[int, tuple[int, Ranges]] = {}
        self._borrowed: list[torch.Tensor] = []
        self._bases: list[torch.Tensor] = []
        self._controls: list[torch.Tensor] = []
        config = inner.settings.inner
        if config.mix:
            inner.mix = EvaluationMix(config.mix, lambda: self._bases)
        if config.correction == "fedprox":
            inner.correction = Proximal(config.proximal, lambda: self._bases)
        elif config.correction == "scaffold":
            inner.correction = ControlVariate(lambda: [s.values for s in self._own], lambda: self._controls)

    @property
    def main(self) -> Exchange:
        """That of the main channel."""
        return self._exchanges[0]

    def connect(self, cuts: Sequence[Cut]) -> None:
        """Says which elements each fragment has."""
        for k, cut in enumerate(cuts):
            self._fragments |= {n: (k, ranges) for n, ranges in zip(cut.numbers, cut.fragments, strict=True)}

    def begin(self, fragment: int) -> None:
        """Makes what is about to be emitted: an island's control follows from the steps since the last adoption."""
        self.give_back()
        k, ranges = self._fragments[fragment]
        self._exchanges[k].note(ranges)
        if self._channels[k].signal == CONTROL:
            rates = self._inner.rate_sum
            for own, shared, base, s in zip(self._own, self._controls, self._bases, self._inner.slices, strict=True):
                theta = s.values
                moved = next_control(own.values, shared.to(theta.device), base.to(theta.device), theta.detach(), rates)
                own.values.copy_(moved)

    def emit(self, fragment: int, ranges: Ranges, meta: Meta) -> Emission:
        """Encodes a part of a fragment; see `Exchange.emit`."""
        k, _ = self._fragments[fragment]
        draw = self._draws[k]
        selection = None if draw is None else draw.of(meta.versions[fragment])
        return self._exchanges[k].emit(ranges, self._codecs[k], meta, selection)

    def adopt(self, heard: Mapping[int, bool | None], payloads: Sequence[Bytes]) -> None:
        """Takes over anchors by the rules of their channels; see `Rank.adopt`."""
        self.give_back()
        arrays = _by_fragment(payloads)
        for fragment, merged in heard.items():
            k, ranges = self._fragments[fragment]
            if merged is not None:
                self._exchanges[k].acknowledge(ranges, merged)
            self._exchanges[k].adopt(arrays[fragment], ranges)
            self._follow(k, ranges)
        self._adopted()

    def join(self, fragments: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Begins at anchors: at the slowest channel, then at what faster ones moved."""
        self.give_back()
        arrays = _by_fragment(payloads)
        order = [0, *range(len(self._channels) - 1, 0, -1)]
        for fragment in sorted(fragments, key=lambda f: order.index(self._fragments[f][0])):
            k, ranges = self._fragments[fragment]
            self._exchanges[k].give_up(ranges)
            self._exchanges[k].adopt(arrays[fragment], ranges, OVERWRITE)
            if k == 0:
                self._inner.rate_sum = 0.0
        self._adopted()

    def borrow(self, payloads: Sequence[Bytes]) -> None:
        """Puts anchors in the place of the parameters, to evaluate under them; collective."""
        if not self._borrowed:
            self._borrowed = [s.values.detach().clone() for s in self._inner.slices]
        versions = dict(self.main.versions)
        self.main.adopt(payloads, rule=_LOOK)
        self.main.versions = versions
        self._inner.commit_writes()

    @torch.no_grad()
    def give_back(self) -> None:
        """Puts the parameters back; collective if something was borrowed."""
        if self._borrowed:
            for s, values in zip(self._inner.slices, self._borrowed, strict=True):
                s.values.copy_(values)
            self._borrowed = []
            self._inner.commit_writes()

    def state(self, bases: Mapping[int, Base] | None) -> dict[str, np.ndarray]:
        """What the exchanges remember; with `bases`, by fragment, parameters and bases as well."""
        found: dict[str, np.ndarray] = {}
        for channel, exchange in zip(self._channels, self._exchanges, strict=True):
            state = exchange.state(with_parameters=bases is not None)
            found |= {f"{_PREFIX}{channel.name}|{name}": array for name, array in state.items()}
        if bases is not None:
            rows = [(fragment, *base) for fragment, base in sorted(bases.items())]
            found[f"{_PREFIX}versions"] = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
            found[f"{_PREFIX}rates"] = np.array([self._inner.rate_sum])
        return found

    def split(self, pieces: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """What of an inner state belongs to the exchanges, and what to the optimiser."""
        mine = {name.removeprefix(_PREFIX): a for name, a in pieces.items() if name.startswith(_PREFIX)}
        return mine, {name: a for name, a in pieces.items() if not name.startswith(_PREFIX)}

    def load_state(self, pieces: Mapping[str, np.ndarray], parameters: bool) -> tuple[bool, dict[int, Base] | None]:
        """Takes up what `state` gave; collective.

        Returns:
          Whether what is remembered fitted, and the bases by fragment if `parameters` were asked for and are there.
        """
        rows = pieces.get("versions")
        bases = {int(f): Base(*map(int, base)) for f, *base in rows} if parameters and rows is not None else None
        versions = None if bases is None else {fragment: base.version for fragment, base in bases.items()}
        for channel, exchange in zip(self._channels, self._exchanges, strict=True):
            prefix = f"{channel.name}|"
            state = {name.removeprefix(prefix): a for name, a in pieces.items() if name.startswith(prefix)}
            if not exchange.load_state(state, versions):
                self.forget()
                return False, None
        if versions is not None:
            self._adopted()
            self._inner.rate_sum = float(pieces["rates"][0])
        return True, bases

    def misfit(self, pieces: Mapping[str, np.ndarray], anchored: bool) -> str:
        """Why what `state` gave with parameters cannot be taken up here; empty: it can.

        `anchored`: only if it was measured from the bases that are here now, bit by bit.
        """
        saved, here = (self.split(state)[0] for state in (pieces, self.state({0: Base(0)})))
        sizes = [{name: a.size for name, a in one.items() if _is_cut(name)} for one in (saved, here)]
        if sizes[0] != sizes[1]:
            return "its point does not fit what its ranks hold"
        bases = [name for name in here if "|base|" in name]
        if anchored and not all(np.array_equal(saved[name], here[name]) for name in bases):
            return "its point began from another anchor"
        return ""

    def forget(self) -> None:
        """Forgets all error memories."""
        for exchange in self._exchanges:
            exchange.forget()

    def _follow(self, k: int, ranges: Ranges) -> None:
        """Lets faster channels measure from what a slower one has adopted."""
        if self._channels[k].signal == CONTROL:
            return
        faster = range(1, len(self._channels)) if k == 0 else range(1, k)
        for j in faster:
            if self._channels[j].signal != CONTROL:
                self._exchanges[j].measure_from_here(ranges)
        if k == 0:
            self._inner.rate_sum = 0.0

    def _adopted(self) -> None:
        """Makes what was written the parameters of the next step, and hands on what it asks for."""
        self._inner.commit_writes()
        if self._inner.mix is not None or self._inner.correction is not None:
            self._bases = self._inner.over_slices(self.main.base)
        for channel, exchange in zip(self._channels, self._exchanges, strict=True):
            if channel.signal == CONTROL and exchange.anchor is not None:
                self._controls = self._inner.over_slices(exchange.anchor)

    def _seed_of(self, channel: Channel) -> int:
        """Islands round differently, so that the errors of stochastic rounding average out; masks are the same."""
        if channel.up.rounding != "stochastic":
            return channel.seed
        return (channel.seed + zlib.crc32(self._inner.settings.island.encode())) % 2**31


def _is_cut(name: str) -> bool:
    """Whether an array is one value for each element that a rank holds or emits."""
    return name not in ("versions", "rates") and "|memory|" not in name


def _look(chunk: AdoptChunk) -> None:
    chunk.theta.copy_(chunk.anchor)


_LOOK = Adopt(_look)


def _by_fragment(payloads: Sequence[Bytes]) -> dict[int, list[Bytes]]:
    found: defaultdict[int, list[Bytes]] = defaultdict(list)
    for array in payloads:
        for fragment in open_payload(array).header.meta.versions:
            found[fragment].append(array)
    return found
