"""Every refusal of a combination of blocks, with the values that it names and the way out that it offers."""

import pytest

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.errors import ConfigError

EAGER = ("topology.anchors=per_island", "stale.own_fresh=true")
ASYNC = ("quorum.kind=immediate", "outer.kind=ema_nesterov")
SCAFFOLD = ("algorithm=scaffold",)

REFUSED = {
    "one island alone that is several": (132, ["topology.kind=none"], "islands.count=2", "islands.count=1"),
    "pairs with one anchor": (133, ["topology.kind=pairs"], "topology.kind=pairs", "per_island"),
    "own shares with one anchor": (133, ["stale.own_fresh=true"], "stale.own_fresh=true", "per_island"),
    "a pull between anchors where there is one": (133, ["merge.consensus=0.7"], "merge.consensus=0.7", "per_island"),
    "a pull in a channel where there is one anchor": (
        133, ["channels.fast.merge.consensus=0.5"], "channels.fast.merge.consensus=0.5", "per_island",
    ),
    "many anchors in a ring": (133, [EAGER[0], "topology.kind=ring"], "topology.kind=ring", "anchors=shared"),
    "many anchors in a hierarchy": (133, [EAGER[0], "topology.kind=hierarchy"], "hierarchy", "anchors=shared"),
    "own shares in pairs": (133, [*EAGER, "topology.kind=pairs"], "stale.own_fresh=true", "topology.kind=star"),
    "islands that only hear themselves": (133, [*ASYNC, EAGER[0]], "quorum.kind=immediate", "quorum.kind=all"),
    "a robust merge in a ring": (134, ["topology.kind=ring", "merge.kind=median"], "merge.kind=median", "star"),
    "directions of single islands in a ring": (134, ["topology.kind=ring", "merge.kind=rda"], "merge.kind=rda", "star"),
    "bases of single islands in a ring": (134, ["topology.kind=ring", "stale.reanchor=true"], "reanchor", "star"),
    "correction by direction in a ring": (134, ["topology.kind=ring", "stale.direction=true"], "direction", "star"),
    "few values in a ring": (134, ["topology.kind=ring", "codec.up.kind=topk"], "codec.up.kind=topk", "star"),
    "tensors with their shape in a ring": (134, ["topology.kind=ring", "codec.up.kind=low_rank"], "low_rank", "star"),
    "feedback in a ring": (134, ["topology.kind=ring", "codec.up.feedback=true"], "codec.up.feedback=true", "star"),
    "a whole judged by its parts": (
        135, ["merge.kind=krum", "islands.count=3", "fragments.kind=bins"], "fragments.kind=bins", "median",
    ),
    "directions of scattered elements": (
        135, ["merge.kind=rda", "fragments.kind=random"], "merge.kind=rda", "fragments.kind=whole",
    ),
    "a correction by direction of scattered elements": (
        135, ["stale.direction=true", "fragments.kind=random"], "stale.direction=true", "fragments.kind=whole",
    ),
    "too few islands for krum": (
        136, ["merge.kind=krum", "merge.byzantine=1", "islands.count=4"],
        "needs 5 contributions, but a round may have 4",
        "to 5",
    ),
    "too few islands for bulyan": (
        136, ["merge.kind=bulyan", "merge.byzantine=1", "islands.count=6"], "needs 7", "to 7",
    ),
    "a quorum too small for krum": (
        136, ["merge.kind=krum", "islands.count=8", "quorum.kind=at_least", "quorum.n=2"],
        "may have 2", "the quorum to 3",
    ),
    "a part of the islands too small for krum": (
        136, ["merge.kind=krum", "islands.count=8", "quorum.kind=at_least", "quorum.fraction=0.2"],
        "may have 2", "to 3",
    ),
    "more kept by multi-krum than are good": (
        136, ["merge.kind=multi_krum", "merge.byzantine=1", "merge.keep=5", "islands.count=5"], "keep=5", "keep",
    ),
    "more trimmed than there are": (
        136, ["merge.kind=trimmed_mean", "merge.trim=2", "islands.count=4"], "trim=2", "to 5",
    ),
    "a robust merge of one contribution": (
        136, [*ASYNC, "merge.kind=median", "merge.byzantine=1", "islands.count=9"], "may have 1", "to 3",
    ),
    "a robust merge in pairs": (
        136, [EAGER[0], "topology.kind=pairs", "merge.kind=krum", "islands.count=8"], "may have 2", "to 3",
    ),
    "a robust merge of a channel": (
        136, ["channels.fast.merge.kind=krum"], "channels.fast.merge.kind=krum", "to 3",
    ),
    "an anchor in four bits": (137, ["codec.down.kind=e3m0"], "codec.down.kind=e3m0", "fp32, bf16, fp16, int8"),
    "an anchor whose outliers are cut": (137, ["codec.down.kind=int8_bin_mean"], "int8_bin_mean", "int8"),
    "a few values of an anchor": (137, ["codec.down.kind=topk"], "codec.down.kind=topk", "bf16"),
    "feedback on the way down": (137, ["codec.down.feedback=true"], "codec.down.feedback=true", "=false"),
    "an anchor of a channel in two bits": (
        137, ["channels.fast.codec.down.kind=2bit"], "channels.fast.codec.down.kind=2bit", "bf16",
    ),
    "a block that no pass is cut into": (
        138, ["codec.up.kind=int8", "codec.up.block=1000"],
        "block=1000", "power of two",
    ),
    "a block longer than a pass": (138, ["codec.up.kind=topk", "codec.up.block=524288"], "block=524288", "262144"),
    "a tile that is too wide": (138, ["codec.up.kind=dct", "codec.up.block=512"], "block=512", "256"),
    "more kept than there are": (138, ["codec.up.kind=topk", "codec.up.k=5000"], "k=5000", "lower codec.up.k"),
    "more kept than a block has": (
        138, ["codec.up.kind=topk", "codec.up.block=64", "codec.up.k=65"], "the 64 elements", "raise codec.up.block",
    ),
    "signs of chosen elements": (138, ["codec.up.kind=topk", "codec.up.values=sign"], "values sign", "2bit"),
    "signs for an optimiser that wants sizes": (
        138, ["codec.up.kind=dct", "codec.up.values=sign"], "outer.kind=nesterov", "outer.kind=sign",
    ),
    "elements drawn for a version that is over": (
        139, ["fragments.kind=random", "schedule.lag=1"], "schedule.lag=1", "schedule.lag=0",
    ),
    "elements of a channel drawn for a version that is over": (
        139, ["channels.fast.fragments.kind=random", "channels.fast.schedule.lag=1"],
        "channels.fast.schedule.lag=1", "channels.fast.schedule.lag=0",
    ),
    "drawn elements that come too late": (
        139, ["fragments.kind=random", "quorum.kind=at_least", "quorum.n=2", "quorum.late=carry"],
        "quorum.late=carry", "late=drop",
    ),
    "drawn elements at an own pace": (
        139, [*ASYNC, "fragments.kind=random"], "quorum.kind=immediate", "at_least",
    ),
    "a transform of scattered elements": (
        139, ["fragments.kind=random", "codec.up.kind=dct"], "codec.up.kind=dct", "fragments.kind=whole",
    ),
    "a round whose deadline nobody shares": (140, [*ASYNC, "quorum.deadline_s=5"], "quorum.deadline_s=5", "at_least"),
    "grace for nobody": (140, [*ASYNC, "quorum.grace_s=5"], "quorum.grace_s=5", "at_least"),
    "a part of one": (140, [*ASYNC, "quorum.fraction=0.5"], "quorum.fraction=0.5", "at_least"),
    "a ring of one": (140, [*ASYNC, "topology.kind=ring"], "topology.kind=ring", "quorum.kind=all"),
    "a region of one": (140, [*ASYNC, "topology.kind=hierarchy"], "topology.kind=hierarchy", "quorum.kind=all"),
    "a delay longer than a round": (141, ["inner.H=10", "schedule.delay=10"], "inner.H=10", "schedule.lag"),
    "a delay longer than a round of a channel": (
        141, ["channels.fast.schedule.delay=1"], "channels.fast.H=1", "channels.fast.schedule.lag",
    ),
    "more turns than steps": (
        141, ["inner.H=20", "fragments.kind=bins", "schedule.spread=true"], "24 fragments", "raise inner.H",
    ),
    "more layers than steps": (
        141, ["inner.H=2", "fragments.kind=layers", "fragments.size=1", "schedule.spread=true"], "3 fragments", "raise",
    ),
    "a pace beside channels": (
        148, [*SCAFFOLD, "schedule.adaptive=loss"], "channels (control)", "schedule.adaptive to its default",
    ),
    "a pace of a channel": (148, ["channels.fast.schedule.adaptive=loss"], "fast.schedule.adaptive", "leave out"),
    "a pace for islands that have their own": (148, [*ASYNC, "schedule.adaptive=loss"], "own pace", "by_speed"),
    "an order of one": (148, ["schedule.priority=true"], "schedule.priority=true", "schedule.spread=true"),
    "an order of fragments that go together": (
        148, ["schedule.priority=true", "fragments.kind=bins"], "take turns", "schedule.spread=true",
    ),
    "growth of nothing": (148, ["schedule.adaptive=rate", "schedule.most=9"], "schedule.growth=0", "times inner.lr"),
    "growth without bound": (148, ["schedule.adaptive=rate", "schedule.growth=1"], "schedule.most=0", "most steps"),
    "bounds that cross": (
        148, ["schedule.adaptive=loss", "schedule.least=9", "schedule.most=5"], "most=5", "raise schedule.most",
    ),
    "controls with adamw": (142, [*SCAFFOLD, "inner.optimizer.name=adamw"], "name=adamw", "inner.optimizer.name=sgd"),
    "controls with momentum": (142, [*SCAFFOLD, "inner.optimizer.momentum=0.9"], "momentum=0.9", "momentum=0"),
    "controls that nobody sends": (
        142, ["algorithm=local_sgd", "inner.correction=scaffold"], "there are 0", "channels.control.signal=control",
    ),
    "controls that nobody has": (142, [*SCAFFOLD, "inner.correction=none"], "channels.control", "correction=scaffold"),
    "controls out of step": (142, [*SCAFFOLD, "inner.H=20"], "channels.control.H=50", "channels.control.H=20"),
    "corrections after clipping": (
        142, ["inner.correction=fedprox", "inner.proximal=0.1", "inner.zero_stage=1"], "inner.clip=1", "inner.clip=0",
    ),
    "two who say how many steps": (
        143, ["inner.work=by_speed", "inner.round_seconds=60"], "inner.round_seconds=60", "inner.work=fixed",
    ),
    "more momentum than there is": (
        144, ["outer.kind=delayed_nesterov", "outer.buffer=4", "outer.c=0.3", *ASYNC[:1]], "outer.c=0.3", "0 to 0.25",
    ),
    "more momentum than the islands have": (
        144, ["outer.kind=delayed_nesterov", "outer.c=0.6", *ASYNC[:1]], "more than 1/2", "0 to 0.5",
    ),
    "looking ahead without momentum": (
        145, ["adopt.kind=lookahead", "outer.kind=sgd"], "outer.kind=sgd", "ema_nesterov",
    ),
    "a direction to compare with that there is not": (
        145, ["stale.direction=true", "outer.kind=adamw"], "stale.direction=true", "ema_nesterov",
    ),
    "tensors with their shape in a hierarchy": (
        147, ["topology.kind=hierarchy", "codec.up.kind=dct"], "codec.up.kind=dct", "topology.kind=star",
    ),
    "senders counted in a hierarchy": (
        147, ["topology.kind=hierarchy", "merge.kind=mean_over_senders"], "mean_over_senders", "topology.kind=star",
    ),
    "ages mixed in a hierarchy": (
        147, ["topology.kind=hierarchy", "quorum.late=carry"], "quorum.late=carry", "topology.kind=star",
    ),
    "islands turned in a hierarchy": (
        147, ["topology.kind=hierarchy", "stale.direction=true"], "stale.direction=true", "topology.kind=star",
    ),
    "own shares of what has no shares": (
        146, [*EAGER, "merge.kind=median"], "merge.kind=median", "merge.kind=mean",
    ),
}  # fmt: skip

