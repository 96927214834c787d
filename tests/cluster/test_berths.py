"""Where anchor shards start, by hand."""

from ray_diloco.cluster.berths import Place, berths

PLACES = {
    "eu-0": Place("eu", ("n1", "n2")),
    "us-0": Place("us", ("n3",)),
    "us-1": Place("us", ("n3", "n4")),
    "asia-0": Place("asia", ("n5",)),
}


def test_a_shared_anchor_lives_on_the_nodes_of_the_islands_in_the_drivers_region():
    assert berths(PLACES, "eu").shared == ("n1", "n2")
    assert berths(PLACES, "asia").shared == ("n5",)


def test_it_lives_where_most_islands_are_if_none_is_in_the_drivers_region():
    assert berths(PLACES, "").shared == berths(PLACES, "mars").shared == ("n3", "n4")
    tied = {name: PLACES[name] for name in ("asia-0", "eu-0")}
    assert berths(tied, "").shared == ("n5",)


def test_without_regions_it_is_spread_over_the_nodes_of_all_islands_first_ranks_first():
    places = {"i0": Place("", ("a", "b")), "i1": Place("", ("c", "d")), "i2": Place("", ("a",))}
    assert berths(places, "").shared == ("a", "c", "b", "d")


def test_an_anchor_of_one_island_lives_beside_it():
    assert berths(PLACES, "eu").beside == {"eu-0": "n1", "us-0": "n3", "us-1": "n3", "asia-0": "n5"}
