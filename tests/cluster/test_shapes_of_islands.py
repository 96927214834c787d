"""ZeRO stages and ranks are ways to hold the same numbers: the anchors are the same.

Two ranks average the gradients of halves of a batch, and stages differ in what they sum first (norms, flat buffers):
that rounds in the last place.  AdamW divides by the root of squared gradients, so ε is well above that rounding here.
Measured were differences up to 2.4e-7, two units in the last place; the tolerance is 1e-6.
"""

import numpy as np
import pytest
from cluster_runs import anchor, contribution, distance, equal, lines, replayed

pytestmark = pytest.mark.cluster

# One island trains alone on what the other shares among two ranks.
ONE_AND_TWO = {
    "run.rounds": 2,
    "inner.H": 3,
    "inner.micro_batch": 4,
    "inner.optimizer.eps": 1e-4,
    "islands.i1.ranks": 2,
    "islands.i1.micro_batch": 2,
    "islands.overrides.i0.data_settings": {"name": "left"},
    "islands.overrides.i1.data_settings": {"name": "right"},
}


@pytest.fixture(scope="module")
def stages(quick):
    """The runs of all stages in fp32, by stage."""
    return {stage: quick.train(f"stage-{stage}", ONE_AND_TWO | {"inner.zero_stage": stage}) for stage in range(4)}


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_contribute_what_one_does(stages, stage):
    for r in (1, 2):
        one, two = (contribution(stages[stage].folder, r, island) for island in ("i0", "i1"))
        assert distance(one, two) < 1e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_has_the_anchors_of_stage_zero(stages, stage):
    for r in (0, 1, 2):
        assert distance(anchor(stages[stage].folder, r), anchor(stages[0].folder, r)) < 1e-6
    assert equal(anchor(stages[stage].folder, 0), anchor(stages[0].folder, 0))
    moved = distance(anchor(stages[0].folder, 2), anchor(stages[0].folder, 0))
    assert moved > 1e-2


def test_bf16_stays_near_fp32(quick, stages):
    alone = {"islands.count": 1, "run.rounds": 1, "inner.zero_stage": 1, "inner.precision": "bf16"}
    run = quick.train("bf16", without_islands(ONE_AND_TWO) | alone)
    assert equal(anchor(run.folder, 0), anchor(stages[1].folder, 0)), "masters begin with fp32 values, not rounded ones"
    exact, rounded = contribution(stages[1].folder, 1, "i0"), contribution(run.folder, 1, "i0")
    # bf16 has 8 bits: gradients are off by about 2⁻⁸ each, and AdamW may step the other way where they are tiny.
    assert norm({name: rounded[name] - exact[name] for name in exact}) < 0.05 * norm(exact)


def test_islands_send_in_codecs_of_their_own_and_meet_in_one_anchor(quick):
    run = quick.train("codecs", ONE_AND_TWO | {"run.rounds": 1, "islands.i1.codec": "int8"})
    one, two = (contribution(run.folder, 1, island) for island in ("i0", "i1"))
    # They have learnt the same; int8 rounds to 1/127 of the largest value of a block, half a step at most.
    largest = max(float(np.abs(tensor).max()) for tensor in one.values())
    assert largest / 10_000 < distance(one, two) < 0.51 * largest / 127
    sent = {
        line["island"]: line["bytes_up"] for line in lines(run.folder / "metrics.jsonl") if line["kind"] == "island"
    }
    assert sent["i1"] < 0.5 * sent["i0"]
    assert distance(anchor(run.folder, 1), replayed(run.folder)[1]) < 1e-6


def norm(tensors):
    return float(np.sqrt(sum(np.sum(t.astype(np.float64) ** 2) for t in tensors.values())))


def without_islands(settings):
    return {key: value for key, value in settings.items() if not key.startswith("islands.")}
