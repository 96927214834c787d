"""From a configuration to blocks: the channels of a run, and what each is built from.

The only place where the keys of a method become objects of `outer/` and rules of `rounds/`; cluster and simulator build
from it alike.  Nothing here imports torch before a function that needs it is called: the driver holds channels as
plain values, and those who hold tensors build from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ray_diloco.config.blocks import (
    AdoptConfig,
    ChannelConfig,
    CodecConfig,
    FragmentsConfig,
    MergeConfig,
    OuterConfig,
    StaleConfig,
)
from ray_diloco.config.schema import Config, island_names
from ray_diloco.outer.layout import Layout, Ranges
from ray_diloco.outer.pace import Pace, by_loss, by_rate
from ray_diloco.outer.schedule import Lane, Schedule
from ray_diloco.outer.stale import (
    ISLAND_SCALES,
    DirectionSettings,
    age_weight,
    divergence_weights,
    wall_clock_weight,
)
from ray_diloco.outer.weights import Work, weights
from ray_diloco.rounds.faults import FaultPlan, parse_faults
from ray_diloco.rounds.ports import SHARED, Offer
from ray_diloco.rounds.rendezvous import Quorum
from ray_diloco.rounds.rules import Weigher
from ray_diloco.rounds.topology import Pairs, Topology, eager, everybody, star

if TYPE_CHECKING:
    from ray_diloco.outer.adopt import Adopt
    from ray_diloco.outer.codec import Codec
    from ray_diloco.outer.error_feedback import Feedback
    from ray_diloco.outer.random_fragments import Draw
    from ray_diloco.outer.recipe import Recipe
    from ray_diloco.outer.shaped import ShapedCodec

MAIN = "main"
PARAMETERS, CONTROL = "parameters", "control"


@dataclass(frozen=True)
class Channel:
    """A row of blocks over the parameters, or over the control variates of SCAFFOLD.

    Attributes:
      name: `main`, or the key in `channels`.
      H: inner steps between two emissions of a fragment.
      delay: inner steps between emission and adoption.
      rounds: of the run, in this channel.
      max_age: versions that a contribution may be behind; None: any number.
      recode: requantise the running sum at every hop of a ring.
      islands: number of islands of the run.
      seed: of what is drawn.
      free: islands train at their own pace.
    """

    name: str
    signal: str
    H: int
    delay: int
    spread: bool
    rounds: int
    fragments: FragmentsConfig
    up: CodecConfig
    down: CodecConfig
    stale: StaleConfig
    merge: MergeConfig
    outer: OuterConfig
    adopt: AdoptConfig
    max_age: int | None
    recode: bool
    islands: int
    seed: int
    free: bool = False


def channels_of(config: Config) -> tuple[Channel, ...]:
    """The channels of a run: the main one first, then the others in the order in which they act."""
    others = [_side_channel(config, name, row) for name, row in config.channels.items()]
    return (_main_channel(config), *sorted(others, key=lambda c: (c.signal != CONTROL, c.H, c.name)))


def anchor_names(config: Config) -> tuple[str, ...]:
    """The anchors of the main channel: one that all share, or one for each island."""
    return tuple(island_names(config)) if config.topology.anchors == "per_island" else (SHARED,)


# From this many parameters on, one anchor shard per island pays for its process.
PARAMETERS_PER_SHARD = 4_000_000
# Anchors that are kept at least for contributions of any age; equally fast islands are one less behind than they are.
REMEMBERED = 8


def shard_count(anchors: Sequence[str], asked: int, islands: int, parameters: int) -> int:
    """Actors that keep the main channel's anchors, or as many as are `asked` for a shared one; 0: by its size."""
    if tuple(anchors) != (SHARED,):
        return len(anchors)
    return asked or (islands if parameters >= PARAMETERS_PER_SHARD else 1)


@dataclass(frozen=True)
class Cut:
    """A channel and its fragments in one model; they are numbered from `first` on, over all channels."""

    channel: Channel
    first: int
    fragments: tuple[Ranges, ...]

    @property
    def numbers(self) -> range:
        """Numbers of its fragments."""
        return range(self.first, self.first + len(self.fragments))


def cuts_of(channels: Sequence[Channel], layout: Layout | None) -> tuple[Cut, ...]:
    """The fragments of all channels; `layout` may be None where all of them are whole.

    Raises:
      SyncError: RD-451, RD-452, the model cannot be cut so.
    """
    from ray_diloco.outer.fragments import fragments_of

    cuts, first = [], 0
    for channel in channels:
        f = channel.fragments
        whole: list[Ranges] = [()] if layout is None else [layout.whole]
        found = (
            whole
            if f.kind in ("whole", "random") or layout is None
            else fragments_of(f.kind, layout, size=f.size, strided=f.strided, count=f.count)
        )
        cuts.append(Cut(channel, first, tuple(found)))
        first += len(found)
    return tuple(cuts)


