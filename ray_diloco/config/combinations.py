"""Which blocks go together: refuses what cannot mean what it says.

The rules are those of algorithms.md §10.3 and what else follows from the meaning of the blocks, said in terms of
`traits.py` and never of an algorithm's name, so that a method of one's own is held to them as well.  Secure aggregation
and differential privacy are no blocks yet; their rows are missing.  What runs and disappoints is in `doubts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ray_diloco.config.blocks import CodecConfig, OuterConfig
from ray_diloco.config.rows import Row, fewest, fragment_count, rows
from ray_diloco.config.schema import Config
from ray_diloco.config.traits import (
    ADOPT_TRAITS,
    CODEC_TRAITS,
    DENSE_CODECS,
    MERGE_TRAITS,
    OUTER_TRAITS,
)
from ray_diloco.errors import ConfigError

Refusals = Iterator[ConfigError]


def check_combinations(config: Config) -> None:
    """Refuses blocks that do not go together.

    Raises:
      ConfigError: 132–148; see docs/errors.md.
    """
    for rule in RULES:
        for refusal in rule(config):
            raise refusal
    for row in rows(config):
        for row_rule in ROW_RULES:
            for refusal in row_rule(config, row):
                raise refusal


# Rules of the run


def _alone(config: Config) -> Refusals:
    if config.topology.kind == "none" and config.islands.count > 1:
        yield ConfigError(
            132,
            f"topology.kind=none is one island alone, but islands.count={config.islands.count}",
            "set islands.count=1, or topology.kind=star",
        )


def _anchors(config: Config) -> Refusals:
    topology, stale = config.topology, config.stale
    if topology.anchors == "per_island":
        if topology.kind in ("ring", "hierarchy"):
            yield ConfigError(
                133,
                f"topology.kind={topology.kind} makes one sum for all islands, but topology.anchors=per_island",
                "set topology.anchors=shared, or topology.kind=star or pairs",
            )
        if config.quorum.kind == "immediate":
            yield ConfigError(
                133,
                "topology.anchors=per_island with quorum.kind=immediate: each island would only ever hear itself",
                "set topology.anchors=shared, or quorum.kind=all or at_least",
            )
        if stale.own_fresh and topology.kind == "pairs":
            yield ConfigError(
                133,
                "stale.own_fresh=true hears all islands, topology.kind=pairs one",
                "set topology.kind=star, or stale.own_fresh=false",
            )
        return
    wanting = {
        "topology.kind=pairs": topology.kind == "pairs",
        "stale.own_fresh=true": stale.own_fresh,
    } | {f"{row.at}merge.consensus={row.merge.consensus:g}": row.merge.consensus > 0 for row in rows(config)}
    for setting in (setting for setting, is_set in wanting.items() if is_set):
        yield ConfigError(
            133,
            f"{setting} needs an anchor for each island, but topology.anchors=shared",
            "set topology.anchors=per_island",
        )


def _immediate(config: Config) -> Refusals:
    quorum = config.quorum
    if quorum.kind != "immediate":
        return
    waiting = {
        f"quorum.deadline_s={quorum.deadline_s:g}": quorum.deadline_s > 0,
        f"quorum.grace_s={quorum.grace_s:g}": quorum.grace_s > 0,
        f"quorum.fraction={quorum.fraction:g}": quorum.fraction > 0,
        f"topology.kind={config.topology.kind}": config.topology.kind in ("ring", "hierarchy", "pairs"),
        "stale.own_fresh=true": config.stale.own_fresh,
    }
    for setting in (setting for setting, is_set in waiting.items() if is_set):
        yield ConfigError(
            140,
            f"quorum.kind=immediate merges each contribution alone, but {setting} waits for others",
            "take that setting back, or set quorum.kind=all or at_least",
        )


def _corrections(config: Config) -> Refusals:
    inner = config.inner
    controls = [name for name, channel in config.channels.items() if channel.signal == "control"]
    if inner.correction == "scaffold" and (inner.optimizer.name != "sgd" or inner.optimizer.momentum > 0):
        yield ConfigError(
            142,
            f"inner.correction=scaffold takes the way of a round for the sum of its gradients, which it is not with "
            f"inner.optimizer.name={inner.optimizer.name} and momentum={inner.optimizer.momentum:g}",
            "set inner.optimizer.name=sgd and inner.optimizer.momentum=0",
        )
    if inner.correction == "scaffold" and len(controls) != 1:
        yield ConfigError(
            142,
            f"inner.correction=scaffold needs one channel with signal control; there are {len(controls)}",
            "set channels.control.signal=control, as conf/algorithm/scaffold.yaml does",
        )
    for name in controls:
        if inner.correction != "scaffold":
            yield ConfigError(
                142,
                f"channels.{name}.signal=control, but inner.correction={inner.correction} has no control variates",
                "set inner.correction=scaffold, or signal=parameters",
            )
        if config.channels[name].H != inner.H:
            yield ConfigError(
                142,
                f"channels.{name}.H={config.channels[name].H}: controls change once in a round of inner.H={inner.H}",
                f"set channels.{name}.H={inner.H}",
            )
    if inner.correction != "none" and inner.zero_stage > 0 and inner.clip > 0:
        yield ConfigError(
            142,
            f"inner.correction={inner.correction} with inner.zero_stage={inner.zero_stage} and inner.clip="
            f"{inner.clip:g}: DeepSpeed clips gradients before they can be corrected",
            "set inner.clip=0, or inner.zero_stage=0",
        )


def _work(config: Config) -> Refusals:
    if config.inner.work == "by_speed" and config.inner.round_seconds > 0:
        yield ConfigError(
            143,
            f"inner.work=by_speed and inner.round_seconds={config.inner.round_seconds:g} both say how many steps an "
            "island takes",
            "set inner.round_seconds=0, or inner.work=fixed",
        )


def _eager(config: Config) -> Refusals:
    if config.stale.own_fresh and config.merge.kind != "mean":
        yield ConfigError(
            146,
            f"stale.own_fresh=true exchanges one share of a mean, but merge.kind={config.merge.kind} has no shares",
            "set merge.kind=mean",
        )


# Rules of each row


def _ring(config: Config, row: Row) -> Refusals:
    """Sums travel, coded anew at each hop: nobody sees a contribution, and no sender knows what became of its own."""
    if config.topology.kind != "ring":
        return
    stale, codec = config.stale, row.codec.up
    single = {
        f"{row.at}merge.kind={row.merge.kind}": MERGE_TRAITS[row.merge.kind].needs_individuals,
        "stale.direction=true": stale.direction,
        "stale.reanchor=true": stale.reanchor,
        "stale.own_fresh=true": stale.own_fresh,
        f"{row.at}codec.up.kind={codec.kind}": codec.kind not in DENSE_CODECS,
        f"{row.at}codec.up.feedback=true": codec.feedback,
    }
    for setting in (setting for setting, is_set in single.items() if is_set):
        yield ConfigError(
            134,
            f"{setting} needs each island's contribution, but in topology.kind=ring only sums travel",
            "set topology.kind=star",
        )


def _relays(config: Config, row: Row) -> Refusals:
    """A region sends one plain mean, measured from one version and coded once more, by elements."""
    if config.topology.kind != "hierarchy":
        return
    up = row.codec.up.kind
    single = {
        f"{row.at}codec.up.kind={up}": CODEC_TRAITS[up].whole_tensors,
        f"{row.at}merge.kind={row.merge.kind}": row.merge.kind == "mean_over_senders",
        "quorum.late=carry": config.quorum.late == "carry",
        "stale.direction=true": config.stale.direction,
    }
    for setting in (setting for setting, is_set in single.items() if is_set):
        yield ConfigError(
            147,
            f"{setting} needs each island's contribution, but in topology.kind=hierarchy a region sends one mean",
            "set topology.kind=star",
        )


def _enough(config: Config, row: Row) -> Refusals:
    merge = row.merge
    least, come = MERGE_TRAITS[merge.kind].least(merge), fewest(config)
    if come is not None and come < least:
        yield ConfigError(
            136,
            f"{row.at}merge.kind={merge.kind} with byzantine={merge.byzantine}, trim={merge.trim}, keep={merge.keep} "
            f"needs {least} contributions, but a round may have {come}",
            f"raise islands.count or the quorum to {least}, or lower merge.byzantine, trim and keep",
        )


def _scope(config: Config, row: Row) -> Refusals:
    scope, kind = MERGE_TRAITS[row.merge.kind].scope, row.fragments.kind
    by_tensor = {f"{row.at}merge.kind={row.merge.kind}": scope == "tensor"}
    if not row.at:
        by_tensor["stale.direction=true"] = config.stale.direction
    if scope == "whole" and kind != "whole":
        yield ConfigError(
            135,
            f"{row.at}merge.kind={row.merge.kind} judges a contribution as a whole, but {row.at}fragments.kind={kind} "
            "lets it be good in one part and bad in another",
            f"set {row.at}fragments.kind=whole, or a rule by element (median, trimmed_mean)",
        )
    for setting in (setting for setting, is_set in by_tensor.items() if is_set and kind == "random"):
        yield ConfigError(
            135,
            f"{setting} looks at the direction of whole tensors, but {row.at}fragments.kind=random sends scattered "
            "elements",
            f"set {row.at}fragments.kind=whole, layers or bins",
        )


def _down(config: Config, row: Row) -> Refusals:
    down = row.codec.down
    if not CODEC_TRAITS[down.kind].for_parameters:
        fitting = ", ".join(name for name, traits in CODEC_TRAITS.items() if traits.for_parameters)
        yield ConfigError(
            137,
            f"{row.at}codec.down.kind={down.kind} is for differences, which are small and centred; an anchor is not",
            f"use one of {fitting}",
        )
    if down.feedback:
        yield ConfigError(
            137,
            f"{row.at}codec.down.feedback=true: an anchor is sent whole each time, there is nothing to make up for",
            f"set {row.at}codec.down.feedback=false",
        )


def _parameters(config: Config, row: Row) -> Refusals:
    yield from _codec_parameters(f"{row.at}codec.up", row.codec.up, row.outer)
    yield from _codec_parameters(f"{row.at}codec.down", row.codec.down, row.outer)


def _codec_parameters(at: str, codec: CodecConfig, outer: OuterConfig) -> Refusals:
    traits = CODEC_TRAITS[codec.kind]
    largest, block = traits.largest_block, codec.block
    if largest and (block > largest or (not traits.whole_tensors and block & (block - 1))):
        yield ConfigError(
            138,
            f"{at}.block={block} does not fit {at}.kind={codec.kind}",
            f"use {'1' if traits.whole_tensors else 'a power of two'} up to {largest}, or 0 for the codec's own",
        )
    if codec.kind == "topk" and codec.k > (block or 4096):
        yield ConfigError(
            138,
            f"{at}.k={codec.k} is more than the {block or 4096} elements of a chunk",
            f"lower {at}.k, or raise {at}.block",
        )
    if codec.kind in ("topk", "mask", "low_rank", "dct"):
        fitting = (*DENSE_CODECS, "sign") if codec.kind == "dct" else DENSE_CODECS
        if codec.values not in fitting:
            yield ConfigError(
                138, f"{at}.kind={codec.kind} has no values {codec.values}", f"use one of {', '.join(fitting)}"
            )
        if codec.values == "sign" and outer.kind != "sign":
            yield ConfigError(
                138,
                f"{at}.values=sign sends no sizes, but outer.kind={outer.kind} needs them",
                f"set outer.kind=sign, or {at}.values=fp32",
            )


def _scattered(config: Config, row: Row) -> Refusals:
    if row.fragments.kind != "random":
        return
    up, lag, quorum = row.codec.up, row.schedule.lag, config.quorum
    older = (
        (lag > 0, f"{row.at}schedule.lag={lag}", f"set {row.at}schedule.lag=0; {row.at}schedule.delay hides less"),
        (quorum.kind == "immediate", "quorum.kind=immediate", "set quorum.kind=all or at_least"),
        (quorum.late == "carry", "quorum.late=carry", "set quorum.late=drop"),
    )
    for _, setting, mend in filter(lambda one: one[0], older):
        yield ConfigError(
            139,
            f"{setting} merges contributions into a newer version than they were measured from, but "
            f"{row.at}fragments.kind=random draws other elements for each version",
            mend,
        )
    if CODEC_TRAITS[up.kind].whole_tensors:
        yield ConfigError(
            139,
            f"{row.at}codec.up.kind={up.kind} works on whole tensors, but {row.at}fragments.kind=random does not",
            f"set {row.at}fragments.kind=whole, layers or bins",
        )


def _turns(config: Config, row: Row) -> Refusals:
    schedule, count = row.schedule, fragment_count(config, row)
    H = "inner.H" if not row.at else f"{row.at}H"
    if schedule.delay >= row.H:
        yield ConfigError(
            141,
            f"{row.at}schedule.delay={schedule.delay} is not less than a round of {H}={row.H} steps",
            f"lower it, or count whole rounds with {row.at}schedule.lag",
        )
    if schedule.spread and count is not None and count > row.H:
        yield ConfigError(
            141,
            f"{count} fragments cannot take turns in {H}={row.H} steps",
            f"raise {H}, make fewer fragments, or set {row.at}schedule.spread=false",
        )


def _pace(config: Config, row: Row) -> Refusals:
    schedule, at = row.schedule, f"{row.at}schedule"
    wanted = [f"{at}.adaptive={schedule.adaptive}"] * (schedule.adaptive != "none")
    wanted += [f"{at}.priority=true"] * schedule.priority
    for setting in wanted:
        if row.at or config.channels:
            yield ConfigError(
                148,
                f"{setting} lays out rounds as the run goes; channels ({', '.join(config.channels)}) count fixed ones",
                f"set {setting.partition('=')[0]} to its default, or leave out the channels",
            )
        if config.quorum.kind == "immediate":
            yield ConfigError(
                148,
                f"{setting} lays out rounds for all islands, but with quorum.kind=immediate each goes at its own pace",
                "set quorum.kind=all or at_least; inner.work=by_speed adapts the steps of single islands",
            )
    if schedule.priority and not (schedule.spread and row.fragments.kind in ("layers", "bins")):
        yield ConfigError(
            148,
            f"{at}.priority=true orders fragments that take turns, and there are none",
            f"set {at}.spread=true and {row.at}fragments.kind=layers or bins",
        )
    if schedule.adaptive == "rate" and not (schedule.growth and schedule.most):
        yield ConfigError(
            148,
            f"{at}.adaptive=rate needs more than {at}.growth={schedule.growth:g} and {at}.most={schedule.most}: "
            "a round has (growth / inner learning rate)² steps, without bound where that rate falls to nothing",
            f"give {at}.growth a few times inner.lr, and {at}.most steps",
        )
    if schedule.adaptive != "none" and 0 < schedule.most < schedule.least:
        yield ConfigError(
            148,
            f"{at}.most={schedule.most} is less than {at}.least={schedule.least}",
            f"raise {at}.most, or set it to 0 for no limit",
        )


def _buffer(config: Config, row: Row) -> Refusals:
    outer = row.outer
    buffer = outer.buffer or config.islands.count
    if outer.kind == "delayed_nesterov" and outer.c > 1 / buffer:
        yield ConfigError(
            144,
            f"{row.at}outer.c={outer.c:g} is more than 1/{buffer}: contributions would bring more than the momentum",
            f"give {row.at}outer.c from 0 to {1 / buffer:g}",
        )


def _momentum(config: Config, row: Row) -> Refusals:
    wanting = {f"{row.at}adopt.kind={row.adopt.kind}": ADOPT_TRAITS[row.adopt.kind].reads_outer_state}
    if not row.at:
        wanting["stale.direction=true"] = config.stale.direction
    for setting in (setting for setting, is_set in wanting.items() if is_set):
        if not OUTER_TRAITS[row.outer.kind].momentum:
            fitting = ", ".join(name for name, traits in OUTER_TRAITS.items() if traits.momentum)
            yield ConfigError(
                145,
                f"{setting} needs an outer momentum, but {row.at}outer.kind={row.outer.kind} keeps none",
                f"use one of {fitting}",
            )


RULES: tuple[Callable[[Config], Refusals], ...] = (
    _alone, _anchors, _immediate, _corrections, _work, _eager,
)  # fmt: skip
ROW_RULES: tuple[Callable[[Config, Row], Refusals], ...] = (
    _ring, _relays, _enough, _scope, _down, _parameters, _scattered, _turns, _pace, _buffer, _momentum,
)  # fmt: skip
