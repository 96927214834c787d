"""What a run says beforehand of its rounds, against what was metered."""

import pytest

from ray_diloco.planning.remembered import recall


def test_a_run_says_beforehand_what_its_rounds_then_send(straight):
    rounds, plan = straight["rounds"], straight["expected"]
    for way in ("bytes_up", "bytes_down"):
        metered = straight[way] / rounds
        assert plan[way] == pytest.approx(metered, rel=0.01, abs=10_000)
        # Closer than it has to be: the sizes are those of the code that sends.
        assert plan[way] == pytest.approx(metered, abs=200 * len(straight["islands"]))


def test_the_steps_of_a_run_are_remembered_for_plans(straight, quick):
    kept = recall(quick.config().data.cache, "steps").values()
    assert any(len(steps) > 1 and all(seconds > 0 for seconds in steps.values()) for steps in kept)
