"""Published methods as configurations of the run loop, each against a direct loop written from its description.

The direct loops are numpy in float64 and know nothing of the package but the problem, the blocks that each island was
given, and, for runs at their own pace, who was committed when.  Source: ../shared/algorithms.md §2 to §7, §10.4.
"""

import math
from collections import defaultdict

import numpy as np
import pytest
from quadratics import DECAYED, DIM, START, World, gradient

from ray_diloco.outer.layout import Range
from ray_diloco.outer.selection import Selection

THREE = ("islands.count=3",)
# The whole rate from the first step on, and nothing clipped.
PLAIN = ("inner.clip=0", "inner.lr=0.05", "inner.schedule.kind=constant", "inner.schedule.warmup_steps=0")
NAMES = ("i0", "i1", "i2")

# Elements of each tensor, in the order of the model.
EMBED, HEAD = np.arange(0, 6), np.arange(30, 36)
LAYERS = [np.arange(6 + 6 * k, 12 + 6 * k) for k in range(4)]
TENSORS = [EMBED, *(part for layer in LAYERS for part in (layer[:4], layer[4:])), HEAD]
SHAPES = [(2, 3), *[(2, 2), (1, 2)] * 4, (2, 3)]


def ran(algorithm, *settings, **arguments):
    world = World(f"algorithm={algorithm}", *settings, **arguments)
    assert world.run() == "finished"
    return world


def same(found, expected):
    assert np.abs(expected - START).max() > 1e-2
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


class Local:
    """The inner steps of one island: AdamW, SGD or `θ − g`."""

    def __init__(self, world, name, kind="adamw", lr=0.05, decay=0.1, warmup=0, clip=0.0):
        self.name, self.kind, self.lr, self.decay, self.warmup, self.clip = name, kind, lr, decay, warmup, clip
        self.blocks, self.t = world.steps_of(name), 0
        self.m, self.v = np.zeros(DIM), np.zeros(DIM)

    def step(self, theta, at=None, extra=0.0):
        g = gradient(theta if at is None else at, self.name, self.blocks[self.t]) + extra
        if self.clip:
            g = g * min(1, self.clip / (np.linalg.norm(g) + 1e-6))
        self.t += 1
        rate = self.lr * (min(1, self.t / self.warmup) if self.warmup else 1)
        if self.kind == "raw":
            return theta - g
        if self.kind == "sgd":
            return theta - rate * g
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g * g
        mean, root = self.m / (1 - 0.9**self.t), np.sqrt(self.v / (1 - 0.95**self.t))
        return theta * (1 - rate * self.decay * DECAYED) - rate * mean / (root + 1e-8)

    def steps(self, theta, count):
        for _ in range(count):
            theta = self.step(theta)
        return theta


def locals_of(world, names=NAMES, **settings):
    return {name: Local(world, name, **settings) for name in names}


def in_rounds(islands, H, rounds, outer, weights=None):
    """Everybody trains from the anchor; `outer` moves it by the weighted mean of start minus end."""
    A = START.copy()
    weights = weights or dict.fromkeys(islands, 1 / len(islands))
    for _ in range(rounds):
        A = outer(A, sum(w * (A - islands[name].steps(A, H)) for name, w in weights.items()))
    return A


def nesterov(lr, momentum):
    u = np.zeros(DIM)

    def outer(A, delta):
        nonlocal u
        u = momentum * u + delta
        return A - lr * (delta + momentum * u)

    return outer


def test_synchronous_data_parallel_is_adamw_on_the_mean_gradient():
    world = ran("sync_dp", *THREE, "run.rounds=30", "outer.lr=0.05")
    A, m, v = START.copy(), np.zeros(DIM), np.zeros(DIM)
    islands = locals_of(world, kind="raw", clip=1.0)
    for t in range(1, 31):
        g = np.mean([A - island.step(A) for island in islands.values()], axis=0)
        m, v, rate = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g, 0.05 * min(1, t / 20)
        A = A * (1 - rate * 0.1) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    same(world.model, A)


def test_local_sgd_averages_parameters():
    world = ran("local_sgd", *THREE, *PLAIN, "inner.H=4", "run.rounds=5")
    A, islands = START, locals_of(world, kind="sgd")
    for _ in range(5):
        A = np.mean([island.steps(A, 4) for island in islands.values()], axis=0)
    same(world.model, A)


