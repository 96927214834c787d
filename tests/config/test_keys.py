import dataclasses

import pytest

from ray_diloco.config.keys import canonical, dotted, leaves, nearest, schema_keys
from ray_diloco.config.schema import Config
from ray_diloco.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("vocab_size", "tokenizer.vocab_size"),
        ("islands.count", "islands.count"),
        ("islands.us.ranks", "islands.overrides.us.ranks"),
        ("islands.overrides.us.ranks", "islands.overrides.us.ranks"),
        ("islands.us.data", "islands.overrides.us.data"),
        ("islands.us.data.path", "islands.overrides.us.data_path"),
        ("islands.us.data.name", "islands.overrides.us.data"),
        ("islands.us.data.split", "islands.overrides.us.data_settings.split"),
        ("inner.lr", "inner.lr"),
    ],
)
def test_short_forms_stand_for_a_place_in_the_schema(written: str, meant: str) -> None:
    assert dotted(canonical(tuple(written.split(".")))) == meant


def test_only_a_mapping_below_islands_is_an_island() -> None:
    assert canonical(("islands", "cuont")) == ("islands", "cuont")
    assert canonical(("islands", "us"), holds_keys=True) == ("islands", "overrides", "us")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("inner.learning_rate", "inner.lr"),
        ("inner.h", "inner.H"),
        ("inner.lrr", "inner.lr"),
        ("innr.H", "inner.H"),
        ("outer.momentun", "outer.momentum"),
        ("lr", "inner.lr"),
        ("batch_size", "inner.micro_batch"),
        ("islands.us.rank", "islands.overrides.us.ranks"),
        ("islands.us.data.splits", "data.split"),
        ("checkpoint.keep_lasts", "checkpoint.keep_last"),
    ],
)
def test_an_unknown_key_names_the_nearest_and_the_valid_ones(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(leaves(1, tuple(key.split(".")), "argument 'x'"))
    error = caught.value
    assert error.number == 101
    assert "argument 'x'" in error.what
    assert f"did you mean {meant!r}?" in error.mend


def test_an_unknown_key_lists_the_keys_of_its_section() -> None:
    with pytest.raises(ConfigError) as caught:
        list(leaves(1, ("stale", "quux"), "here"))
    assert caught.value.mend.startswith("keys of 'stale': age_power, max_age, reanchor, own_fresh, scale, direction, ")


def test_a_key_below_a_single_value_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"'inner\.lr' is one value \(a number\)") as caught:
        list(leaves({"x": 1}, ("inner", "lr"), "here"))
    assert caught.value.number == 101


def test_one_value_for_a_section_is_refused_with_its_keys() -> None:
    with pytest.raises(ConfigError, match="'outer' is a section") as caught:
        list(leaves(0.7, ("outer",), "here"))
    assert caught.value.number == 103
    assert "outer.lr, outer.momentum" in caught.value.mend


def test_leaves_are_the_single_values_of_a_mapping_and_empty_sections_have_none() -> None:
    found = list(leaves({"H": 3, "schedule": {"kind": "cosine"}, "optimizer": {}}, ("inner",), "here"))
    assert found == [(("inner", "H"), 3), (("inner", "schedule", "kind"), "cosine")]


def test_names_below_model_config_are_free_at_any_depth() -> None:
    found = list(leaves({"rope": {"theta": 1.0}, "layers": 3}, ("model", "config"), "here"))
    assert found == [(("model", "config", "rope", "theta"), 1.0), (("model", "config", "layers"), 3)]


def test_the_schema_keys_cover_every_section() -> None:
    assert {key[0] for key in schema_keys()} == {field.name for field in dataclasses.fields(Config)}
    assert ("inner", "schedule", "warmup_steps") in schema_keys()


def test_the_nearest_name_is_found_whatever_its_case_and_not_at_any_price() -> None:
    assert nearest("DILOCO", ["local_sgd", "diloco"]) == "diloco"
    assert nearest("zebra", ["local_sgd", "diloco"]) is None