def needs_layout(channels: Sequence[Channel]) -> bool:
    """Whether the number of fragments depends on the model."""
    return any(channel.fragments.kind not in ("whole", "random") for channel in channels)


def schedule_of(config: Config, cuts: Sequence[Cut], origin: tuple[int, int]) -> Schedule:
    """When fragments are due, for a run whose `H` has held from a round and step on."""
    main, *others = cuts
    rounds = rounds_of(config)
    lanes = tuple(Lane(cut.channel.H, _offsets(cut), cut.channel.delay) for cut in others)
    return Schedule(main.channel.H, rounds, _offsets(main), main.channel.delay, origin, lanes, _pace_of(config))


def _pace_of(config: Config) -> Pace | None:
    """How rounds are laid out as the run goes; None where all are alike."""
    from ray_diloco.inner.schedule import learning_rate_factor

    schedule, inner = config.schedule, config.inner
    if schedule.adaptive == "none" and not schedule.priority:
        return None
    total = inner.schedule.total_steps or config.run.rounds * inner.H
    lengths = {
        "none": None,
        "loss": by_loss,
        "rate": by_rate(lambda step: inner.lr * learning_rate_factor(inner.schedule, step, total), schedule.growth),
    }
    return Pace(lengths[schedule.adaptive], schedule.least, schedule.most, schedule.priority)


def is_free(config: Config) -> bool:
    """Whether islands go at their own pace, and every contribution is a round of its own."""
    return config.quorum.kind == "immediate"


def rounds_of(config: Config) -> int:
    """Rounds of a whole run; where every contribution is one, as many for each island as are asked for."""
    return config.run.rounds * (len(island_names(config)) if is_free(config) else 1)


def is_exact(config: Config) -> bool:
    """Whether after an adoption the parameters of an island are the anchor that is published."""
    plain = config.adopt.kind == "overwrite" and config.fragments.kind == "whole" and not config.channels
    alone = config.topology.anchors == "shared" and config.outer.average.kind == "none" and not is_free(config)
    return plain and alone and main_delay(config) == 0


def main_delay(config: Config) -> int:
    """Inner steps between emission and adoption in the main channel."""
    return config.schedule.delay + config.schedule.lag * config.inner.H


def quorum_of(config: Config) -> Quorum:
    """When a round closes."""
    q = config.quorum
    n = 1 if q.kind == "immediate" else q.n
    fraction = q.fraction if q.kind == "at_least" else 0.0
    return Quorum(q.kind, n, q.grace_s, q.deadline_s, q.late == "carry", fraction)


def topology_of(config: Config) -> Topology:
    """Who meets whom."""
    if config.topology.anchors == "shared":
        return star
    if config.topology.kind == "pairs":
        return Pairs(config.run.seed)
    return eager if config.stale.own_fresh else everybody


def weigher_of(config: Config, cuts: Sequence[Cut], shard_sizes: Mapping[str, int]) -> Weigher:
    """What each offer of a round is multiplied by: its weight, and what staleness says of it.

    Args:
      config: of the run.
      cuts: its channels.
      shard_sizes: blocks that each island may train on.
    """
    stale, kind, islands = config.stale, config.quorum.weights, len(island_names(config))
    controls = {number for cut in cuts if cut.channel.signal == CONTROL for number in cut.numbers}
    rho = ISLAND_SCALES[stale.scale](islands)

    def factors(offers: Sequence[Offer], ages: Sequence[int], now: float) -> list[float]:
        if offers[0].fragment in controls:
            # c ← c + (|S| / N) mean over S: whoever is absent has not changed its own.
            return [1.0 / islands] * len(offers)
        work = {f"{k:06}": Work(o.steps, o.tokens, shard_sizes.get(o.island, 0)) for k, o in enumerate(offers)}
        parts = weights(kind, work)
        divergence = divergence_weights([o.loss for o in offers], stale.divergence)
        scales = [
            rho * age_weight(age, stale.age_power) * wall_clock_weight(now - offer.emitted_at, stale.half_life_s)
            for offer, age in zip(offers, ages, strict=True)
        ]
        return [parts.get(key, 0.0) * d * s for key, d, s in zip(work, divergence, scales, strict=True)]

    return factors


def faults_of(config: Config) -> FaultPlan:
    """What is to go wrong.

    Raises:
      ConfigError: 161–165, a line of `faults.plan` that cannot happen.
    """
    return FaultPlan(parse_faults(config.faults.plan, island_names(config), config.anchor.shards))


