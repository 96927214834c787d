"""In-process islands, keeper, store and journal for the run loop, on quadratics in float64.

Island `m` minimises ½‖θ − centre_m‖² by SGD; its gradient depends on the blocks it was given, so a wrong lease changes
the numbers.  Faults are data: `faults[(island, incarnation, phase, round)]` raises there.  `rooms` says when there is
room for an island (always, where it is not named), and `script` what somebody asks of the run, and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ray_diloco.errors import InfeasibleError
from ray_diloco.observe.events import EVENTS
from ray_diloco.outer.schedule import Schedule
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.ports import (
    SHARED,
    BlockLoss,
    ContributionRefused,
    Emission,
    IslandLost,
    Piece,
    Prepared,
    Recovery,
    Report,
    Update,
)
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rendezvous import Quorum
from ray_diloco.rounds.rules import IslandPlan, Rules
from ray_diloco.simulate.clock import run_virtual

DIM = 3
LR = 0.1


def gradient(theta, island, virtual):
    """The gradient on one block."""
    centre = np.full(DIM, 1.0 + int(island[-1])) + 0.01 * (virtual % 17)
    return theta - centre


@dataclass
class World:
    names: tuple[str, ...] = ("i0", "i1")
    H: int = 4
    rounds: int = 5
    speed: dict[str, float] = field(default_factory=dict)
    lr: float = 0.7
    momentum: float = 0.9
    quorum: Quorum = field(default_factory=Quorum)
    min_islands: int = 1
    checkpoint_every: int = 1
    evaluate_every: int = 0
    heldout: tuple[int, ...] = ()
    faults: dict = field(default_factory=dict)
    overflows: set = field(default_factory=set)
    refuse: dict = field(default_factory=dict)
    launch_s: float = 1.0
    write_s: float = 0.5
    save_s: float = 0.0
    unwritable: set = field(default_factory=set)
    trace_s: float = 0.0
    owes_evaluation: bool = False
    max_losses: int = 6
    offsets: tuple[int, ...] = (0,)
    delay: int = 0
    stop_at: float | None = None
    rooms: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    script: list = field(default_factory=list)
    norms: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    reset: list = field(default_factory=list)
    changes: dict = field(default_factory=dict)
    every: int = 1
    points: dict = field(default_factory=dict)
    before: Callable[[Run], None] = lambda run: None
    # Filled while running.
    anchor: np.ndarray = field(default_factory=lambda: np.zeros(DIM))
    buffer: np.ndarray = field(default_factory=lambda: np.zeros(DIM))
    events: list = field(default_factory=list)
    times: list = field(default_factory=list)
    beginning: tuple | None = None
    manifests: list = field(default_factory=list)
    anchors: list = field(default_factory=list)
    evaluations: dict = field(default_factory=dict)
    trained: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    spare: dict = field(default_factory=dict)
    version: int = 0
    founded: bool = False
    position: Position | None = None

    # Fleet.
    def has_room(self, name):
        at = asyncio.get_running_loop().time()
        return name not in self.rooms or any(begin <= at < end for begin, end in self.rooms[name])

    async def room(self, name):
        while not self.has_room(name):
            await asyncio.sleep(1.0)

    async def launch(self, name, incarnation):
        await asyncio.sleep(self.launch_s)
        if not self.has_room(name):
            raise InfeasibleError(211, f"island {name} found no room", "wait")
        self.fault(name, incarnation, "launch", 0)
        return SimIsland(self, name, incarnation)

    async def retire(self, island):
        island.gone = True

    def fault(self, name, incarnation, phase, round_):
        if (name, incarnation, phase, round_) in self.faults:
            raise self.faults[name, incarnation, phase, round_]

    # Anchor.
    async def found(self, pieces):
        assert not self.founded
        self.founded = True
        self.anchor = pieces[0].handle.copy()
        self.anchors.append(self.anchor)

    async def prepare(self, step):
        await asyncio.sleep(0.01)
        (movement,) = step.movements
        for offer, _ in movement.contributions:
            if self.refuse.get((offer.island, self.version + 1)):
                raise ContributionRefused(offer.island, self.refuse[offer.island, self.version + 1], 405)
        assert step.version == self.version
        delta = sum(w * offer.emission.pieces[0].handle for offer, w in movement.contributions)
        u = self.momentum * self.buffer + delta
        a = self.anchor - self.lr * (delta + self.momentum * u)
        self.spare[step.key] = (a, u)
        update = Update(step.fragment, self.version + 1, (Piece(0, 8 * DIM, a),))
        return Prepared(step.key, {SHARED: update}, float(np.linalg.norm(a)), 0.0)

    async def commit(self, key):
        self.anchor, self.buffer = self.spare.pop(key)
        self.version += 1
        self.anchors.append(self.anchor)
        await asyncio.sleep(0.02)

    async def abort(self, key):
        self.spare.pop(key, None)

    async def current(self, island):
        return [Update(0, self.version, (Piece(0, 8 * DIM, self.anchor),))]

    async def published(self):
        return await self.current("")

    # Store.
    async def save(self, snapshot, inner, told):
        if snapshot.round in self.unwritable or any(
            begin <= asyncio.get_running_loop().time() < end for begin, end in self.rooms.get("disk", ())
        ):
            self.event("checkpoint_failed", round=snapshot.round)
            return False
        anchor, buffer = self.anchor.copy(), self.buffer.copy()
        entries = {name: await files for name, files in inner.items()}
        await told
        await asyncio.sleep(self.write_s)
        if snapshot.round:
            self.manifests.append((snapshot, anchor, buffer, entries))
        else:
            self.beginning = (snapshot, anchor, buffer, entries)
        self.event("checkpoint_written", round=snapshot.round)
        return True

    # Journal.
    def event(self, kind, **fields):
        assert kind in EVENTS or kind == "traced"
        self.events.append((kind, fields))
        self.times.append(asyncio.get_running_loop().time())

    def island_round(self, due, island, timing):
        self.metrics.append((due.round, island, timing))

    def committed(self, due, prepared, seconds, offers):
        self.event("round_committed", round=due.round, islands=[o.island for o, _ in offers])

    def evaluated(self, round_, losses):
        self.evaluations[round_] = losses

    async def trace(self, due, prepared, offers):
        await asyncio.sleep(self.trace_s)
        self.event("traced", round=due.round if due else 0)

    # Running.
    def rules(self):
        rules = {
            "islands": {name: IslandPlan("text", 2) for name in self.names},
            "schedule": Schedule(self.H, self.rounds, self.offsets, self.delay),
            "quorum": self.quorum,
            "weigh": lambda offers, ages, now: [o.tokens / sum(p.tokens for p in offers) for o in offers],
            "min_islands": self.min_islands,
            "checkpoint_every": self.checkpoint_every,
            "evaluate_every": self.evaluate_every,
            "evaluate_blocks": self.heldout,
            "final_blocks": self.heldout,
            "evaluate_chunk": 2,
            "max_losses": self.max_losses,
        }
        return Rules(**(rules | self.changes))

    def run(self, position=None):
        """Runs to the end on virtual time; returns the status."""
        self.position = position or Position()

        async def main():
            run = Run(self.rules(), self.position, self, self, self, self, self.owes_evaluation)
            self.before(run)
            loop = asyncio.get_running_loop()
            if self.stop_at is not None:
                loop.call_later(self.stop_at, run.stop)
            for at, act in self.script:
                loop.call_later(at, act, run)
            return await run.run()

        return run_virtual(main())

    def kinds(self, kind):
        return [fields for k, fields in self.events if k == kind]


class SimIsland:
    def __init__(self, world, name, incarnation):
        self.world, self.name, self.incarnation, self.region = world, name, incarnation, "here"
        self.restored = None
        self.theta = np.zeros(DIM)
        self.base = np.zeros(DIM)
        self.gone = False

    async def train(self, work):
        step_s = self.world.speed.get(self.name, 1.0)
        virtual = [v for r in work.lease.blocks for v in range(r.start, r.stop)]
        for s in range(work.done, work.steps):
            if work.bases is not None and s and s % self.world.every == 0:
                self.world.points[self.name] = (work, s, self.theta.copy(), self.base.copy())
            await asyncio.sleep(step_s)
            self.world.fault(self.name, self.incarnation, "train", work.segment)
            self.world.fault(self.name, self.incarnation, f"step {s}", work.segment)
            for v in virtual[2 * s : 2 * s + 2]:
                self.theta = self.theta - LR * gradient(self.theta, self.name, v) / 2
        self.world.trained.append((self.name, self.incarnation, work))
        loss = self.world.losses.get((self.name, self.incarnation, work.segment), float(np.sum(self.theta**2)))
        return Report(work.steps, 10 * len(virtual), loss, work.steps * step_s)

    async def recover(self, work, anchored):
        self.world.fault(self.name, self.incarnation, "recover", work.segment)
        if self.name not in self.world.points:
            return Recovery()
        await asyncio.sleep(0.1)
        mine, steps, theta, base = self.world.points[self.name]
        same = ("start_step", "steps", "bases")
        if any(getattr(mine, name) != getattr(work, name) for name in same) or mine.lease.blocks != work.lease.blocks:
            return Recovery(reason="other work")
        if anchored and not np.array_equal(base, self.base):
            return Recovery(reason="another anchor")
        if steps <= work.done:
            return Recovery(reason="no further")
        self.theta, self.base = theta.copy(), base.copy()
        return Recovery(steps)

    async def emit(self, fragment, base_version, round_):
        self.world.fault(self.name, self.incarnation, "emit", round_)
        delta = self.base - self.theta
        if (self.name, self.incarnation, round_) in self.world.overflows:
            delta = delta * np.inf
        norm = self.world.norms.get((self.name, self.incarnation, round_), float(np.linalg.norm(delta)))
        return Emission((Piece(0, 8 * DIM, delta),), norm, bool(np.isfinite(delta).all()))

    async def join(self, updates):
        await self.adopt(updates, {})

    async def adopt(self, updates, merged):
        await asyncio.sleep(0.05)
        for update in updates:
            self.world.fault(self.name, self.incarnation, "adopt", update.version)
            self.theta = update.pieces[0].handle.copy()
            self.base = self.theta.copy()

    async def reset(self):
        self.world.reset.append((self.name, self.incarnation))

    async def found(self):
        return [Piece(0, 8 * DIM, np.zeros(DIM))]

    async def evaluate(self, blocks, at):
        await asyncio.sleep(0.1)
        self.world.fault(self.name, self.incarnation, "evaluate", blocks[0])
        return [BlockLoss(b, float(np.sum(self.theta)) + b, 10) for b in blocks]

    async def save(self, round_, versions):
        self.world.fault(self.name, self.incarnation, "save", round_)
        await asyncio.sleep(self.world.save_s)

        async def written():
            await asyncio.sleep(0.3)
            if self.gone:
                return []
            return [f"inner-{self.name}-{round_}"]

        return asyncio.ensure_future(written())


def replay(world):
    """The anchors that the committed work must give: an independent direct loop over the lease of each commit."""
    committed = {(f["round"], name) for f in world.kinds("round_committed") for name in f["islands"]}
    anchor, u = np.zeros(DIM), np.zeros(DIM)
    anchors = [anchor]
    for round_ in range(1, world.rounds + 1):
        deltas, weights = [], []
        # An island that died before it could offer may have trained a segment twice; the second time counts.
        last = {name: work for name, _, work in world.trained if work.segment == round_}
        for name, work in sorted(last.items()):
            if (round_, name) in committed:
                theta = anchor.copy()
                virtual = [v for r in work.lease.blocks for v in range(r.start, r.stop)]
                for s in range(0, len(virtual), 2):
                    for v in virtual[s : s + 2]:
                        theta = theta - LR * gradient(theta, name, v) / 2
                deltas.append(anchor - theta)
                weights.append(len(virtual))
        if deltas:
            delta = sum(w / sum(weights) * d for w, d in zip(weights, deltas, strict=True))
            u = world.momentum * u + delta
            anchor = anchor - world.lr * (delta + world.momentum * u)
            anchors.append(anchor)
    return anchors


__all__ = ["DIM", "IslandLost", "World", "replay"]
