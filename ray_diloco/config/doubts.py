"""What runs and disappoints: combinations of blocks that are legal and known to train badly, a sentence each.

Sources of the numbers: algorithms.md §1 (gains), §4.2 (delay), §5.1 (momentum in asynchronous runs), §8 (robust merges,
codecs), §10.3; numbers.md, convergence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ray_diloco.config.rows import Row, fragment_count, rows
from ray_diloco.config.schema import Config
from ray_diloco.config.traits import ADOPT_TRAITS, CODEC_TRAITS, MERGE_TRAITS, OUTER_TRAITS

# Rounds of so many steps were measured to suffer from a merge that is a round late: 3.01 instead of 2.67 at 30.
_LONG_ROUND = 30
# DiLoCo found outer AdamW unstable unless eps is as large as 0.1; single gradients need none of that.
_SMALL_EPS = 1e-3


def doubts(config: Config) -> Iterator[str]:
    """Warnings about combinations, one sentence or two each."""
    for doubt in DOUBTS:
        yield from doubt(config)
    for row in rows(config):
        for row_doubt in ROW_DOUBTS:
            yield from row_doubt(config, row)


def _compounding(config: Config) -> Iterator[str]:
    outer, count = config.outer, config.islands.count
    if config.quorum.kind == "immediate" and OUTER_TRAITS[outer.kind].compounds and outer.lr * count > 1:
        yield (
            f"outer.kind={outer.kind} with quorum.kind=immediate counts its momentum once for each of {count} islands. "
            f"Take delayed_nesterov or ema_nesterov, or outer.lr near {0.7 / count:.2g}."
        )


def _buffered(config: Config) -> Iterator[str]:
    outer = config.outer
    buffer = outer.buffer or config.islands.count
    if outer.kind == "delayed_nesterov" and config.quorum.kind != "immediate" and buffer > 1:
        yield (
            f"outer.kind=delayed_nesterov moves its momentum every {buffer} rounds, and with quorum.kind="
            f"{config.quorum.kind} a round has many contributions already. Take outer.buffer=1, or nesterov."
        )


def _raw(config: Config) -> Iterator[str]:
    if config.inner.optimizer.name == "raw" and config.inner.H > 1:
        yield (
            f"inner.optimizer.name=raw goes the whole gradient in each of inner.H={config.inner.H} steps. "
            "It is meant for inner.H=1, where the outer optimiser has the learning rate."
        )


def _proximal(config: Config) -> Iterator[str]:
    if config.inner.correction == "fedprox" and config.inner.proximal == 0:
        yield "inner.correction=fedprox with inner.proximal=0 pulls at nothing. Give inner.proximal, for example 0.01."


def _fresh(config: Config) -> Iterator[str]:
    delay, lag = config.schedule.delay, config.schedule.lag
    if config.stale.own_fresh and (delay or lag):
        yield (
            f"stale.own_fresh=true takes others' shares a round late by itself; schedule.delay={delay} and "
            f"schedule.lag={lag} come on top, and the own share is not fresh any more."
        )


def _claims(config: Config) -> Iterator[str]:
    merge, weights = config.merge, config.quorum.weights
    traits = MERGE_TRAITS[merge.kind]
    if traits.robust and traits.reads_weights and weights != "uniform":
        yield (
            f"merge.kind={merge.kind} bears wrong contributions, but quorum.weights={weights} believes what islands "
            "say of their work. Take quorum.weights=uniform."
        )


def _late(config: Config, row: Row) -> Iterator[str]:
    fresh = config.stale.own_fresh and not row.at
    if row.schedule.lag and row.H >= _LONG_ROUND and not fresh:
        yield (
            f"{row.at}schedule.lag={row.schedule.lag} with rounds of {row.H} steps: a merge that is a round late cost "
            "0.3 nats where its authors measured it, 0.06 with a low outer.lr and 0.02 with stale.own_fresh=true."
        )


def _outgrown(config: Config, row: Row) -> Iterator[str]:
    inner = config.inner.schedule
    decays = inner.kind == "cosine" or (inner.kind == "wsd" and inner.decay_steps > 0)
    if row.schedule.adaptive != "none" and decays and not inner.total_steps:
        yield (
            f"{row.at}schedule.adaptive={row.schedule.adaptive}: rounds will not have inner.H={row.H} steps each, but "
            f"the inner rate falls as if there were {config.run.rounds * row.H} in all. Say inner.schedule.total_steps."
        )


def _mixed(config: Config, row: Row) -> Iterator[str]:
    overlap = row.schedule.delay + row.schedule.lag
    if row.adopt.kind == "mix" and row.adopt.alpha > 0 and not overlap and config.quorum.kind != "immediate":
        yield (
            f"{row.at}adopt.kind=mix with {row.at}schedule.delay=0 is elastic averaging: islands never agree. "
            "Streaming DiLoCo mixes because of the steps made while a fragment travels."
        )


def _kept(config: Config, row: Row) -> Iterator[str]:
    if ADOPT_TRAITS[row.adopt.kind].keeps_own and row.of_parameters and config.islands.count > 1:
        yield (
            f"{row.at}adopt.kind={row.adopt.kind}: the parameters of {config.islands.count} islands never meet, only "
            "their average does."
        )


def _rough(config: Config, row: Row) -> Iterator[str]:
    up = row.codec.up
    if CODEC_TRAITS[up.kind].needs_feedback and not up.feedback:
        yield (
            f"{row.at}codec.up.kind={up.kind} leaves out most of what an island learnt. Take "
            f"{row.at}codec.up.feedback=true, which sends it later."
        )


def _relayed(config: Config, row: Row) -> Iterator[str]:
    up = row.codec.up.kind
    if config.topology.kind == "hierarchy" and CODEC_TRAITS[up].needs_feedback:
        yield (
            f"{row.at}codec.up.kind={up} with topology.kind=hierarchy: a region's mean is coded once more, and what "
            "that leaves out is lost, with feedback or without. Take a codec of every element, such as int8 or int4."
        )


def _outvoted(config: Config, row: Row) -> Iterator[str]:
    traits = MERGE_TRAITS[row.merge.kind]
    by_element = traits.robust and (traits.scope == "element" or row.merge.kind == "bulyan")
    if by_element and CODEC_TRAITS[row.codec.up.kind].sparse:
        yield (
            f"{row.at}merge.kind={row.merge.kind} with {row.at}codec.up.kind={row.codec.up.kind}: most islands send "
            "nothing for an element, so what few send counts as an outlier."
        )


def _crowded(config: Config, row: Row) -> Iterator[str]:
    count, delay = fragment_count(config, row), row.schedule.delay
    if row.schedule.spread and count and config.quorum.kind == "all" and delay * count > row.H:
        yield (
            f"{row.at}schedule.delay={delay} is more than the {row.H / count:.3g} steps between two of {count} "
            "fragments: several travel at once, and links need room for them."
        )


def _trembling(config: Config, row: Row) -> Iterator[str]:
    if row.outer.kind == "adamw" and row.outer.eps < _SMALL_EPS and row.H > 1:
        yield (
            f"{row.at}outer.kind=adamw with {row.at}outer.eps={row.outer.eps:g} was found unstable on the differences "
            "of many steps. Take 0.1."
        )


def _unscaled(config: Config, row: Row) -> Iterator[str]:
    outer = row.outer
    if outer.kind == "lookahead_nesterov":
        gain = outer.lr + outer.momentum / (1 - outer.momentum)
        yield (
            f"{row.at}outer.kind=lookahead_nesterov does not scale its momentum by outer.lr: steady updates are "
            f"multiplied by {gain:.3g}, in nesterov by {outer.lr / (1 - outer.momentum):.3g}."
        )


DOUBTS: tuple[Callable[[Config], Iterator[str]], ...] = (_compounding, _buffered, _raw, _proximal, _fresh, _claims)
ROW_DOUBTS: tuple[Callable[[Config, Row], Iterator[str]], ...] = (
    _late, _outgrown, _mixed, _kept, _rough, _relayed, _outvoted, _crowded, _trembling, _unscaled,
)  # fmt: skip
