"""The doctor of a cluster: one real node that stands for two regions, with a probe for each."""

import pytest

from ray_diloco.cluster import doctor
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.config.compose import compose
from ray_diloco.config.islands import REGION_LABEL
from ray_diloco.doctor.record import exit_code
from ray_diloco.planning.links import link_of, measured_links


@pytest.fixture
def two_regions(cluster, monkeypatch):
    """The node of the tests, listed twice under two labels."""
    (node,) = doctor.nodes()
    twice = [{**node, "Labels": {REGION_LABEL: region}} for region in ("eu", "us")]
    monkeypatch.setattr(doctor, "nodes", lambda: twice)
    monkeypatch.setattr(doctor, "needs_here", lambda config, nodes: (None, []))


def test_regions_are_examined_measured_and_found_by_the_planner(two_regions, tmp_path):
    settings = ["islands.count=2", "islands.names=[eu,us]", f"run.root={tmp_path}/runs", f"data.cache={tmp_path}/cache"]
    config = compose(settings).config
    checks = doctor.examine_cluster(config, seconds=0.05)
    by_name = {}
    for check in checks:
        by_name.setdefault(check.name, []).append(check)
    assert [check for check in checks if check.status == "fail"] == []
    assert exit_code(checks) == 0
    assert {check.where for check in by_name["addresses"]} == {"eu", "us"}
    assert {check.where for check in by_name["link"]} == {"eu to us", "us to eu"}
    assert {check.where for check in by_name["storage"]} == {"eu", "us"}
    assert by_name["same versions"][0].status == by_name["shared data"][0].status == "pass"
    link, source = link_of(config, "us", "eu", measured_links(config.data.cache))
    assert source == "measured" and link.up > 0 and link.down > 0 and link.rtt_s > 0


def test_nodes_are_called_by_their_region_where_they_are_alone_in_it():
    listed = [("10.1.0.1", "us"), ("10.2.0.1", "eu"), ("10.2.0.2", "eu"), ("10.3.0.1", None)]
    nodes = [
        {"NodeID": address, "NodeManagerAddress": address, "Labels": {REGION_LABEL: region} if region else {}}
        for address, region in listed
    ]
    assert list(doctor.named(nodes)) == ["us", "eu 10.2.0.1", "eu 10.2.0.2", "10.3.0.1"]


def test_nodes_are_called_by_the_label_that_the_run_names():
    node = {"NodeID": "a", "NodeManagerAddress": "10.1.0.1", "Labels": {REGION_LABEL: "us", "site": "eu"}}
    assert list(doctor.named([node], Whereabouts("site"))) == ["eu"]
