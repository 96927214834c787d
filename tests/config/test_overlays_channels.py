"""Overlays, and channels: sections by free names, in every place where a configuration is written."""

from pathlib import Path

import pytest

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.show import config_yaml
from ray_diloco.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder of the test's own, so that ./conf is what the test writes."""
    monkeypatch.chdir(tmp_path)


def write(path: str, text: str) -> str:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return path


def refused(number: int, *arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(arguments)
    assert caught.value.number == number, str(caught.value)
    return caught.value


def test_an_overlay_lies_over_the_algorithm_of_the_same_layer_and_under_single_keys() -> None:
    composed = compose(["overlay=robust", "algorithm=decoupled", "merge.byzantine=2"])
    merge = composed.config.merge
    assert (merge.kind, merge.byzantine, composed.config.fragments.kind) == ("trimmed_mean", 2, "bins")
    assert composed.origins["merge.kind"] == "conf/overlay/robust.yaml"
    assert composed.config.overlay.name == "robust"


def test_an_overlay_of_an_experiment_lies_over_an_algorithm_that_an_argument_chooses() -> None:
    file = write("e.yaml", "algorithm: diloco\noverlay: robust\n")
    config = compose(["algorithm=decoupled"], file).config
    assert (config.algorithm.name, config.merge.kind) == ("decoupled", "trimmed_mean")
    assert compose(["algorithm=decoupled", "overlay=none"], file).config.merge.kind == "rda"


def test_an_overlay_of_ones_own_is_found_beside_the_work() -> None:
    write("conf/overlay/small.yaml", "codec:\n  up:\n    kind: int4\n")
    assert compose(["overlay=small"]).config.codec.up.kind == "int4"
    write("conf/overlay/wrong.yaml", "model:\n  name: tiny\n")
    assert "a file of overlay sets blocks" in refused(101, "overlay=wrong").what


def test_a_channel_has_the_keys_and_defaults_of_the_blocks() -> None:
    composed = compose(["channels.fast.fragments.kind=random", "channels.fast.outer.lr=1"])
    fast = composed.config.channels["fast"]
    assert (fast.H, fast.signal, fast.fragments.kind, fast.outer.lr) == (1, "parameters", "random", 1.0)
    assert composed.origins["channels.fast.outer.lr"] == "argument"
    assert composed.origins["channels.fast.H"] == "default"


def test_a_mistyped_key_of_a_channel_is_refused() -> None:
    assert "did you mean 'channels.fast.fragments.kind'?" in refused(101, "channels.fast.fragments.knid=random").mend


@pytest.mark.parametrize("value", ["[1]", "3", "x"])
def test_channels_are_a_mapping(value: str) -> None:
    assert "must be a mapping" in refused(103, f"channels={value}").what


def test_a_channel_cannot_be_called_like_the_exchange_of_the_run_or_like_no_file() -> None:
    for name in ("main", "a b"):
        with pytest.raises(ConfigError) as caught:
            check(compose([], settings={"channels": {name: {"H": 2}}}).config)
        assert caught.value.number == 113


def test_a_recorded_configuration_with_channels_composes_again() -> None:
    first = compose(["algorithm=sparta_diloco"])
    file = write("again.yaml", config_yaml(first))
    assert compose([], file).config == first.config
