"""An island in float64: inner optimisers and rules of adoption are those of the package.

Faults are data: `world.faults[(island, incarnation, phase, n)]` raises in the n-th call of that phase.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter, deque

import numpy as np
import torch
from quadratic_codecs import Dct, TopK
from quadratic_problem import DIM, LAYOUT, PER_STEP, START, TOKENS, gradient, held_out, indices

from ray_diloco.blocks import (
    CONTROL,
    adopt_of,
    draw_of,
    feedback_of,
)
from ray_diloco.inner.corrections import next_control
from ray_diloco.inner.optimizer import OPTIMIZERS
from ray_diloco.inner.schedule import learning_rate_factor
from ray_diloco.outer.adopt import AdoptChunk
from ray_diloco.outer.exchange import OVERWRITE
from ray_diloco.rounds.ports import (
    BlockLoss,
    Emission,
    Piece,
    Report,
)


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
            if update.fragment in merged and self.unheard.get(update.fragment):
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
