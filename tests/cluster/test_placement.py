"""Room for islands on a real Ray: by run, so that several runs live on one cluster, and given back by run."""

import asyncio

import pytest
import ray
from ray.util.placement_group import placement_group_table

from ray_diloco.cluster.placement import check_feasible, on_node, release, reserve
from ray_diloco.cluster.roster import room_name
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.errors import InfeasibleError

pytestmark = pytest.mark.cluster


def held():
    return sorted(group["name"] for group in placement_group_table().values() if group["state"] == "CREATED")


def test_runs_with_islands_of_the_same_name_live_side_by_side(cluster):
    for run in ("first", "first-b"):
        asyncio.run(reserve(room_name(run, "i0", 1, 0), "i0", [{"CPU": 1.0}], 30))
    assert held() == ["run first-b: island i0, 1.0", "run first: island i0, 1.0"]
    release("first")
    assert held() == ["run first-b: island i0, 1.0"]
    release("first-b")
    assert held() == []


def test_a_reservation_that_is_given_up_leaves_nothing(cluster):
    with pytest.raises(InfeasibleError, match=r"island i1 found no room within 0\.5 s"):
        asyncio.run(reserve(room_name("greedy", "i1", 1, 0), "i1", [{"CPU": 9.0}], 0.5))
    assert {group["state"] for group in placement_group_table().values() if "greedy" in group["name"]} == {"REMOVED"}


@pytest.mark.parametrize(
    ("islands", "fits"),
    [
        ({"i0": [{"CPU": 8.0}]}, True),
        ({"i0": [{"CPU": 4.0}, {"CPU": 2.0}], "i1": [{"CPU": 2.0}]}, True),
        ({"i0": [{"CPU": 4.0}, {"CPU": 2.0}], "i1": [{"CPU": 2.5}]}, False),
        ({"i0": [{"CPU": 1.0, "GPU": 1.0}]}, False),
    ],
)
def test_what_fits_is_counted_over_all_islands_and_resources(cluster, islands, fits):
    assert ray.cluster_resources()["CPU"] == 8
    if fits:
        check_feasible(islands)
        return
    with pytest.raises(InfeasibleError) as refused:
        check_feasible(islands)
    assert refused.value.number == 210


def test_an_actor_may_be_anywhere_if_its_node_or_region_is_gone(cluster):
    assert on_node(None) == on_node("0" * 56) == Whereabouts().inside("mars") == {}
