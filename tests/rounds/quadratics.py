"""Islands and keepers in float64 on heterogeneous quadratics, built from a configuration as the cluster builds its own.

Island `m` minimises ½(θ − c_m)ᵀ A_m (θ − c_m) over a few named tensors; a block shifts `c_m`, so that a wrong lease
changes the numbers.  Rules, recipes, rules of adoption and inner optimisers are those of the package; what travels are
float64 tensors, so that whole runs can be compared with a few lines of numpy.  Faults are data:
`faults[(island, incarnation, phase, n)]` raises in the n-th call of that phase.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ray_diloco.blocks import (
    CONTROL,
    adopt_of,
    anchor_names,
    channels_of,
    cuts_of,
    draw_of,
    feedback_of,
    is_exact,
    is_free,
    quorum_of,
    recipe_of,
    schedule_of,
    topology_of,
    weigher_of,
)
from ray_diloco.config.compose import compose
from ray_diloco.config.schema import island_names
from ray_diloco.inner.corrections import next_control
from ray_diloco.inner.optimizer import OPTIMIZERS
from ray_diloco.inner.schedule import learning_rate_factor
from ray_diloco.outer.adopt import AdoptChunk
from ray_diloco.outer.exchange import OVERWRITE
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.merge import factors_of
from ray_diloco.outer.sources import Decoded
from ray_diloco.outer.step import AVERAGE, Arrays, NotFinite, OuterStep, Span
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.ports import (
    SHARED,
    BlockLoss,
    ContributionRefused,
    Emission,
    IslandLost,
    Piece,
    Prepared,
    Report,
    Snapshot,
    Update,
)
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import IslandPlan, Rules
from ray_diloco.simulate.clock import run_virtual

BLOCKS = [(f"model.layers.{k}.{name}", shape) for k in range(4) for name, shape in (("w", (2, 2)), ("norm", (2,)))]
SHAPES = [("model.embed_tokens.weight", (2, 3)), *BLOCKS, ("lm_head.weight", (2, 3))]
LAYOUT = layout_of(SHAPES)
DIM = LAYOUT.numel
# 1 where weight decay applies: tensors of two or more dimensions.
DECAYED = np.concatenate([np.full(math.prod(shape), float(len(shape) > 1)) for _, shape in SHAPES])
TOKENS = 10
PER_STEP = 2


def _problem(name):
    rng = np.random.default_rng(1000 + int(name[1:]))
    root = rng.standard_normal((DIM, DIM)) / math.sqrt(DIM)
    return np.eye(DIM) / 2 + root @ root.T, rng.standard_normal(DIM) + 1.0


_PROBLEMS = {f"i{k}": _problem(f"i{k}") for k in range(6)}
_SHIFT = np.random.default_rng(7).standard_normal(DIM)
START = np.random.default_rng(8).standard_normal(DIM)


def gradient(theta, name, blocks):
    """The gradient of an island on some blocks, float64 [DIM]."""
    matrix, centre = _PROBLEMS[name]
    shift = np.mean([(block % 17 - 8) / 50 for block in blocks])
    return matrix @ (theta - centre - shift * _SHIFT)


def held_out(theta, block):
    """The loss of a held-out block: that of all islands together."""
    return block + sum(0.5 * (theta - c) @ A @ (theta - c) for A, c in _PROBLEMS.values())


def indices(ranges):
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges])


# Codecs in float64: what the bytes would say of a vector.


def cosines(n):
    """The orthonormal DCT-II of n values as a matrix."""
    k, x = np.arange(n)[:, None], np.arange(n)[None, :]
    matrix = math.sqrt(2 / n) * np.cos(math.pi * (2 * x + 1) * k / (2 * n))
    matrix[0] /= math.sqrt(2)
    return torch.from_numpy(matrix)


def tiles(shape, block):
    """Height and width of a tile of a tensor."""
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape
    return rows, columns, *(max(d for d in range(1, block + 1) if n % d == 0) for n in (rows, columns))


def largest(rows, k):
    """Rows in which all but the `k` largest of each are 0."""
    at = rows.abs().topk(min(k, rows.shape[1]), dim=1).indices
    return torch.zeros_like(rows).scatter_(1, at, rows.gather(1, at))


@dataclass
class Dct:
    """Whole tensors as cosine coefficients of tiles, tile after tile."""

    block: int
    k: int

    def each(self, values, number, do):
        at = 0
        for spec in [s for s in LAYOUT.tensors if s.range.numel and number(s)]:
            do(values[at : at + spec.numel], *tiles(spec.shape, self.block))
            at += spec.numel

    def transform(self, values, number):
        def one(part, rows, columns, high, wide):
            cut = part.view(rows // high, high, columns // wide, wide).transpose(1, 2)
            part.copy_((cosines(high) @ (cut @ cosines(wide).T)).reshape(-1))

        self.each(out := values.clone(), number, one)
        return out

    def inverse(self, values, number):
        def one(part, rows, columns, high, wide):
            cut = part.clone().view(rows // high, columns // wide, high, wide)
            back = cosines(high).T @ (cut @ cosines(wide))
            part.view(rows // high, high, columns // wide, wide).copy_(back.transpose(1, 2))

        self.each(out := values.clone(), number, one)
        return out

    def kept(self, coefficients, number):
        def one(part, rows, columns, high, wide):
            part.copy_(largest(part.view(-1, high * wide).clone(), self.k).view(-1))

        self.each(out := coefficients.clone(), number, one)
        return out


@dataclass
class TopK:
    """The `k` largest of each run of `block` elements."""

    block: int
    k: int

    def kept(self, values):
        out = values.clone()
        for start in range(0, len(out), self.block):
            part = out[start : start + self.block]
            part.copy_(largest(part.view(1, -1).clone(), self.k).view(-1))
        return out


@dataclass
class Kept:
    """One anchor of one fragment."""

    where: torch.Tensor
    spans: tuple[Span, ...]
    anchor: torch.Tensor
    state: list[torch.Tensor]
    sent: torch.Tensor
    version: int = 0
    past: dict[int, torch.Tensor] = field(default_factory=dict)


class Keeper:
    """The anchor port: as many anchors as the configuration asks for, in float64."""

    def __init__(self, world):
        self.world = world
        self.recipes = [recipe_of(channel) for channel in world.channels]
        self.draws = [draw_of(channel) for channel in world.channels]
        self.kept: dict[tuple[int, str], Kept] = {}
        self.founded = False
        self.spare: dict[str, tuple[int, dict[str, Kept]]] = {}
        self.rooms = [(torch.empty(DIM).double(), torch.empty(DIM).double()) for _ in range(40)]

    def channel(self, fragment):
        return next(k for k, cut in enumerate(self.world.cuts) if fragment in cut.numbers)

    def names(self, k):
        return self.world.anchors if k == 0 else (SHARED,)

    def of(self, fragment, name):
        return self.kept[fragment, name if self.channel(fragment) == 0 else SHARED]

    async def found(self, pieces):
        assert not self.founded
        self.founded = True
        whole = pieces[0].handle
        for k, cut in enumerate(self.world.cuts):
            for number, ranges in zip(cut.numbers, cut.fragments, strict=True):
                where = indices(ranges)
                start = torch.zeros(len(where)).double() if cut.channel.signal == CONTROL else whole[where]
                state = [torch.full((len(where),), initial).double() for initial in self.recipes[k].initials]
                spans, at = [], 0
                for spec in LAYOUT.tensors:
                    if spec.offset in where:
                        spans.append(Span(spec.name, at, at + spec.numel))
                        at += spec.numel
                assert at == len(where)
                if AVERAGE in self.recipes[k].state_names:
                    state[self.recipes[k].state_names.index(AVERAGE)] = start.clone()
                for name in self.names(k):
                    clones = [one.clone() for one in state]
                    self.kept[number, name] = Kept(where, tuple(spans), start.clone(), clones, start.clone())

    async def prepare(self, step):
        assert self.world.alive
        await asyncio.sleep(self.world.merge_s)
        for movement in step.movements:
            for offer, _ in movement.contributions:
                if (offer.island, offer.round) in self.world.refuse:
                    raise ContributionRefused(offer.island, "refused by the test")
        self.world.movements[step.fragment, step.round] = {
            m.anchor: [(offer.island, offer.round, factor) for offer, factor in m.contributions] for m in step.movements
        }
        moved, updates, norms = {}, {}, []
        for movement in step.movements:
            moved[movement.anchor], norm, sent = self.move(step, movement)
            norms.append(norm)
            piece = Piece(0, 8 * len(sent[1]), sent)
            updates[movement.anchor] = Update(step.fragment, step.version + 1, (piece,), step.round)
        assert step.key not in self.spare
        self.spare[step.key] = (step.fragment, moved)
        return Prepared(step.key, updates, math.sqrt(math.fsum(norms) / len(norms)), 0.0)

    def move(self, step, movement):
        """An anchor after a movement: what is kept, its squared norm, and what is sent."""
        k = self.channel(step.fragment)
        recipe, draw, kept = self.recipes[k], self.draws[k], self.of(step.fragment, movement.anchor)
        assert kept.version == step.version
        new = copy.deepcopy(kept)
        new.version += 1
        if not movement.contributions:
            return new, float(kept.anchor @ kept.anchor), (None, new.sent)
        at = torch.arange(len(kept.where))
        if draw is not None:
            at = torch.from_numpy(draw.of(kept.version).packed(self.world.ranges[step.fragment]))
        bases = []
        for offer, _ in movement.contributions:
            age = kept.version - offer.base_version
            if age < 0 or (recipe.max_age is not None and age > recipe.max_age) or (draw is not None and age):
                raise ContributionRefused(offer.island, f"measured {age} versions ago")
            late = recipe.reanchor and age > 0
            bases.append(kept.past[offer.base_version][at] if late else None)
        values = [offer.emission.pieces[0].handle for offer, _ in movement.contributions]
        factors = [factor for _, factor in movement.contributions]
        moved, states = torch.empty(len(at)).double(), [torch.empty(len(at)).double() for _ in kept.state]
        sent = torch.empty(len(at)).double()

        def put(start, chunk):
            sent[start : start + len(chunk)] = chunk

        arrays = Arrays(kept.anchor[at], [one[at] for one in kept.state], moved, states, put)
        near = [self.of(step.fragment, name).anchor[at] for name in movement.neighbours] if recipe.consensus else []
        codec, number = self.world.codecs[k], self.world.number(step.fragment)
        delta, sources = None, [Decoded(one) for one in values]
        if isinstance(codec, Dct):
            combined = torch.empty(len(at)).double()
            recipe.rule.bind(recipe.settings)(values, factors, combined)
            delta, sources = codec.inverse(combined, number), []

        def outer_step(factors):
            return OuterStep(
                recipe,
                arrays,
                kept.version,
                factors,
                sources,
                bases=bases if sources else (),
                neighbours=[Decoded(one) for one in near],
                own=movement.neighbours.index(movement.anchor) if near else 0,
                spans=kept.spans if draw is None else (),
                delta=delta,
                rooms=self.rooms,
            )

        try:
            if recipe.rule.needs_whole_vector:
                gram = outer_step(factors).gram(recipe.rule.extras)
                factors = factors_of(recipe.rule, gram, factors, recipe.settings)
            outer_step(factors).run()
        except NotFinite:
            bad = [not bool(torch.isfinite(one).all()) for one in values]
            raise ContributionRefused(movement.contributions[bad.index(True)][0].island, "not finite") from None
        new.anchor[at] = moved
        for one, after in zip(new.state, states, strict=True):
            one[at] = after
        new.sent = new.anchor.clone() if draw is not None else sent
        if recipe.reanchor:
            new.past[kept.version] = kept.anchor
        return new, float(new.anchor @ new.anchor), (kept.where[at], sent)

    async def commit(self, key):
        fragment, moved = self.spare.pop(key)
        k = self.channel(fragment)
        for name, new in moved.items():
            self.kept[fragment, name] = new
        if self.world.channels[k].signal != CONTROL:
            for j in range(1, len(self.world.cuts)):
                if (k == 0 or j < k) and self.world.channels[j].signal != CONTROL:
                    self.rewrite(j, self.kept[fragment, SHARED])
        self.world.anchors_after.append((fragment, {name: new.anchor.numpy().copy() for name, new in moved.items()}))
        await asyncio.sleep(self.world.commit_s)

    def rewrite(self, j, slower):
        """A faster channel goes on from what a slower one has moved to."""
        flat = dict(zip(slower.where.tolist(), slower.anchor.tolist(), strict=True))
        for number in self.world.cuts[j].numbers:
            kept = self.kept[number, SHARED]
            for place, element in enumerate(kept.where.tolist()):
                if element in flat:
                    kept.anchor[place] = kept.sent[place] = flat[element]

    async def abort(self, key):
        self.spare.pop(key, None)

    async def current(self, island):
        name = SHARED if self.world.anchors == (SHARED,) else island
        found = []
        for number in range(self.world.fragments):
            kept = self.of(number, name)
            found.append(Update(number, kept.version, (Piece(0, 8 * len(kept.sent), (kept.where, kept.sent)),)))
        await asyncio.sleep(0.001)
        return found

    async def published(self):
        whole = torch.from_numpy(self.model())
        return [Update(0, 0, (Piece(0, 8 * DIM, (torch.arange(DIM), whole)),))]

    def model(self):
        """What is evaluated: the mean of anchors, or the average of outer iterates."""
        recipe, whole = self.recipes[0], np.zeros(DIM)
        for number in self.world.cuts[0].numbers:
            for name in self.world.anchors:
                kept = self.kept[number, name]
                values = kept.anchor
                if recipe.average.count(kept.version) > 0:
                    values = kept.state[recipe.state_names.index(AVERAGE)]
                whole[kept.where] += values.numpy() / len(self.world.anchors)
        return whole


@dataclass
class Saved:
    """A durable commit."""

    snapshot: Snapshot
    kept: dict[tuple[int, str], Kept]
    inner: dict[str, Any]


class World:
    """A run.  `settings` are arguments of the command line.

    Args:
      speed: seconds per step by island.
      faults, refuse: what goes wrong; see the module and `Keeper.prepare`.
      saved: commits to go on from.
      stop_at: virtual seconds after which the run is asked to stop.
      shards: blocks that each island may train on.
      tape: who opened a segment and who was committed, in order, for a run at their own pace to follow.
    """

    def __init__(
        self,
        *settings,
        speed=None,
        faults=None,
        refuse=(),
        saved=(),
        stop_at=None,
        shards=None,
        tape=None,
        heldout=(),
        launch_s=None,
        merge_s=0.01,
        commit_s=0.02,
        write_s=0.5,
        owes_evaluation=False,
        rules=None,
    ):
        self.config = compose([*settings]).config
        self.channels = channels_of(self.config)
        self.cuts = cuts_of(self.channels, LAYOUT)
        self.names = island_names(self.config)
        self.anchors = anchor_names(self.config)
        self.fragments = sum(len(cut.numbers) for cut in self.cuts)
        self.ranges = {n: r for cut in self.cuts for n, r in zip(cut.numbers, cut.fragments, strict=True)}
        self.codecs = [_codec(channel) for channel in self.channels]
        self.speed, self.faults, self.refuse = speed or {}, faults or {}, set(refuse)
        self.saved: list[Saved] = list(saved)
        self.began = len(self.saved)
        self.stop_at, self.shards, self.tape = stop_at, shards or {}, tape
        self.heldout, self.launch_s = heldout, launch_s or {}
        self.merge_s, self.commit_s, self.write_s = merge_s, commit_s, write_s
        self.owes_evaluation, self.changes = owes_evaluation, rules or {}
        self.keeper = Keeper(self)
        self.events: list[dict[str, Any]] = []
        self.evaluations: dict[int, list[BlockLoss]] = {}
        # By island: (incarnation, segment, blocks of each step).
        self.trained: defaultdict[str, list[tuple[int, int, list[list[int]]]]] = defaultdict(list)
        self.movements: dict[tuple[int, int], Any] = {}
        self.anchors_after: list[tuple[int, dict[str, np.ndarray]]] = []
        self.islands: dict[str, QuadraticIsland] = {}
        self.credits: Counter[int] = Counter()
        self.metrics: list[Any] = []
        self.alive = True
        self.position = Position()
        self._cursor, self._turn = 0, asyncio.Event()

    def number(self, fragment):
        """Says of a tensor whether it is in a fragment."""
        where = set(indices(self.ranges[fragment]).tolist())
        return lambda spec: spec.offset in where

    def steps_of(self, name):
        """The blocks of each step of an island, in the order in which it trained."""
        return [blocks for _, _, steps in self.trained[name] for blocks in steps]

    def kinds(self, *kinds):
        return [event for event in self.events if event["event"] in kinds]

    def merged(self, fragment=None):
        """Islands of each committed round of the main channel, in order."""
        last = len(self.cuts[0].numbers) - 1 if fragment is None else fragment
        found = self.kinds("round_committed", "fragment_committed")
        return [event["islands"] for event in found if event["fragment"] == last]

    @property
    def model(self):
        return self.keeper.model()

    # Fleet.
    async def launch(self, name, incarnation):
        await asyncio.sleep(self.launch_s.get((name, incarnation), self.launch_s.get(name, 1.0)))
        island = QuadraticIsland(self, name, incarnation)
        island.fault("launch")
        holds = [one for one in self.saved if one.inner.get(name)]
        if holds:
            (state,) = holds[-1].inner[name]
            island.load(state, parameters=holds[-1] is self.saved[-1])
        self.islands[name] = island
        return island

    async def retire(self, island):
        island.gone = True

    # Store.
    async def save(self, snapshot, inner, told):
        kept = copy.deepcopy(self.keeper.kept)
        for (fragment, _), one in kept.items():
            assert one.version == snapshot.versions[fragment]
        entries = {name: await files for name, files in inner.items()}
        await told
        await asyncio.sleep(self.write_s)
        self.saved.append(Saved(copy.deepcopy(snapshot), kept, entries))
        self.event("checkpoint_written", round=snapshot.round)

    # Journal.
    def event(self, kind, **fields):
        self.events.append({"t": asyncio.get_running_loop().time(), "event": kind, **fields})
        if kind in ("round_opened", "round_committed"):
            self._cursor += 1
            self._turn.set()
            self._turn = asyncio.Event()

    def island_round(self, due, island, timing):
        self.metrics.append((due.round, island, timing))

    def committed(self, due, prepared, seconds, offers):
        main = len(self.cuts[0].numbers)
        self.event(
            "round_committed" if due.fragment == main - 1 else "fragment_committed",
            round=due.round,
            fragment=due.fragment,
            version=prepared.version,
            islands=[offer.island for offer, _ in offers],
            rounds=[offer.round for offer, _ in offers],
            weights=[weight for _, weight in offers],
            steps=[offer.steps for offer, _ in offers],
            tokens=self.position.tokens,
        )

    def evaluated(self, round_, losses):
        assert round_ not in self.evaluations
        self.evaluations[round_] = losses
        self.event("evaluation", round=round_, loss=math.fsum(loss.nats for loss in losses))

    async def trace(self, due, prepared, offers):
        pass

    # A run at their own pace in the order of a tape.
    async def my_turn(self, kind, island):
        while self.tape is not None and self._cursor < len(self.tape) and self.tape[self._cursor] != (kind, island):
            await self._turn.wait()

    @property
    def order(self):
        """The tape of this run: see `my_turn`."""
        found = self.kinds("round_opened", "round_committed")
        return [(event["event"], island) for event in found for island in event["islands"]]

    # Running.
    def rules(self):
        config = self.config
        each = len(self.names) if is_free(config) else 1
        rules = {
            "islands": {name: IslandPlan("text", PER_STEP) for name in self.names},
            "schedule": schedule_of(config, self.cuts, self.position.hold(config.inner.H)),
            "quorum": quorum_of(config),
            "weigh": weigher_of(config, self.cuts, self.shards),
            "topology": topology_of(config),
            "remembers": config.stale.own_fresh,
            "max_age": config.stale.max_age,
            "free": is_free(config),
            "by_speed": config.inner.work == "by_speed",
            "round_s": config.inner.round_seconds,
            "exact": is_exact(config),
            "min_islands": config.islands.min,
            "checkpoint_every": config.checkpoint.every * each,
            "evaluate_every": config.evaluate.every * each if self.heldout else 0,
            "evaluate_blocks": self.heldout,
            "final_blocks": self.heldout,
            "evaluate_chunk": 2,
            "max_losses": config.deadlines.losses,
        }
        return Rules(**(rules | self.changes))

    def run(self):
        """Runs to the end on virtual time; returns the status."""
        if self.saved:
            snapshot = self.saved[-1].snapshot
            self.position = Position.resume(
                snapshot.round,
                snapshot.step,
                snapshot.versions,
                json.loads(json.dumps(snapshot.ledgers)),
                json.loads(json.dumps(snapshot.counters)),
            )
            self.keeper.kept, self.keeper.founded = copy.deepcopy(self.saved[-1].kept), True

        async def main():
            run = Run(self.rules(), self.position, self, self.keeper, self, self, self.owes_evaluation)
            if self.stop_at is not None:
                asyncio.get_running_loop().call_later(self.stop_at, run.stop)
            return await run.run()

        return run_virtual(main())

    def resumed(self, *settings, **changes):
        """A world that goes on from the newest commit of this one."""
        return World(*settings, saved=self.saved, speed=self.speed, **changes)


class _Model(torch.nn.Module):
    """Parameters that are views of one flat float64 tensor."""

    def __init__(self, theta):
        super().__init__()
        self.tensors = torch.nn.ParameterList(
            torch.nn.Parameter(theta[spec.offset : spec.offset + spec.numel].view(spec.shape))
            for spec in LAYOUT.tensors
        )


class QuadraticIsland:
    """An island of one rank."""

    def __init__(self, world, name, incarnation):
        self.world, self.name, self.incarnation, self.region = world, name, incarnation, "here"
        self.restored = None
        self.gone = False
        self.calls = Counter()
        inner = world.config.inner
        self.theta = torch.from_numpy(START.copy())
        self.model = _Model(self.theta)
        kind = OPTIMIZERS[inner.optimizer.name]
        self.optimizer = kind.build(self.model, inner)
        self.scheduled, self.base_lr = kind.scheduled, kind.base_lr(inner)
        self.rate_sum = 0.0
        self.own = torch.zeros(DIM).double()
        n = len(world.channels)
        self.live = [self.own if channel.signal == CONTROL else self.theta for channel in world.channels]
        self.base, self.error, self.emitted, self.kept = (torch.zeros(n, DIM).double() for _ in range(4))
        self.unheard: dict[int, deque] = {}
        self.rules = [adopt_of(channel) for channel in world.channels]
        self.feedbacks = [feedback_of(channel) for channel in world.channels]
        self.draws = [draw_of(channel) for channel in world.channels]

    def fault(self, phase):
        self.calls[phase] += 1
        error = self.world.faults.get((self.name, self.incarnation, phase, self.calls[phase]))
        if error is not None:
            raise error

    async def train(self, work):
        self.fault("train")
        inner, world = self.world.config.inner, self.world
        step_s = world.speed.get(self.name, 1.0)
        step_s = 0.0 if world.tape is not None else step_s
        blocks = [v for r in work.lease.blocks for v in range(r.start, r.stop)]
        total_steps = inner.schedule.total_steps or world.config.run.rounds * inner.H
        done, losses = [], []
        for s in range(work.steps):
            if work.seconds and s and s * step_s >= work.seconds:
                break
            await asyncio.sleep(step_s)
            self.fault("step")
            mine = blocks[PER_STEP * s : PER_STEP * (s + 1)]
            factor = learning_rate_factor(inner.schedule, work.start_step + s, total_steps) if self.scheduled else 1.0
            point = inner.mix * self.base[0] + (1 - inner.mix) * self.theta if inner.mix else self.theta
            g = torch.from_numpy(gradient(point.numpy(), self.name, mine))
            losses.append(held_out(self.theta.numpy(), 0))
            if inner.correction == "fedprox":
                g += inner.proximal * (self.theta - self.base[0])
            elif inner.correction == "scaffold":
                g += self.kept[self.control] - self.own
            if inner.clip > 0:
                g *= min(1.0, inner.clip / (float(g.norm()) + 1e-6))
            for group in self.optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            for spec, parameter in zip(LAYOUT.tensors, self.model.tensors, strict=True):
                parameter.grad = g[spec.offset : spec.offset + spec.numel].view(spec.shape)
            self.optimizer.step()
            self.rate_sum += self.base_lr * factor
            done.append(mine)
        world.trained[self.name].append((self.incarnation, work.segment, done))
        tokens = TOKENS * PER_STEP * len(done)
        if not world.tape:
            return Report(len(done), tokens, float(np.mean(losses)), len(done) * step_s)
        return Report(len(done), tokens, float(np.mean(losses)), len(done) * world.speed.get(self.name, 1.0))

    @property
    def control(self):
        return next(k for k, channel in enumerate(self.world.channels) if channel.signal == CONTROL)

    async def emit(self, fragment, base_version, round_):
        self.fault("emit")
        await self.world.my_turn("round_committed", self.name)
        k = self.world.keeper.channel(fragment)
        where, draw, feedback = indices(self.world.ranges[fragment]), self.draws[k], self.feedbacks[k]
        if self.world.channels[k].signal == CONTROL:
            moved = next_control(self.own, self.kept[k], self.base[0], self.theta, self.rate_sum)
            self.own.copy_(moved)
        self.emitted[k][where] = self.live[k][where]
        if draw is not None:
            where = torch.from_numpy(draw.of(base_version).positions(self.world.ranges[fragment]).copy())
        delta = said = self.base[k][where] - self.live[k][where]
        norm, codec, number = float(delta.norm()), self.world.codecs[k], self.world.number(fragment)
        if feedback is not None:
            delta = feedback.decay * self.error[k][where] + feedback.scale * delta
        sent = delta
        if isinstance(codec, Dct):
            sent = codec.kept(codec.transform(delta, number), number)
            said = codec.inverse(sent, number)
        elif isinstance(codec, TopK):
            said = sent = codec.kept(delta)
        else:
            said = sent
        if feedback is not None:
            self.error[k][where] = delta - said
            self.unheard.setdefault(fragment, deque()).append((where, said))
        return Emission((Piece(0, 8 * len(sent), sent.clone()),), norm, math.isfinite(norm))

    async def adopt(self, updates, merged):
        self.fault("adopt")
        await asyncio.sleep(0.05 if self.world.tape is None else 0.0)
        for update in updates:
            k = self.world.keeper.channel(update.fragment)
            if self.unheard.get(update.fragment):
                where, said = self.unheard[update.fragment].popleft()
                if not merged.get(update.fragment, False):
                    self.error[k][where] += said
            self.take(k, update, self.rules[k])
            if self.world.channels[k].signal != CONTROL:
                for j in range(1, len(self.world.channels)):
                    if (k == 0 or j < k) and self.world.channels[j].signal != CONTROL:
                        all_of = indices(self.world.ranges[update.fragment])
                        self.base[j][all_of] = self.theta[all_of]
                if k == 0:
                    self.rate_sum = 0.0
        await self.world.my_turn("round_opened", self.name)

    def take(self, k, update, rule):
        where, values = update.pieces[0].handle
        where = indices(self.world.ranges[update.fragment]) if where is None else where
        chunk = AdoptChunk(
            self.live[k][where].clone(), self.base[k][where].clone(), values, self.emitted[k][where].clone()
        )
        rule.apply(chunk)
        self.live[k][where], self.base[k][where], self.kept[k][where] = chunk.theta, chunk.base, values

    async def join(self, updates):
        await asyncio.sleep(0.05)
        order = [0, *range(len(self.world.channels) - 1, 0, -1)]
        for update in sorted(updates, key=lambda u: order.index(self.world.keeper.channel(u.fragment))):
            self.take(self.world.keeper.channel(update.fragment), update, OVERWRITE)

    async def found(self):
        return [Piece(0, 8 * DIM, self.theta.clone())]

    async def evaluate(self, blocks, at):
        self.fault("evaluate")
        await asyncio.sleep(0.1)
        theta = self.theta.clone()
        for update in at or ():
            where, values = update.pieces[0].handle
            theta[where] = values
        return [BlockLoss(block, held_out(theta.numpy(), block), TOKENS) for block in blocks]

    async def save(self, round_, versions):
        self.fault("save")
        state = {"optimizer": self.optimizer.state_dict(), "error": self.error, "own": self.own}
        if versions is not None:
            names = ("theta", "base", "emitted", "kept", "rate_sum")
            state |= {name: getattr(self, name) for name in names} | {"versions": dict(versions)}
        state = copy.deepcopy(state)

        async def written():
            await asyncio.sleep(0.3)
            return [] if self.gone else [state]

        return asyncio.ensure_future(written())

    def load(self, state, parameters):
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.error.copy_(state["error"])
        self.own.copy_(state["own"])
        if parameters and "versions" in state:
            for name in ("theta", "base", "emitted", "kept"):
                getattr(self, name).copy_(state[name])
            self.rate_sum, self.restored = state["rate_sum"], dict(state["versions"])


def _codec(channel):
    up = channel.up
    if up.kind == "dct":
        return Dct(up.block or 64, up.k)
    if up.kind == "topk":
        return TopK(up.block or 4096, up.k)
    assert up.kind == "fp32", f"there is no {up.kind} in float64"
    return None


__all__ = ["DECAYED", "DIM", "LAYOUT", "PER_STEP", "START", "TOKENS", "IslandLost", "World", "gradient", "held_out"]
