import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.average import OuterAverage


def anchors(seed, rounds, numel=17):
    return torch.randn(rounds, numel, generator=torch.Generator().manual_seed(seed))


def run(average, iterates, cuts=(17,)):
    buffer = torch.full((iterates.shape[1],), float("nan"))
    for version, anchor in enumerate(iterates, start=1):
        start = 0
        for stop in cuts:
            average.update(buffer[start:stop], anchor[start:stop], version)
            start = stop
    return buffer


@settings(deadline=None)
@given(st.integers(1, 30), st.floats(0, 0.99), st.integers(0, 2**31))
def test_uniform_is_the_mean_of_the_last_anchors(rounds, start, seed):
    iterates = anchors(seed, rounds)
    average = OuterAverage("uniform", rounds, start)
    expected = iterates[average.first - 1 :].double().mean(0)
    torch.testing.assert_close(run(average, iterates).double(), expected, rtol=0, atol=2e-6)


def test_the_first_anchor_that_is_averaged_comes_after_the_given_part_of_the_run():
    assert [OuterAverage("uniform", 10, start).first for start in (0.0, 0.29, 0.3, 0.7, 0.8)] == [1, 3, 4, 8, 9]
    assert OuterAverage("uniform", 100, 0.29).first == 30
    assert [OuterAverage("ema", 10, 0.8).count(version) for version in (1, 8, 9, 10)] == [0, 0, 1, 2]


def test_an_exponential_average_begins_at_its_first_anchor():
    iterates = torch.tensor([[7.0], [2.0], [4.0], [8.0]])
    # From the second on: 2; 3/4 · 2 + 1/4 · 4 = 2.5; 3/4 · 2.5 + 1/4 · 8 = 3.875.
    assert run(OuterAverage("ema", 4, 0.25, 0.75), iterates, (1,)).item() == 3.875


@pytest.mark.parametrize("kind", ["uniform", "ema"])
def test_anchors_that_stand_still_are_their_average_bit_for_bit(kind):
    anchor = anchors(3, 1)
    assert torch.equal(run(OuterAverage(kind, 10, 0.2), anchor.expand(10, -1)), anchor[0])


@pytest.mark.parametrize("kind", ["uniform", "ema"])
def test_averages_do_not_depend_on_chunks(kind):
    iterates, average = anchors(4, 9), OuterAverage(kind, 9, 0.3)
    assert torch.equal(run(average, iterates, (1, 5, 16, 17)), run(average, iterates))


def test_without_an_average_the_buffer_is_never_written():
    assert run(OuterAverage(), anchors(5, 3)).isnan().all()
    assert OuterAverage().count(100) == 0


def test_an_unknown_average_is_an_error():
    with pytest.raises(SyncError, match=r"RD-434: there is no average of outer iterates 'mean'\n.*ema, none, uniform"):
        OuterAverage("mean")
