"""Methods with the blocks that change the run loop, as arguments, and what a finished run satisfies."""

from quadratics import TOKENS

PLAIN = ("inner.clip=0", "inner.lr=0.05", "inner.schedule.warmup_steps=3")
THREE = ("islands.count=3", *PLAIN)
STREAMING = ("algorithm=streaming", *THREE, "codec.up.kind=fp32", "inner.H=4", "run.rounds=6")
DELAYED = ("algorithm=delayed", *THREE, "inner.H=3", "run.rounds=7")
ASYNC = ("algorithm=async_nesterov", *THREE, "inner.H=3", "run.rounds=6", "outer.lr=0.2")
DYLU = ("algorithm=async_dn_dylu", *THREE, "inner.H=6", "run.rounds=6")
EAGER = ("algorithm=eager", *THREE, "inner.H=3", "run.rounds=6")
NOLOCO = ("algorithm=noloco", *THREE, "inner.H=3", "run.rounds=6")
DECOUPLED = ("algorithm=decoupled", *THREE, "codec.up.kind=fp32", "inner.H=9", "run.rounds=4")
NESTED = ("algorithm=sparta_diloco", *THREE, "channels.sparta.fragments.p=0.25", "inner.H=4", "run.rounds=5")
SCAFFOLD = ("algorithm=scaffold", *THREE, "inner.H=3", "channels.control.H=3", "run.rounds=6")
SPARSE = ("algorithm=sparseloco", *THREE, "codec.up.values=fp32", "codec.up.block=9", "codec.up.k=2", "inner.H=3")
# Every third step of what is drawn, a part of it, and the rest of that later.
DRAWN = ("algorithm=sparta", *THREE, "fragments.p=0.3", "codec.up.kind=topk", "codec.up.block=4", "codec.up.k=1",
         "codec.up.feedback=true", "inner.H=3", "run.rounds=7")  # fmt: skip
REBASED = (*STREAMING, "adopt.kind=rebase", "schedule.delay=2")
BY_CHANGE = (*REBASED, "fragments.kind=layers", "fragments.size=1", "schedule.priority=true", "inner.H=6")
SHORTER = (*DELAYED, "inner.H=5", "schedule.adaptive=loss", "schedule.least=2")
LONGER = (
    *STREAMING,
    "schedule.adaptive=rate",
    "schedule.growth=0.1",
    "schedule.most=9",
    "inner.schedule.warmup_steps=0",
)
LONGER += ("inner.schedule.kind=cosine", "inner.schedule.total_steps=40")
SPEEDS = {"i0": 1.0, "i1": 1.7, "i2": 2.9}

IN_STEP = {
    "streaming": STREAMING,
    "rebased": REBASED,
    "delayed": DELAYED,
    "two rounds late": (*DELAYED, "schedule.lag=2"),
    "three rounds late": (*DELAYED, "schedule.lag=3", "run.rounds=9"),
    "more than a round late": (*DELAYED, "schedule.delay=2", "adopt.kind=rebase"),
    "fragments two rounds late": (*DELAYED, "schedule.lag=2", "fragments.kind=layers", "fragments.size=2"),
    "sparse and two rounds late": (*SPARSE, "schedule.lag=2"),
    "two rounds late, own anchors": (*NOLOCO, "schedule.lag=2", "run.rounds=8"),
    "delayed fragments": (*DELAYED, "fragments.kind=layers", "fragments.size=2"),
    "decoupled": DECOUPLED,
    "nested": NESTED,
    "scaffold": SCAFFOLD,
    "sparse": SPARSE,
    "sparse and delayed": (*SPARSE, "schedule.lag=1"),
    "drawn": DRAWN,
    "noloco": NOLOCO,
    "by change": BY_CHANGE,
    "shorter": SHORTER,
    "longer": LONGER,
    "eager": EAGER,
}
AT_OWN_PACE = {
    "async": ASYNC,
    "dylu": DYLU,
    "heloco": ("algorithm=heloco", *ASYNC[1:]),
    "easgd": ("algorithm=easgd", *ASYNC[1:]),
}
ALL = IN_STEP | AT_OWN_PACE


def books(world):
    """Credited blocks, after a check that each was trained, and that all that were issued are accounted for."""
    (ledger,) = world.position.ledgers.values()
    assert ledger.balanced()
    credited = {v for r in ledger.credited for v in range(r.start, r.stop)}
    assert credited <= {v for name in world.names for step in world.steps_of(name) for v in step}
    assert world.position.tokens == TOKENS * len(credited)
    assert sum(tally.tokens for tally in world.position.tallies.values()) == world.position.tokens
    return credited


def finished(world):
    """Runs to the end, where nothing is left in anybody's hands."""
    assert world.run() == "finished"
    books(world)
    (ledger,) = world.position.ledgers.values()
    assert ledger.in_flight == 0
    assert not world.keeper.spare
    return world


def state_of(world):
    """Everything that a run leaves behind, but for what islands remember."""
    kept = world.keeper.kept
    return (
        {key: (one.version, one.anchor.tolist(), [s.tolist() for s in one.state]) for key, one in kept.items()},
        {name: ledger.to_json() for name, ledger in world.position.ledgers.items()},
        (world.position.round, world.position.step, world.position.tokens),
    )