def test_fedavg_weighs_islands_by_their_data():
    shards = {"i0": 10, "i1": 30, "i2": 60}
    world = ran("fedavg", *THREE, *PLAIN, "inner.H=4", "run.rounds=5", shards=shards)
    A, islands = START, locals_of(world, kind="sgd")
    for _ in range(5):
        A = sum(n / 100 * islands[name].steps(A, 4) for name, n in shards.items())
    same(world.model, A)


def test_fedprox_pulls_every_step_to_the_anchor():
    world = ran("fedprox", *THREE, *PLAIN, "inner.H=4", "run.rounds=4", "inner.proximal=0.3", "quorum.weights=uniform")
    A, islands = START, locals_of(world, kind="sgd")
    for _ in range(4):
        ends = []
        for island in islands.values():
            theta = A
            for _ in range(4):
                theta = island.step(theta, extra=0.3 * (theta - A))
            ends.append(theta)
        A = np.mean(ends, axis=0)
    same(world.model, A)


def test_slowmo_has_its_momentum_in_units_of_the_gradient():
    world = ran("slowmo", *THREE, *PLAIN, "inner.H=4", "run.rounds=6", "outer.lr=0.9")
    u = np.zeros(DIM)

    def outer(A, delta):
        nonlocal u
        u = 0.6 * u + delta / 0.05
        return A - 0.9 * 0.05 * u

    same(world.model, in_rounds(locals_of(world, kind="sgd"), 4, 6, outer))


@pytest.mark.parametrize("algorithm, momentum", [("fedadam", 0.1), ("fedyogi", 0.01)])
def test_fedopt_divides_by_the_root_of_the_second_moment(algorithm, momentum):
    world = ran(algorithm, *THREE, *PLAIN, "inner.H=4", "run.rounds=6", "quorum.weights=uniform")
    m, v = np.zeros(DIM), np.full(DIM, 1e-6)

    def outer(A, delta):
        nonlocal m, v
        d = -delta
        m = 0.9 * m + 0.1 * d
        v = 0.99 * v + 0.01 * d * d if algorithm == "fedadam" else v - 0.01 * d * d * np.sign(v - d * d)
        return A + momentum * m / (np.sqrt(v) + 1e-3)

    same(world.model, in_rounds(locals_of(world, kind="sgd"), 4, 6, outer))


def test_scaffold_takes_away_what_gradients_differ_by():
    world = ran("scaffold", *THREE, *PLAIN, "inner.H=4", "run.rounds=5", "channels.control.H=4")
    A, c, own, islands = START, np.zeros(DIM), {n: np.zeros(DIM) for n in NAMES}, locals_of(world, kind="sgd")
    for _ in range(5):
        ends, changes = [], []
        for name, island in islands.items():
            y = A
            for _ in range(4):
                y = island.step(y, extra=c - own[name])
            change = -c + (A - y) / (4 * 0.05)
            own[name] = own[name] + change
            ends.append(y)
            changes.append(change)
        A, c = np.mean(ends, axis=0), c + np.mean(changes, axis=0)
        np.testing.assert_allclose(c, np.mean(list(own.values()), axis=0), rtol=1e-9)
    same(world.model, A)
    np.testing.assert_allclose(world.keeper.kept[1, ""].anchor.numpy(), c, rtol=1e-9, atol=1e-12)


def test_lookahead_goes_a_part_of_the_way():
    world = ran("lookahead", *PLAIN, "run.rounds=6")
    A, (island,) = START, locals_of(world, ("i0",)).values()
    for _ in range(6):
        A = A + 0.5 * (island.steps(A, 5) - A)
    same(world.model, A)


def test_snoo_is_nesterov_on_one_island():
    world = ran("snoo", *PLAIN, "inner.H=5", "run.rounds=6")
    same(world.model, in_rounds(locals_of(world, ("i0",)), 5, 6, nesterov(0.8, 0.75)))


def test_gpa_takes_gradients_between_average_and_iterate():
    world = ran("gpa", *PLAIN, "run.rounds=40", "outer.lr=0.1")
    x = z = START
    (island,) = locals_of(world, ("i0",)).values()
    for _ in range(40):
        y = 0.7 * x + 0.3 * z
        z = island.step(z, at=y)
        x = 0.9 * x + 0.1 * z
    same(world.model, x)


