"""The files under conf/ are documentation as much as settings: complete, commented, and in step with the schema."""

from pathlib import Path

import pytest

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.groups import packaged_conf
from ray_diloco.config.keys import dotted, schema_keys
from ray_diloco.config.schema import Config
from ray_diloco.config.typed import leaf_values
from ray_diloco.config.yamlfile import read_file

FILES = sorted(packaged_conf().rglob("*.yaml"))
NEEDS = {
    "text": ["data.path=x.txt"],
    "jsonl": ["data.path=x.jsonl"],
    "parquet": ["data.path=x.parquet"],
    "csv": ["data.path=x.csv"],
    "hf": ["data.dataset=a/b"],
    "robust": ["islands.count=3"],
}


@pytest.mark.parametrize("file", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_comment_stands_above_every_key(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    for key, line in read_file(file).lines.items():
        above, indent = lines[line - 2], len(lines[line - 1]) - len(lines[line - 1].lstrip())
        assert above == f"{' ' * indent}# {above.strip()[2:]}", f"{dotted(key)} in line {line} has no comment"
        assert len(above.strip()) > 3


def test_config_yaml_lists_every_key_of_the_schema_with_its_default_in_order() -> None:
    values = read_file(packaged_conf() / "config.yaml").values
    assert list(leaf_values(values)) == list(leaf_values(Config()))
    assert {key for key, _ in leaf_values(values)} == set(schema_keys())


@pytest.mark.parametrize(
    "choice",
    [f"{file.parent.name}={file.stem}" for file in FILES if file.parent.name not in ("conf", "compare", "sweep")],
)
def test_every_file_composes_and_passes_the_check(choice: str) -> None:
    check(compose([choice, *NEEDS.get(choice.partition("=")[2], [])]).config)


def test_every_algorithm_file_begins_with_its_source_and_what_it_changes() -> None:
    for file in (packaged_conf() / "algorithm").glob("*.yaml"):
        first, second = file.read_text(encoding="utf-8").splitlines()[:2]
        assert first.startswith("# Source: "), file
        assert second.startswith("# Changes: "), file


def test_diloco_has_the_values_of_the_paper() -> None:
    config = compose(["algorithm=diloco"]).config
    assert config.inner.H == 500
    assert (config.outer.kind, config.outer.lr, config.outer.momentum) == ("nesterov", 0.7, 0.9)
    assert (config.inner.optimizer.name, config.inner.lr, config.inner.optimizer.weight_decay) == ("adamw", 4e-4, 0.1)
    assert config.quorum.kind == "all"


def test_the_demo_warns_of_nothing() -> None:
    config = compose(["experiment=demo"]).config
    assert check(config) == []
    assert (config.run.name, config.islands.count, config.model.name) == ("demo", 2, "tiny")


@pytest.mark.parametrize(
    ("choice", "vocab_size", "millions"),
    [("tiny", 258, 1.01), ("llama_150m", 32000, 144.64), ("llama_1b", 128256, 1235.8)],
)
def test_the_models_have_the_size_that_they_say(choice: str, vocab_size: int, millions: float) -> None:
    shape = compose([f"model={choice}"]).config.model.config
    d, heads, groups = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = 2 * d * d + 2 * d * (d // heads) * groups
    layer = attention + 3 * d * shape["intermediate_size"] + 2 * d
    embeddings = vocab_size * d * (1 if shape["tie_word_embeddings"] else 2)
    total = shape["num_hidden_layers"] * layer + embeddings + d
    assert total / 1e6 == pytest.approx(millions, abs=0.06)
    assert d % heads == 0
