"""Every warning of a combination of blocks, and the neighbours that it spares."""

import pytest

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose

QUIET = ("outer.momentum=0.5", "run.rounds=100")

WARNED = {
    "momentum that compounds": (["quorum.kind=immediate", "islands.count=4"], "once for each of 4 islands", "0.17"),
    "a momentum that moves too rarely": (["outer.kind=delayed_nesterov"], "every 2 rounds", "outer.buffer=1"),
    "raw gradients in a row": (["inner.optimizer.name=raw", "inner.H=5"], "inner.H=5", "inner.H=1"),
    "a pull of no strength": (["inner.correction=fedprox"], "inner.proximal=0", "0.01"),
    "own shares that are late": (
        ["topology.anchors=per_island", "stale.own_fresh=true", "schedule.delay=3"], "schedule.delay=3", "not fresh",
    ),
    "belief in what attackers say": (
        ["merge.kind=geometric_median", "merge.byzantine=1", "islands.count=3"], "quorum.weights=tokens", "uniform",
    ),
    "a merge that is late": (["schedule.lag=1", "inner.H=30"], "schedule.lag=1 with rounds of 30 steps", "own_fresh"),
    "a decay that ends elsewhere": (
        ["schedule.adaptive=loss", "inner.schedule.kind=cosine"], "schedule.adaptive=loss", "total_steps",
    ),
    "a mix without delay": (["adopt.kind=mix"], "schedule.delay=0", "elastic averaging"),
    "islands that never meet": (["adopt.kind=keep"], "of 2 islands never meet", "average"),
    "few values and no feedback": (["codec.up.kind=topk"], "codec.up.kind=topk", "codec.up.feedback=true"),
    "two bits and no feedback in a channel": (
        ["channels.fast.codec.up.kind=2bit"],
        "channels.fast.codec.up.kind=2bit", "channels.fast.codec.up.feedback=true",
    ),
    "a mean whose loss nobody remembers": (
        ["topology.kind=hierarchy", "codec.up.kind=2bit", "codec.up.feedback=true"], "coded once more", "int8",
    ),
    "few senders outvoted": (
        ["merge.kind=median", "codec.up.kind=topk", "codec.up.feedback=true"], "merge.kind=median", "outlier",
    ),
    "links that are never free": (
        ["fragments.kind=bins", "inner.H=48", "schedule.spread=true", "schedule.delay=3"],
        "more than the 2 steps", "24",
    ),
    "an unstable outer adamw": (["outer.kind=adamw", "outer.eps=1e-8"], "outer.eps=1e-08", "0.1"),
    "a momentum without a rate": (["outer.kind=lookahead_nesterov", "outer.momentum=0.9"], "by 9.7", "by 7"),
}  # fmt: skip

SPARED = {
    "the defaults": [],
    "momentum at a rate for many": ["quorum.kind=immediate", "islands.count=4", "outer.lr=0.175"],
    "momentum that is an average": ["quorum.kind=immediate", "outer.kind=ema_nesterov"],
    "a momentum that moves once for all": ["quorum.kind=immediate", "outer.kind=delayed_nesterov"],
    "raw gradients one at a time": ["inner.optimizer.name=raw", "inner.H=1"],
    "weights that no island claims": [
        "merge.kind=geometric_median", "merge.byzantine=1", "islands.count=3", "quorum.weights=uniform",
    ],
    "weights that a rule does not read": ["merge.kind=trimmed_mean", "merge.byzantine=1", "islands.count=3"],
    "a short round that is late": ["schedule.lag=1", "inner.H=5"],
    "own shares": ["topology.anchors=per_island", "stale.own_fresh=true"],
    "a mix after a delay": ["adopt.kind=mix", "schedule.delay=1"],
    "one island that keeps its own": ["adopt.kind=keep", "islands.count=1", "topology.kind=none"],
    "few values and feedback": ["codec.up.kind=topk", "codec.up.feedback=true", "merge.kind=mean_over_senders"],
    "one fragment at a time": ["fragments.kind=bins", "inner.H=48", "schedule.spread=true", "schedule.delay=2"],
    "outer adamw as it was found stable": ["outer.kind=adamw"],
}  # fmt: skip


@pytest.mark.parametrize("what", WARNED)
def test_what_is_known_to_disappoint_is_warned_of(what: str) -> None:
    arguments, *words = WARNED[what]
    warnings = check(compose([*QUIET, *arguments]).config)
    assert len(warnings) == 1, warnings
    for word in words:
        assert word in warnings[0]


@pytest.mark.parametrize("what", SPARED)
def test_its_sound_neighbours_are_not(what: str) -> None:
    assert check(compose([*QUIET, *SPARED[what]]).config) == []