def test_diloco_is_nesterov_on_the_weighted_mean():
    shards = {"i0": 10, "i1": 30, "i2": 60}
    settings = ("inner.clip=0", "inner.lr=0.05", "inner.H=7", "run.rounds=5", "quorum.weights=shard_size")
    world = ran("diloco", *THREE, *settings, shards=shards)
    # The inner rate warms up over the run, not over a round.
    islands = locals_of(world, warmup=20)
    same(world.model, in_rounds(islands, 7, 5, nesterov(0.7, 0.9), {n: s / 100 for n, s in shards.items()}))


def test_diloco_with_a_slow_island_is_the_same():
    settings = ("diloco", *THREE, *PLAIN, "inner.H=3", "run.rounds=4")
    np.testing.assert_array_equal(ran(*settings).model, ran(*settings, speed={"i1": 5.0}).model)


def overlapped(world, parts, offsets, H, rounds, tau, outer, adopt, merge=None):
    """Fragments are emitted at `k H + offset` and adopted `τ` steps later, at the end without delay.

    `outer(p, A, Δ)` moves fragment `p`; `adopt(θ, θ_emit, A)` gives a new `θ`.
    """
    islands = locals_of(world)
    A, end = START.copy(), rounds * H + max(offsets)
    theta, B = {n: START.copy() for n in islands}, {n: START.copy() for n in islands}
    arrivals = defaultdict(list)
    for t in range(1, end + 1):
        for name, island in islands.items():
            theta[name] = island.step(theta[name])
        for p, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            k, rest = divmod(t - offset, H)
            if rest == 0 and 1 <= k <= rounds:
                deltas = np.array([B[n][part] - theta[n][part] for n in islands])
                A[part] = outer(p, A[part], np.mean(deltas, axis=0) if merge is None else merge(p, deltas))
                sent = {n: theta[n][part].copy() for n in islands}
                arrivals[min(t + tau, end)].append((part, A[part].copy(), sent))
        for part, anchor, sent in arrivals[t]:
            for n in islands:
                theta[n][part] = adopt(theta[n][part], sent[n], anchor)
                B[n][part] = anchor
    return A


def nesterov_of(parts, lr, momentum):
    u = [np.zeros(len(part)) for part in parts]

    def outer(p, A, delta):
        u[p] = momentum * u[p] + delta
        return A - lr * (delta + momentum * u[p])

    return outer


# Strided blocks; what is outside of them goes to the smaller fragment, the first if they are equal.
STRIDED = [np.concatenate([EMBED, LAYERS[0], LAYERS[2]]), np.concatenate([LAYERS[1], LAYERS[3], HEAD])]


@pytest.mark.parametrize("tau, alpha", [(1, 0.5), (3, 0.25), (0, 0.5), (2, 0.0)])
def test_streaming_sends_fragments_in_turn_and_mixes_them_in(tau, alpha):
    settings = ("codec.up.kind=fp32", "inner.H=6", "run.rounds=4", f"schedule.delay={tau}", f"adopt.alpha={alpha}")
    world = ran("streaming", *THREE, *PLAIN, *settings)
    outer = nesterov_of(STRIDED, 0.4, 0.9)
    expected = overlapped(
        world, STRIDED, (0, 3), 6, 4, tau, outer, lambda now, sent, anchor: alpha * now + (1 - alpha) * anchor
    )
    same(world.model, expected)


@pytest.mark.parametrize("lag", [1, 2])
def test_delayed_adopts_a_merge_rounds_later(lag):
    world = ran("delayed", *THREE, *PLAIN, "inner.H=5", "run.rounds=6", f"schedule.lag={lag}")
    whole = [np.arange(DIM)]
    outer = nesterov_of(whole, 0.2, 0.9)
    same(world.model, overlapped(world, whole, (0,), 5, 6, 5 * lag, outer, lambda now, sent, anchor: anchor))


def test_cocodc_without_compensation_is_anchor_and_local_progress():
    settings = ("inner.H=6", "run.rounds=4", "schedule.delay=2", "schedule.priority=false", "adopt.strength=0")
    world = ran("cocodc", *THREE, *PLAIN, *settings)
    outer = nesterov_of(STRIDED, 0.4, 0.9)
    same(world.model, overlapped(world, STRIDED, (0, 3), 6, 4, 2, outer, lambda now, sent, A: A + now - sent))


