"""Published tables from their inputs.  The paper's grid has steps of a factor of 10^(4/49) = 1.21; one is allowed."""

import pytest

from ray_diloco.planning.published import METHODS, MODELS, bandwidth_table, intellect_1, needed_gbit, on_grid

# Data parallel at 99 %: the paper's simulation exposes what the formula hides.
NOT_MET = {("1B", "data parallel", 0.99), ("10B", "data parallel", 0.99)}


@pytest.mark.parametrize("cell", bandwidth_table(), ids=lambda c: f"{c.model} {c.method} {c.utilisation:g}")
def test_the_bandwidth_of_streaming_diloco_is_met_to_one_step_of_its_grid(cell):
    if (cell.model, cell.method, cell.utilisation) in NOT_MET:
        assert cell.steps_off < -1
    else:
        assert cell.steps_off in (0, 1)


def test_the_utilisation_of_intellect_1_is_met_to_a_tenth_of_a_percent():
    assert len(intellect_1()) == 3
    for _, formula, published in intellect_1():
        assert formula == pytest.approx(published, abs=0.1)


def test_the_formula_by_hand():
    # 16 Gbit, 10 s of steps, all of them again at 50 %, and 2/3 x 0.1 x 23/24 s behind the backward pass.
    assert needed_gbit(MODELS["1B"], METHODS["DiLoCo"], 0.5) == pytest.approx(16 / (10 + 0.1 * 2 / 3 * 23 / 24))


def test_the_grid_has_the_values_that_the_paper_prints():
    assert [round(on_grid(gbit), 1) for gbit in (1.3, 6.1, 13.0, 23.0, 86.0)] == [1.4, 6.3, 13.3, 23.3, 86.9]
