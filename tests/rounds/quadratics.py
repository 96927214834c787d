"""Islands and keepers in float64 on heterogeneous quadratics, built from a configuration as the cluster builds its own.

Whole runs can be compared with a few lines of numpy.  The world is the fleet, the store and the journal of a run; the
problem, the codecs, the keeper and the islands are in `quadratic_*.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from quadratic_codecs import codec_in_float64
from quadratic_island import QuadraticIsland
from quadratic_keeper import Keeper, Kept
from quadratic_problem import DECAYED, DIM, LAYOUT, PER_STEP, START, TOKENS, gradient, held_out, indices

from ray_diloco.blocks import (
    anchor_names,
    channels_of,
    cuts_of,
    is_exact,
    is_free,
    quorum_of,
    schedule_of,
    topology_of,
    weigher_of,
)
from ray_diloco.config.compose import compose
from ray_diloco.config.schema import island_names
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.ports import (
    BlockLoss,
    IslandLost,
    Snapshot,
)
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.rules import IslandPlan, Rules
from ray_diloco.simulate.clock import run_virtual


@lru_cache
def configuration(settings):
    """The configuration that arguments give."""
    return compose([*settings]).config


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
        self.config = configuration(settings)
        self.channels = channels_of(self.config)
        self.cuts = cuts_of(self.channels, LAYOUT)
        self.names = island_names(self.config)
        self.anchors = anchor_names(self.config)
        self.fragments = sum(len(cut.numbers) for cut in self.cuts)
        self.ranges = {n: r for cut in self.cuts for n, r in zip(cut.numbers, cut.fragments, strict=True)}
        self.codecs = [codec_in_float64(channel) for channel in self.channels]
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
        # They are written beside one another here, and a store takes the newest round, whichever came last.
        self.saved.sort(key=lambda one: one.snapshot.round)
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
            "round_committed" if due.fragment == self.position.closing(due.round, main - 1) else "fragment_committed",
            round=due.round,
            fragment=due.fragment,
            version=prepared.version,
            islands=[offer.island for offer, _ in offers],
            rounds=[offer.round for offer, _ in offers],
            bases=[offer.base_version for offer, _ in offers],
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
            for (fragment, _), kept in self.keeper.kept.items():
                # Of the anchors that contributions were measured from, a commit holds those of a run at its own pace.
                recipe = self.keeper.recipes[self.keeper.channel(fragment)]
                most = (4 if recipe.max_age is None else recipe.max_age) if recipe.free else 0
                kept.past = {v: one for v, one in kept.past.items() if v >= kept.version - most}

        async def main():
            run = Run(self.rules(), self.position, self, self.keeper, self, self, self.owes_evaluation)
            if self.stop_at is not None:
                asyncio.get_running_loop().call_later(self.stop_at, run.stop)
            return await run.run()

        return run_virtual(main())

    def resumed(self, *settings, **changes):
        """A world that goes on from the newest commit of this one."""
        return World(*settings, saved=self.saved, speed=self.speed, **changes)


__all__ = ["DECAYED", "DIM", "LAYOUT", "PER_STEP", "START", "TOKENS", "IslandLost", "World", "gradient", "held_out"]