ACCEPTED = {
    "one island alone": ["topology.kind=none", "islands.count=1"],
    "own shares": list(EAGER),
    "anchors of one's own that all hear": [EAGER[0]],
    "a ring with codecs of every element": ["topology.kind=ring", "codec.up.kind=int4"],
    "a rule by element over fragments": ["merge.kind=median", "fragments.kind=bins", "inner.H=24"],
    "directions of whole tensors": ["merge.kind=rda", "fragments.kind=layers"],
    "as many islands as krum needs": ["merge.kind=krum", "merge.byzantine=1", "islands.count=5"],
    "an anchor in eight bits": ["codec.down.kind=int8"],
    "a block that divides a pass": ["codec.up.kind=int8", "codec.up.block=1024"],
    "coefficients in four bits": ["codec.up.kind=dct", "codec.up.values=int4"],
    "an odd tile": ["codec.up.kind=dct", "codec.up.block=48"],
    "signs for who only looks at signs": ["codec.up.kind=dct", "codec.up.values=sign", "outer.kind=sign"],
    "feedback on a random mask": ["codec.up.kind=mask", "codec.up.feedback=true"],
    "a delay just below a round": ["inner.H=10", "schedule.delay=9"],
    "as many turns as steps": ["inner.H=24", "fragments.kind=bins", "schedule.spread=true"],
    "turns by change": ["inner.H=24", "fragments.kind=bins", "schedule.spread=true", "schedule.priority=true"],
    "rounds that grow": ["schedule.adaptive=rate", "schedule.growth=0.01", "schedule.most=500"],
    "together, more fragments than steps": ["inner.H=2", "fragments.kind=bins"],
    "a correction that clips nothing": ["inner.correction=fedprox", "inner.zero_stage=1", "inner.clip=0"],
    "keys that the kind does not read": ["fragments.count=1000", "merge.byzantine=9", "outer.c=1", "codec.up.k=9999"],
    "a robust merge whose regions decide": ["topology.kind=hierarchy", "merge.kind=krum", "merge.byzantine=3"],
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_combination_that_cannot_mean_what_it_says_is_refused(what: str) -> None:
    number, arguments, values, mend = REFUSED[what]
    config = compose(arguments).config
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.number == number, str(caught.value)
    assert values in caught.value.what
    assert mend in caught.value.mend


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_looks_alike_and_is_sound_passes(what: str) -> None:
    check(compose(ACCEPTED[what]).config)


def test_layers_of_a_model_that_is_not_read_yet_are_not_counted() -> None:
    turns = ["inner.H=2", "fragments.kind=layers", "fragments.size=1", "schedule.spread=true"]
    check(compose([*turns, "model.pretrained=some/model"]).config)


def test_a_robust_overlay_is_refused_over_a_method_that_merges_one_at_a_time() -> None:
    config = compose(["algorithm=heloco", "overlay=robust", "islands.count=8"]).config
    with pytest.raises(ConfigError, match="a round may have 1"):
        check(config)


@pytest.mark.parametrize("algorithm", ["diloco", "fedavg", "slowmo", "streaming", "muloco", "sparta_diloco"])
def test_a_robust_overlay_lies_over_a_method_whose_rounds_wait(algorithm: str) -> None:
    config = compose([f"algorithm={algorithm}", "overlay=robust", "islands.count=3"]).config
    check(config)
    assert (config.merge.kind, config.merge.byzantine, config.quorum.weights) == ("trimmed_mean", 1, "uniform")
    assert config.overlay.name == "robust"
