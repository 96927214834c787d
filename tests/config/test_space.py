"""What a sweep tries: domains, draws and names."""

import re

import pytest

from ray_diloco.config.space import Between, Values, draws, grid, label_of, read_domain, short_names, size_of


def test_domains_are_read_as_they_are_written():
    assert read_domain([0.5, "adamw", None]) == Values((0.5, "adamw", None))
    assert read_domain({"uniform": [0, 0.9]}) == Between(0, 0.9)
    assert read_domain({"log_integers": [8, 512]}) == Between(8, 512, log=True, whole=True)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ([], "has no values"),
        ([1, 1], "has a value twice"),
        (0.5, "is neither a list"),
        ({"normal": [0, 1]}, "is neither a list"),
        ({"uniform": [1]}, "takes .low, high."),
        ({"uniform": [2, 1]}, "the first is lower"),
        ({"log_uniform": [0, 1]}, "above 0"),
        ({"integers": [1, 2.5]}, "whole numbers"),
        ({"uniform": [0, float("inf")]}, "finite"),
    ],
)
def test_what_is_no_domain_is_refused_with_the_reason(written, why):
    with pytest.raises(ValueError, match=why):
        read_domain(written)


def test_a_grid_has_every_combination_in_order():
    space = {"inner.H": Values((20, 50)), "outer.lr": Values((0.5, 1.0))}
    assert [tuple(each.values()) for each in grid(space)] == [(20, 0.5), (20, 1.0), (50, 0.5), (50, 1.0)]
    assert size_of(space) == 4


def test_draws_differ_come_from_the_seed_and_lie_inside():
    space = {"a": Between(0.1, 10.0, log=True), "b": Between(1, 3, whole=True), "c": Values(("x", "y"))}
    ten = list(draws(space, 10, seed=1))
    assert ten == list(draws(space, 10, seed=1)) != list(draws(space, 10, seed=2))
    assert ten[:4] == list(draws(space, 4, seed=1))
    assert all(0.1 <= each["a"] <= 10 and each["b"] in (1, 2, 3) and each["c"] in "xy" for each in ten)
    assert len({each["a"] for each in ten}) == 10
    assert all(float(f"{each['a']:.4g}") == each["a"] for each in ten)


def test_draws_end_when_the_space_does():
    space = {"b": Between(1, 3, whole=True), "c": Values(("x", "y"))}
    assert len(list(draws(space, 50, seed=0))) == 6


def test_keys_are_shortened_as_far_as_they_stay_apart():
    assert short_names(["inner.H", "inner.lr", "outer.lr"]) == {
        "inner.H": "H",
        "inner.lr": "inner.lr",
        "outer.lr": "outer.lr",
    }
    assert short_names(["algorithm", "outer.momentum"]) == {"algorithm": "algorithm", "outer.momentum": "momentum"}


def test_labels_read_well_and_no_two_parameters_share_one():
    assert label_of({"inner.H": 20, "outer.lr": 0.7, "outer.momentum": 0.0}) == "H20-lr0.7-momentum0"
    odd = [{"data.path": path} for path in ("a/b.txt", "a b.txt", "x" * 60, "x" * 61)]
    labels = [label_of(each) for each in odd]
    assert len(set(labels)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,43}", label) for label in labels)
    assert label_of({"outer.lr": 1e30}) == "lr1e30"
