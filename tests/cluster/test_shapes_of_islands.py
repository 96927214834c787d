"""ZeRO stages, ranks and anchor shards are ways to hold the same numbers: the anchors are the same.

Two ranks average the gradients of halves of a batch, and stages differ in what they sum first (norms, flat buffers):
that rounds in the last place.  AdamW divides by the root of squared gradients, so ε is well above that rounding here.
Measured were differences up to 2.4e-7, two units in the last place; the tolerance is 1e-6.
"""

import pytest
from cluster_runs import anchor, contribution, distance, equal

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
def stages(place):
    """The runs of all stages in fp32, by stage."""
    return {stage: place.train(f"stage-{stage}", ONE_AND_TWO | {"inner.zero_stage": stage}) for stage in range(4)}


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


def test_bf16_stays_near_fp32(place, stages):
    run = place.train("bf16", ONE_AND_TWO | {"inner.zero_stage": 1, "inner.precision": "bf16"})
    exact, start = anchor(stages[1].folder, 2), anchor(stages[1].folder, 0)
    assert equal(anchor(run.folder, 0), start), "masters begin with the fp32 values, not with rounded ones"
    # bf16 has 8 bits: gradients are off by about 2⁻⁸, and so are the steps.
    assert distance(anchor(run.folder, 2), exact) < 0.1 * distance(exact, start)
    one, two = (contribution(run.folder, 1, island) for island in ("i0", "i1"))
    assert distance(one, two) < 0.1 * distance(exact, start)


@pytest.mark.parametrize("shards", [2, 3])
def test_any_number_of_anchor_shards_has_the_bits_of_one(place, straight, shards):
    run = place.train(f"shards-{shards}", {"anchor.shards": shards})
    assert all(equal(anchor(run.folder, r), anchor(straight.folder, r)) for r in range(4))
    kept = run.folder / "checkpoints/round-000003"
    assert [len(list(kept.glob(f"{kind}-*"))) for kind in ("anchor", "outer")] == [shards, shards]
