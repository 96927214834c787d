"""Published methods whose islands send at their own pace: configurations of the run loop against direct loops.

The direct loops are written from the descriptions of the methods; see `direct_loops`.
Source: ../shared/algorithms.md §2 to §7, §10.4.
"""

import math
from collections import defaultdict

import numpy as np
import pytest
from direct_loops import NAMES, PLAIN, TENSORS, THREE, locals_of, nesterov, ran, same, unit
from quadratics import DIM, START, World


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


@pytest.mark.parametrize("stop_at", [9.0, 13.0])
def test_easgd_goes_on_after_a_stop_with_what_every_island_had_trained(stop_at):
    settings = ("algorithm=easgd", *THREE, *PLAIN, "inner.H=4", "run.rounds=8")
    stopped = World(*settings, speed=SPEEDS, stop_at=stop_at)
    assert stopped.run() == "stopped"
    inner = {name: state for name, (state,) in stopped.saved[-1].inner.items()}
    committed = stopped.saved[-1].snapshot.versions[0]
    assert any(state["versions"][0].version < committed for state in inner.values()), (
        "somebody stands at an older anchor"
    )
    world = stopped.resumed(*settings)
    assert world.run() == "finished"
    assert not world.kinds("contribution_rejected")
    # Again: pulled by where they stood, and not by the anchor in their place.
    islands, centre = locals_of(world, kind="sgd"), stopped.keeper.kept[0, ""].anchor.numpy().copy()
    theta = {name: state["theta"].numpy() for name, state in inner.items()}
    for (name,) in world.merged():
        x = islands[name].steps(theta[name], 4)
        theta[name], centre = x - 0.1 * (x - centre), centre + 0.1 * (x - centre)
    same(world.model, centre)
