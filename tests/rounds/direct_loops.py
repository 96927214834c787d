"""What direct loops of published methods are made of, for tests that compare configurations of the run loop with them.

The direct loops are numpy in float64 and know nothing of the package but the problem, the blocks that each island was
given, and, for runs at their own pace, who was committed when.
"""

import numpy as np
from quadratics import DECAYED, DIM, START, World, gradient

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


def unit(x):
    norm = np.linalg.norm(x)
    return x / norm if norm else x
