"""Published methods that merge late, in parts or in pairs: configurations of the run loop against direct loops.

The direct loops are written from the descriptions of the methods; see `direct_loops`.
Source: ../shared/algorithms.md §2 to §7, §10.4.
"""

from collections import defaultdict

import numpy as np
import pytest
from direct_loops import EMBED, HEAD, LAYERS, NAMES, PLAIN, THREE, locals_of, ran, same, unit
from quadratics import DIM, START


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
    settings = ("inner.H=6", "run.rounds=4", "schedule.delay=2", "adopt.strength=0", "schedule.priority=false")
    world = ran("cocodc", *THREE, *PLAIN, *settings)
    outer = nesterov_of(STRIDED, 0.4, 0.9)
    same(world.model, overlapped(world, STRIDED, (0, 3), 6, 4, 2, outer, lambda now, sent, A: A + now - sent))


def test_cocodc_shortens_steps_where_the_anchor_went_ahead():
    settings = ("inner.H=6", "run.rounds=4", "schedule.delay=2", "adopt.strength=40", "schedule.priority=false")
    world = ran("cocodc", *THREE, *PLAIN, *settings)

    def adopt(now, sent, A):
        g = (now - sent) / 2
        return A + 2 * (g - 40 * g * g * (A - sent) / 6)

    same(world.model, overlapped(world, STRIDED, (0, 3), 6, 4, 2, nesterov_of(STRIDED, 0.4, 0.9), adopt))


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
    A, u = dict.fromkeys(NAMES, START), {n: np.zeros(DIM) for n in NAMES}
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
    phi, step, met = dict.fromkeys(names, START), {n: np.zeros(DIM) for n in names}, set()
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