def test_cocodc_shortens_steps_where_the_anchor_went_ahead():
    settings = ("inner.H=6", "run.rounds=4", "schedule.delay=2", "schedule.priority=false", "adopt.strength=40")
    world = ran("cocodc", *THREE, *PLAIN, *settings)

    def adopt(now, sent, A):
        g = (now - sent) / 2
        return A + 2 * (g - 40 * g * g * (A - sent) / 6)

    same(world.model, overlapped(world, STRIDED, (0, 3), 6, 4, 2, nesterov_of(STRIDED, 0.4, 0.9), adopt))


def unit(x):
    norm = np.linalg.norm(x)
    return x / norm if norm else x


def test_decoupled_merges_norms_and_directions_apart():
    world = ran("decoupled", *THREE, *PLAIN, "codec.up.kind=fp32", "inner.H=18", "run.rounds=3")
    matrices, norms = [layer[:4] for layer in LAYERS], [layer[4:] for layer in LAYERS]
    parts = [np.concatenate([EMBED, HEAD]), *matrices, *norms]

    def merge(p, deltas):
        if p == 0:
            return deltas.mean(axis=0)
        return np.mean([np.linalg.norm(d) for d in deltas]) * unit(np.mean([unit(d) for d in deltas], axis=0))

    offsets = [2 * p for p in range(9)]
    outer = nesterov_of(parts, 0.7, 0.9)
    same(world.model, overlapped(world, parts, offsets, 18, 3, 2, outer, lambda now, sent, A: A, merge))