def recipe_of(channel: Channel) -> Recipe:
    """How the anchor of a channel moves."""
    from ray_diloco.outer.average import OuterAverage
    from ray_diloco.outer.merge import MergeSettings
    from ray_diloco.outer.optimizer import outer_optimizer
    from ray_diloco.outer.rate import OuterRate
    from ray_diloco.outer.recipe import Recipe

    outer, merge, stale = channel.outer, channel.merge, channel.stale
    settings = asdict(outer) | {"buffer": outer.buffer or channel.islands}
    own = ("byzantine", "trim", "keep", "iterations", "tau", "relative_tau")
    direction = None
    if stale.direction:
        direction = DirectionSettings(stale.c_ok, stale.k_s, stale.k_d, stale.kappa, stale.beta_max)
    rate, average = outer.schedule, outer.average
    return Recipe(
        outer_optimizer(**settings),
        merge.kind,
        MergeSettings(**{key: getattr(merge, key) for key in own}, plain=tuple(merge.plain)),
        channel.max_age,
        stale.reanchor,
        direction,
        merge.consensus,
        codec_of(channel.up, channel.seed) if channel.recode else None,  # type: ignore[arg-type]
        OuterRate(rate.kind, channel.rounds, rate.warmup_rounds, rate.final_ratio),
        OuterAverage(average.kind, channel.rounds, average.start, average.decay),
        channel.adopt.kind == "lookahead",
        max(0, -(-channel.delay // channel.H) - 1),
        channel.free,
        max(REMEMBERED, 2 * channel.islands),
    )


def codec_of(config: CodecConfig, seed: int) -> Codec | ShapedCodec:
    """The codec of a `codec` section; `seed` is that of its sender, for what it draws alone."""
    from ray_diloco.outer.shaped import codec_by_name

    return codec_by_name(config.kind, codec_params(config, seed))


def codec_params(config: CodecConfig, seed: int) -> dict[str, Any]:
    """The arguments of a codec: those of its keys that it reads, where they are set."""
    given = {
        "block": config.block or None,
        "k": config.k or None,
        "rank": config.rank,
        "p": config.p,
        "values": config.values,
        # Codebooks do not round, and are not told how.
        "rounding": None if config.rounding == "nearest" else config.rounding,
        "codebook": config.codebook or None,
        "seed": seed,
    }
    return {key: given[key] for key in _READS.get(config.kind, ()) if given[key] is not None}


def feedback_of(channel: Channel) -> Feedback | None:
    """The error feedback of a channel."""
    from ray_diloco.outer.error_feedback import Feedback

    return Feedback(channel.up.decay, channel.up.scale) if channel.up.feedback else None


def adopt_of(channel: Channel) -> Adopt:
    """How islands adopt an anchor of a channel."""
    from ray_diloco.outer import adopt

    rule = channel.adopt
    return adopt.adopt_of(rule.kind, alpha=rule.alpha, strength=rule.strength, delay=channel.delay, H=channel.H)


def draw_of(channel: Channel) -> Draw | None:
    """The random fragments of a channel."""
    from ray_diloco.outer.random_fragments import Draw

    f = channel.fragments
    return Draw(f.draw, f.p, channel.seed) if f.kind == "random" else None


# Keys of a `codec` section that each kind reads.
_READS: dict[str, tuple[str, ...]] = {
    "int8": ("block", "rounding", "seed"),
    "int4": ("block", "rounding", "seed"),
    "2bit": ("codebook",),
    "1bit": ("codebook",),
    "topk": ("block", "k", "values", "codebook", "rounding", "seed"),
    "mask": ("p", "block", "values", "seed"),
    "dct": ("block", "k", "values"),
    "low_rank": ("rank", "values"),
}


def _main_channel(config: Config) -> Channel:
    delay = main_delay(config)
    open_ended = is_free(config) or config.quorum.late == "carry" or config.quorum.kind == "at_least"
    # Who swaps in a fresh share of its own takes the others' of the round before.
    late = -(-delay // config.inner.H) + config.stale.own_fresh
    max_age = config.stale.max_age or (None if open_ended else late)
    return Channel(
        MAIN,
        PARAMETERS,
        config.inner.H,
        delay,
        config.schedule.spread,
        rounds_of(config),
        config.fragments,
        config.codec.up,
        config.codec.down,
        config.stale,
        config.merge,
        config.outer,
        config.adopt,
        max_age,
        config.topology.kind == "ring" and config.codec.up.kind != "fp32",
        len(island_names(config)),
        config.run.seed,
        is_free(config),
    )


def _side_channel(config: Config, name: str, row: ChannelConfig) -> Channel:
    delay = row.schedule.delay + row.schedule.lag * row.H
    return Channel(
        name,
        row.signal,
        row.H,
        delay,
        row.schedule.spread,
        config.run.rounds * config.inner.H // row.H,
        row.fragments,
        row.codec.up,
        row.codec.down,
        StaleConfig(),
        row.merge,
        row.outer,
        row.adopt,
        -(-delay // row.H),
        False,
        len(island_names(config)),
        config.run.seed,
    )


def _offsets(cut: Cut) -> tuple[int, ...]:
    from ray_diloco.outer.fragments import offsets

    return offsets(len(cut.fragments), cut.channel.H, cut.channel.spread)
