from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_diloco.config.compose import compose, composed_from
from ray_diloco.config.islands import IslandOverrideConfig, IslandsConfig
from ray_diloco.config.keys import dotted, schema_keys
from ray_diloco.config.schema import Config, DataConfig, ExportConfig, ModelConfig
from ray_diloco.config.show import config_yaml
from ray_diloco.config.typed import leaf_values

SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text()
NAMES = st.text("abcdefgh_", min_size=1, max_size=6)


def test_every_value_is_shown_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("inner: {H: 20}\n")
    text = config_yaml(compose(["outer.lr=0.3"], "e.yaml"))
    lines = [line.split() for line in text.splitlines()]
    assert ["H:", "20", "#", "e.yaml"] in lines
    assert ["hidden_size:", "160", "#", "conf/model/tiny.yaml"] in lines
    assert ["micro_batch:", "4", "#", "default"] in lines
    assert ["lr:", "0.3", "#", "argument"] in lines


def test_origins_stand_in_one_column() -> None:
    lines = config_yaml(compose()).splitlines()[1:]
    assert len({line.rindex("# ") for line in lines if "# " in line}) == 1


def test_the_print_is_plain_yaml_with_every_key_of_the_schema() -> None:
    shown = yaml.safe_load(config_yaml(compose()))
    assert shown["observe"]["wandb"] == "off"
    assert shown["inner"]["optimizer"]["eps"] == 1e-8
    for key in schema_keys():
        section: Any = shown
        for name in key:
            assert name in section, dotted(key)
            section = section[name]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["experiment=demo"],
        ["model=llama_1b", "algorithm=local_sgd"],
        ["islands.names=[us,no]", "islands.no.ranks=2", "islands.us.data=text", "islands.us.data.path=a.txt"],
        ["run.root=\\${HOME}/x", "export.prompt=a: b # \\n"],
    ],
)
def test_config_takes_the_print_back(arguments: list[str], tmp_path: Path) -> None:
    composed = compose(arguments)
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(composed))
    again = compose([], str(file))
    assert again.config == composed.config
    assert set(again.origins.values()) == {str(file)}
    assert compose(["inner.H=7"], str(file)).config.inner.H == 7


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    prompt=st.text(),
    path=st.none() | st.text(),
    model=st.dictionaries(NAMES, SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(NAMES, SCALARS, min_size=1)),
    body=st.text(),
)
def test_any_values_survive_the_way_through_the_print(
    prompt: str, path: str | None, model: dict[str, Any], body: str, tmp_path: Path
) -> None:
    override = IslandOverrideConfig(data_path=path, data_settings={"text_column": body})
    config = Config(
        model=ModelConfig(config=model),
        data=DataConfig(path=path),
        export=ExportConfig(prompt=prompt),
        islands=IslandsConfig(overrides={"i0": override}),
    )
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(composed_from(config)), encoding="utf-8")
    assert dict(leaf_values(compose([], str(file)).config)) == dict(leaf_values(config))
