"""Published methods whose islands train and merge in turn: configurations of the run loop against direct loops.

The direct loops are written from the descriptions of the methods; see `direct_loops`.
Source: ../shared/algorithms.md §2 to §7, §10.4.
"""

import numpy as np
import pytest
from direct_loops import NAMES, PLAIN, THREE, in_rounds, locals_of, nesterov, ran, same
from quadratics import DIM, START


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
