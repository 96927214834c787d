"""The ordering of the chaos study of Decoupled DiLoCo: learners that fail apart lose less than one that is all."""

from ray_diloco.simulate.chaos import PUBLISHED, simulated


def test_goodput_grows_with_the_number_of_learners() -> None:
    elastic, four = (simulated(2_400_000, learners, hours=0.08, seed=1).goodput for learners in (1, 4))
    assert abs(elastic - PUBLISHED[2_400_000][1]) < 0.12
    assert elastic + 0.1 < four < 1.0
