import pytest

from ray_diloco.cluster import whereabouts
from ray_diloco.cluster.whereabouts import REGION_SHARE, Whereabouts
from ray_diloco.config.islands import IslandsConfig

LABELLED = {"Labels": {"ray.io/availability-region": "eu", "site": "us"}, "Resources": {"CPU": 8.0}}
RICH = {
    "Labels": {"ray.io/availability-region": "eu"},
    "Resources": {"CPU": 8.0, "node:10.1.0.1": 1.0, "at-us-east": 1.0},
}
NOWHERE = {"NodeID": "0"}


@pytest.mark.parametrize(
    ("where", "node", "region"),
    [
        (Whereabouts(), LABELLED, "eu"),
        (Whereabouts("site"), LABELLED, "us"),
        (Whereabouts("zone"), LABELLED, ""),
        (Whereabouts(), NOWHERE, ""),
        (Whereabouts(resource="at-{region}"), RICH, "us-east"),
        (Whereabouts(resource="at-{region}-east"), RICH, "us"),
        (Whereabouts(resource="region-{region}"), RICH, ""),
        (Whereabouts(resource="at-{region}-east"), {"Resources": {"at-east": 1, "at-us-east": 1}}, "us"),
        (Whereabouts(resource="at-{region}"), NOWHERE, ""),
    ],
)
def test_a_node_says_where_it_is_by_a_label_or_by_a_resource(where, node, region):
    assert where.region(node) == region


def test_who_is_to_be_in_a_region_asks_for_what_its_nodes_have(monkeypatch):
    monkeypatch.setattr(whereabouts, "nodes", lambda: [LABELLED, RICH])
    by_resource = Whereabouts.of(IslandsConfig(region_resource="at-{region}"))
    assert by_resource.inside("us-east") == {"resources": {"at-us-east": REGION_SHARE}}
    # A node may stand for several.
    monkeypatch.setattr(whereabouts, "nodes", lambda: [{"Resources": {"at-disk": 1, "at-eu": 1, "at-us": 1}}])
    assert by_resource.inside("us") == {"resources": {"at-us": REGION_SHARE}} and by_resource.inside("asia") == {}
    assert by_resource.demand("us-east") == {"at-us-east": REGION_SHARE}
    monkeypatch.setattr(whereabouts, "nodes", lambda: [LABELLED, RICH])
    assert Whereabouts.of(IslandsConfig(region_label="site")).inside("us") == {"label_selector": {"site": "us"}}


def test_a_region_without_a_node_binds_nobody(monkeypatch):
    monkeypatch.setattr(whereabouts, "nodes", lambda: [NOWHERE, RICH])
    assert Whereabouts().inside("mars") == Whereabouts(resource="at-{region}").inside("mars") == {}
    assert Whereabouts().demand("eu") == Whereabouts(resource="at-{region}").demand("") == {}
