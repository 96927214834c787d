"""Published methods that send a part of what was done: configurations of the run loop against direct loops.

The direct loops are written from the descriptions of the methods; see `direct_loops`.
Source: ../shared/algorithms.md §2 to §7, §10.4.
"""

import math

import numpy as np
import pytest
from direct_loops import NAMES, PLAIN, SHAPES, TENSORS, THREE, locals_of, nesterov, ran, same
from quadratics import DIM, START

from ray_diloco.outer.layout import Range
from ray_diloco.outer.selection import Selection


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


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_sparta_with_feedback_keeps_what_a_draw_could_not_say(decay):
    coded = ("codec.up.kind=topk", "codec.up.block=4", "codec.up.k=1", "codec.up.feedback=true")
    settings = ("fragments.p=0.25", "inner.H=2", f"codec.up.decay={decay}", "run.rounds=20")
    world = ran("sparta", *THREE, *PLAIN, *settings, *coded)
    islands, theta, A = locals_of(world), {n: START.copy() for n in NAMES}, START.copy()
    base, e = {n: START.copy() for n in NAMES}, {n: np.zeros(DIM) for n in NAMES}
    for t in range(20):
        at, sent = Selection("bernoulli", 0.25, 0, t).positions((Range(0, DIM),)), []
        for n in NAMES:
            theta[n] = islands[n].steps(theta[n], 2)
            waiting = decay * e[n][at] + base[n][at] - theta[n][at]
            q = np.zeros(len(at))
            for k in range(0, len(at), 4):
                largest = k + np.argmax(np.abs(waiting[k : k + 4]))
                q[largest] = waiting[largest]
            e[n][at] = waiting - q
            sent.append(q)
        A[at] -= np.mean(sent, axis=0)
        for n in NAMES:
            theta[n][at] = base[n][at] = A[at]
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