def test_eager_swaps_in_its_own_fresh_share():
    world = ran("eager", *THREE, *PLAIN, "inner.H=5", "run.rounds=6")
    islands = locals_of(world)
    A, u = {n: START for n in NAMES}, {n: np.zeros(DIM) for n in NAMES}
    before = {n: np.zeros(DIM) for n in NAMES}
    for _ in range(6):
        fresh = {n: A[n] - islands[n].steps(A[n], 5) for n in NAMES}
        for n in NAMES:
            delta = np.mean(list(before.values()), axis=0) + (fresh[n] - before[n]) / 3
            u[n] = 0.9 * u[n] + delta
            A[n] = A[n] - 0.4 * (delta + 0.9 * u[n])
        before = fresh
    for n in NAMES:
        same(world.keeper.kept[0, n].anchor.numpy(), A[n])
    same(world.model, np.mean(list(A.values()), axis=0))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_noloco_meets_in_pairs(count):
    world = ran("noloco", f"islands.count={count}", *PLAIN, "inner.H=4", "run.rounds=7")
    names = [f"i{k}" for k in range(count)]
    islands = locals_of(world, names, decay=0.0)
    phi, step, met = {n: START for n in names}, {n: np.zeros(DIM) for n in names}, set()
    for round_ in range(1, 8):
        groups = {n: tuple(o for o, _, _ in world.movements[0, round_][n]) for n in names}
        assert all(n in groups[n] and groups[n] == groups[o] for n in names for o in groups[n])
        assert sorted(len(g) for g in set(groups.values())) == ([1] * (count % 2) + [2] * (count // 2))
        met |= set(groups.values())
        theta = {n: islands[n].steps(phi[n], 4) for n in names}
        old = dict(phi)
        for n in names:
            towards = np.mean([theta[o] - old[o] for o in groups[n]], axis=0)
            pull = np.mean([old[o] for o in groups[n]], axis=0) - old[n]
            step[n] = 0.5 * step[n] + 0.7 * towards + 0.7 * pull
            phi[n] = old[n] + step[n]
    assert count == 2 or len(met) > 2
    for n in names:
        same(world.keeper.kept[0, n].anchor.numpy(), phi[n])


def at_own_pace(world, H, server, sent=None, adopt=None, islands=None, steps=None):
    """Contributions one after the other, in the order in which they were committed.

    `server(A, Δ, B)` gives the new anchor; `sent(A)` what its sender gets, `adopt(θ, sent)` what it makes of it.
    """
    islands = islands or locals_of(world)
    A = START.copy()
    theta, B = {n: START.copy() for n in islands}, {n: START.copy() for n in islands}
    for k, (name,) in enumerate(world.merged()):
        theta[name] = islands[name].steps(theta[name], H if steps is None else steps[k])
        A = server(A, B[name] - theta[name], B[name])
        B[name] = A if sent is None else sent(A)
        theta[name] = B[name] if adopt is None else adopt(theta[name], B[name])
    return A


SPEEDS = {"i0": 1.0, "i1": 1.7, "i2": 2.9}


def test_async_nesterov_applies_every_contribution_by_itself():
    world = ran("async_nesterov", *THREE, *PLAIN, "inner.H=4", "run.rounds=5", speed=SPEEDS)
    order = [name for (name,) in world.merged()]
    assert len(order) == 15 and order.count("i0") > order.count("i2")
    outer = nesterov(0.07, 0.9)
    same(world.model, at_own_pace(world, 4, lambda A, delta, B: outer(A, delta)))


def test_dylu_and_delayed_nesterov_keep_a_buffer_of_contributions():
    speed = {"i0": 1.0, "i1": 2.0, "i2": 4.0}
    world = ran("async_dn_dylu", *THREE, *PLAIN, "inner.H=8", "run.rounds=5", speed=speed)
    m, buffer, t = np.zeros(DIM), np.zeros(DIM), 0

    def server(A, g, B):
        nonlocal m, buffer, t
        buffer, t = buffer + g, t + 1
        if t % 3:
            return A - 0.7 * g / 3
        m, buffer = 0.9 * m + buffer / 3, np.zeros(DIM)
        return A - 0.7 * (0.9 * m + g / 3)

    steps = [event["steps"][0] for event in world.kinds("round_committed")]
    same(world.model, at_own_pace(world, 8, server, steps=steps))
    of_each = defaultdict(list)
    for (name,), count in zip(world.merged(), steps, strict=True):
        of_each[name].append(count)
    # The first segment measures; from then on ⌊H v / max v⌋.
    assert {name: set(found[1:]) for name, found in of_each.items()} == {"i0": {8}, "i1": {4}, "i2": {2}}


@pytest.mark.parametrize("algorithm", ["heloco", "mla"])
def test_heloco_turns_contributions_towards_the_momentum(algorithm):
    world = ran(algorithm, *THREE, *PLAIN, "inner.H=4", "run.rounds=6", speed=SPEEDS)
    m, cases = np.zeros(DIM), set()

    def corrected(d, v):
        norm, length = np.linalg.norm(d), np.linalg.norm(v)
        if norm < 1e-8 or length < 1e-8:
            return d
        c, confidence = d @ v / (norm * length), norm / (norm + 3 * length + 1e-8)
        if c >= 0.2:
            cases.add("as it is")
            return d
        if c < 0:
            cases.add("shrunk")
            return d - min(0.5 * -c * confidence, 0.5) * c * norm * v / length
        cases.add("turned")
        turn = min((1 - c) * confidence, 1)
        return norm * unit((1 - turn) * d / norm + turn * v / length)

    def server(A, delta, B):
        nonlocal m
        if algorithm == "heloco":
            delta = delta.copy()
            for tensor in TENSORS:
                delta[tensor] = corrected(delta[tensor], m[tensor])
        G = delta / math.sqrt(3)
        m = 0.9 * m + 0.1 * G
        return A - 0.7 * (G + 0.9 * m)

    same(world.model, at_own_pace(world, 4, server, sent=lambda A: A - 0.7 * 0.9 * m))
    assert algorithm == "mla" or cases == {"as it is", "shrunk", "turned"}


def test_easgd_pulls_island_and_centre_together_by_the_same():
    world = ran("easgd", *THREE, *PLAIN, "inner.H=4", "run.rounds=5", speed=SPEEDS)
    islands, centre = locals_of(world, kind="sgd"), START.copy()
    theta = {n: START.copy() for n in NAMES}
    for (name,) in world.merged():
        x = islands[name].steps(theta[name], 4)
        theta[name], centre = x - 0.1 * (x - centre), centre + 0.1 * (x - centre)
    same(world.model, centre)


def cosine_matrix(n):
    rows = [[math.cos(math.pi * (x + 0.5) * k / n) for x in range(n)] for k in range(n)]
    return np.array(rows) * np.sqrt([1 / n, *[2 / n] * (n - 1)])[:, None]


@pytest.mark.parametrize("k", [2, 64])
def test_demo_sends_the_largest_coefficients_and_steps_by_sign(k):
    scale = 0.001
    world = ran("demo", *THREE, f"codec.up.k={k}", "run.rounds=25", "outer.lr=0.02")
    islands, A = locals_of(world, kind="raw", clip=1.0), START.copy()
    e = {n: np.zeros(DIM) for n in NAMES}
    for _ in range(25):
        for n, island in islands.items():
            e[n] = 0.999 * e[n] + scale * (A - island.step(A))
        merged = np.zeros(DIM)
        for tensor, (rows, columns) in zip(TENSORS, SHAPES, strict=True):
            # Tensors are smaller than 64 × 64: one tile each.
            C, D, sent = cosine_matrix(rows), cosine_matrix(columns), []
            for n in NAMES:
                wave = (C @ e[n][tensor].reshape(rows, columns) @ D.T).ravel()
                wave[np.argsort(-np.abs(wave))[k:]] = 0
                sent.append(wave)
                e[n][tensor] -= (C.T @ wave.reshape(rows, columns) @ D).ravel()
            senders = np.maximum(np.sum(np.array(sent) != 0, axis=0), 1)
            wave = np.sum(sent, axis=0) / senders
            merged[tensor] = (C.T @ wave.reshape(rows, columns) @ D).ravel()
        A = (1 - 0.02 * 0.1) * A - 0.02 * np.sign(merged)
    same(world.model, A)
    if k == 64:
        assert max(np.abs(one).max() for one in e.values()) < 1e-15


def test_sparseloco_keeps_what_it_did_not_send():
    settings = ("codec.up.values=fp32", "codec.up.block=9", "codec.up.k=2", "inner.H=4", "run.rounds=7")
    world = ran("sparseloco", *THREE, *PLAIN, *settings)
    islands, A, e = locals_of(world), START.copy(), {n: np.zeros(DIM) for n in NAMES}
    for _ in range(7):
        sent = []
        for n, island in islands.items():
            e[n] = 0.95 * e[n] + (A - island.steps(A, 4))
            q = e[n].reshape(4, 9).copy()
            for row in q:
                row[np.argsort(-np.abs(row))[2:]] = 0
            sent.append(q.ravel())
            e[n] = e[n] - q.ravel()
        A = A - np.sum(sent, axis=0) / np.maximum(np.sum(np.array(sent) != 0, axis=0), 1)
    same(world.model, A)


@pytest.mark.parametrize("draw", ["bernoulli", "partitioned"])
def test_sparta_averages_a_random_part_after_every_step(draw):
    world = ran("sparta", *THREE, *PLAIN, "fragments.p=0.25", f"fragments.draw={draw}", "run.rounds=30")
    islands, theta, A = locals_of(world), {n: START.copy() for n in NAMES}, START.copy()
    for t in range(30):
        theta = {n: islands[n].step(theta[n]) for n in NAMES}
        at = Selection(draw, 0.25, 0, t).positions((Range(0, DIM),))
        A[at] = np.mean([theta[n][at] for n in NAMES], axis=0)
        for n in NAMES:
            theta[n][at] = A[at]
    same(world.model, A)


def test_sparta_inside_diloco_is_a_part_of_its_inner_steps():
    settings = ("channels.sparta.fragments.p=0.25", "inner.H=6", "run.rounds=4")
    world = ran("sparta_diloco", *THREE, *PLAIN, *settings)
    islands, theta = locals_of(world), {n: START.copy() for n in NAMES}
    A, outer = START.copy(), nesterov(0.7, 0.9)
    for t in range(24):
        theta = {n: islands[n].step(theta[n]) for n in NAMES}
        at = Selection("bernoulli", 0.25, 0, t).positions((Range(0, DIM),))
        mean = np.mean([theta[n][at] for n in NAMES], axis=0)
        for n in NAMES:
            theta[n][at] = mean
        if t % 6 == 5:
            A = outer(A, np.mean([A - theta[n] for n in NAMES], axis=0))
            theta = {n: A.copy() for n in NAMES}
    same(world.model, A)
