"""Contributions that cannot be used: each names its island, and the round can be prepared without it."""

import pickle

import numpy as np
import pytest
from outer_world import (
    WHOLE,
    contribution_payload,
    nesterov,
    offer,
    parameters_payload,
    state_digest,
)

from ray_diloco.outer.layout import Range
from ray_diloco.outer.shard import BadContribution, Contribution

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_values_that_are_not_finite_name_their_island(value):
    values = np.ones(8)
    values[6] = value
    with pytest.raises(BadContribution, match="RD-411: island i2: values") as caught:
        nesterov().prepare("r", 0, [offer("i0", np.ones(8)), offer("i2", values), offer("i1", np.ones(8))])
    assert caught.value.island == "i2"


@pytest.mark.parametrize(
    ("contribution", "number"),
    [
        (offer("i0", np.ones(8), weight=-1.0), 414),
        (offer("i0", np.ones(8), weight=float("nan")), 414),
        (offer("i0", np.ones(8), version=1), 412),
        (Contribution("i0", 1.0, 1, offer("i0", np.ones(8)).payloads), 412),
        (Contribution("i0", 1.0, 0, offer("i9", np.ones(8)).payloads), 412),
        (Contribution("i0", 1.0, 0, offer("i0", np.ones(8), fragment=1).payloads), 412),
        (Contribution("i0", 1.0, 0, (parameters_payload(np.ones(8), WHOLE),)), 412),
        (Contribution("i0", 1.0, 0, ()), 406),
        (offer("i0", np.ones(7), ranges=(Range(0, 7),)), 406),
        (offer("i0", np.ones(9), ranges=(Range(0, 9),)), 406),
        (Contribution("i0", 1.0, 0, offer("i0", np.ones(8)).payloads * 2), 406),
        (Contribution("i0", 1.0, 0, (offer("i0", np.ones(8)).payloads[0][:-1],)), 401),
    ],
)
def test_contributions_that_do_not_fit_name_their_island(contribution, number):
    shard = nesterov()
    before = state_digest(shard)
    with pytest.raises(BadContribution) as caught:
        shard.prepare("r", 0, [contribution])
    assert (caught.value.number, caught.value.island) == (number, "i0")
    assert caught.value.what.startswith("island i0: ")
    assert state_digest(shard) == before


def test_missing_and_doubled_elements_are_named():
    parts = [contribution_payload(np.ones(n), (Range(a, a + n),)) for a, n in ((0, 3), (2, 2), (5, 3))]
    with pytest.raises(BadContribution, match=r"island i0: contribution: elements \[2, 3\) \(1 in all\) come twice"):
        nesterov().prepare("r", 0, [Contribution("i0", 1.0, 0, tuple(parts))])
    with pytest.raises(BadContribution, match=r"elements \[3, 5\) \(2 in all\) are missing"):
        nesterov().prepare("r", 0, [Contribution("i0", 1.0, 0, (parts[0], parts[2]))])


def test_two_contributions_of_one_island_are_refused():
    with pytest.raises(BadContribution, match="RD-412: island i0: two contributions"):
        nesterov().prepare("r", 0, [offer("i0", np.ones(8)), offer("i0", np.ones(8))])


def test_bad_contributions_travel_between_processes():
    again = pickle.loads(pickle.dumps(BadContribution("i1", 411, "what", "mend")))
    assert (again.island, again.number, again.what, again.mend) == ("i1", 411, "what", "mend")
