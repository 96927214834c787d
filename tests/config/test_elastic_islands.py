"""Islands by region, slots for more of them, and what does not go with them."""

import pytest

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.schema import island_names, region_of, slot_names
from ray_diloco.errors import ConfigError


def configured(*settings):
    config = compose([*settings]).config
    check(config)
    return config


def test_regions_name_their_islands_and_say_how_many_there_are():
    config = configured("islands.regions.us=1", "islands.regions.eu=2", "islands.eu-1.ranks=2")
    assert config.islands.count == 3
    assert island_names(config) == ["eu-0", "eu-1", "us-0"]
    assert [region_of(config, name) for name in ("eu-1", "us-0", "mars-0", "i0")] == ["eu", "us", "", ""]


def test_an_island_asks_for_nodes_of_its_region_and_with_its_accelerator():
    # Imports Ray.
    from ray_diloco.cluster.build import labels_of

    config = configured("islands.regions={eu: 1, us: 1}", "islands.accelerator=A100", "islands.us-0.accelerator=H100")
    region, accelerator = "ray.io/availability-region", "ray.io/accelerator-type"
    assert labels_of(config, "eu-0") == {region: "eu", accelerator: "A100"}
    assert labels_of(config, "us-0") == {region: "us", accelerator: "H100"}
    config = configured("islands.regions={eu: 1, us: 1}", "islands.region_label=site")
    assert labels_of(config, "us-0") == {"site": "us"}
    config = configured("islands.region_resource='at-{region}'", "islands.regions={eu: 1}", "islands.accelerator=A100")
    assert labels_of(config, "eu-0") == {accelerator: "A100"}


def test_a_label_or_a_resource_of_ones_own_says_where_relays_are_placed():
    from ray_diloco.cluster.build import anchor_settings
    from ray_diloco.cluster.misfortune import NO_FAULTS
    from ray_diloco.cluster.whereabouts import BY_LABEL, Whereabouts

    def where(*settings):
        return anchor_settings(configured("islands.regions={eu: 1}", *settings), NO_FAULTS).where

    assert where() == BY_LABEL
    assert where("islands.region_label=site") == Whereabouts("site")
    assert where("islands.region_resource=at-{region}") == Whereabouts(resource="at-{region}")


def test_slots_beyond_those_at_the_start_come_region_by_region():
    config = configured("islands.regions={eu: 1, us: 1, asia: 0}", "islands.max=3", "islands.us-2.micro_batch=2")
    slots = slot_names(config)
    assert slots[:5] == ["eu-0", "us-0", "asia-0", "asia-1", "eu-1"]
    assert sorted(slots) == sorted(f"{region}-{k}" for region in ("asia", "eu", "us") for k in range(3))


def test_without_a_limit_somebody_may_ask_for_sixty_four():
    assert slot_names(configured("islands.count=2"))[:3] == ["i0", "i1", "i2"]
    assert len(slot_names(configured("islands.count=2"))) == 64
    assert slot_names(configured("islands.names=[north,south]", "islands.max=3")) == ["north", "south", "i0"]


def test_islands_with_anchors_of_their_own_are_as_many_as_at_the_start():
    assert slot_names(configured("algorithm=noloco", "islands.count=4")) == ["i0", "i1", "i2", "i3"]


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        (109, ["islands.i2.ranks=2"]),
        (111, ["islands.regions.eu=-1", "islands.count=1"]),
        (113, ["islands.regions={'e u': 1}"]),
        (116, ["islands.min=3"]),
        (123, ["islands.names=[a,b]", "islands.regions.eu=2"]),
        (124, ["islands.count=3", "islands.regions.eu=2"]),
        (125, ["algorithm=noloco", "islands.count=4", "islands.max=6"]),
        (126, ["islands.region_resource=eu"]),
        (126, ["islands.region_resource={region}"]),
        (126, ["islands.region_resource=at-{region}-{region}"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_number(number, settings):
    with pytest.raises(ConfigError) as refused:
        configured(*settings)
    assert refused.value.number == number


def test_the_minimum_may_be_more_than_there_are_at_the_start_if_others_can_come():
    assert configured("islands.min=3", "islands.max=4").islands.min == 3
