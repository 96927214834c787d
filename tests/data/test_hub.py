"""Hugging Face datasets: local folders of either kind, streamed or stored, and a hub that is there or is not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data.blocks import prepare
from ray_diloco.data.progress import Reporter
from ray_diloco.data.sources import open_source
from ray_diloco.errors import DataError

TEXTS = [f"document {number}" for number in range(600)]


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    return caught.value


@pytest.fixture(autouse=True)
def no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` stores below the test's folder and asks nobody."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def config(folder: Path | str, **settings: object) -> DataConfig:
    return DataConfig(source="hf", dataset=str(folder), sequence_length=32, **settings)


def documents(folder: Path | str, **settings: object) -> list[str]:
    return list(open_source(config(folder, **settings)).documents())


def rows(texts: list[str | None] = TEXTS) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"number": list(range(len(texts))), "text": texts})


def saved_alone(folder: Path) -> None:
    rows().save_to_disk(folder)


def saved_with_splits(folder: Path) -> None:
    datasets.DatasetDict(train=rows(), other=rows(["x"])).save_to_disk(folder)


def parquet_folder(folder: Path) -> None:
    folder.mkdir()
    for part, start in (("00", 0), ("01", 300)):
        rows(TEXTS[start : start + 300]).to_parquet(folder / f"train-{part}.parquet")


def jsonl_folder(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


KINDS = [saved_alone, saved_with_splits, parquet_folder, jsonl_folder]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("build", KINDS)
def test_a_local_folder_of_any_kind_yields_its_documents(
    tmp_path: Path, build: Callable[[Path], None], streaming: bool
) -> None:
    build(tmp_path / "corpus")
    assert documents(tmp_path / "corpus", streaming=streaming) == TEXTS


@pytest.mark.parametrize("build", KINDS)
def test_stored_and_streamed_give_the_same_blocks_from_one_cache(tmp_path: Path, build: Callable[[Path], None]) -> None:
    build(tmp_path / "corpus")
    stored, streamed = (
        prepare(config(tmp_path / "corpus", streaming=streaming, cache=str(tmp_path / cache)), TokenizerConfig())
        for streaming, cache in ((False, "one"), (True, "two"))
    )
    assert stored.digest == streamed.digest
    assert stored.folder.name == streamed.folder.name


def test_another_split_can_be_read(tmp_path: Path) -> None:
    saved_with_splits(tmp_path / "corpus")
    assert documents(tmp_path / "corpus", split="other") == ["x"]


def test_streaming_reads_no_more_documents_than_asked_for(tmp_path: Path) -> None:
    jsonl_folder(tmp_path / "corpus")
    assert documents(tmp_path / "corpus", streaming=True, max_documents=2) == TEXTS[:2]
    assert not list((tmp_path / "stored").rglob("*.arrow"))


def test_null_and_empty_rows_add_nothing(tmp_path: Path) -> None:
    rows(["a", None, "", "b"]).save_to_disk(tmp_path / "corpus")
    assert documents(tmp_path / "corpus") == ["a", "b"]


def test_a_changed_folder_has_another_identity(tmp_path: Path) -> None:
    jsonl_folder(tmp_path / "corpus")
    source = open_source(config(tmp_path / "corpus", cache=str(tmp_path / "cache")))
    before = source.identity(Reporter())
    assert source.identity(Reporter()) == before
    with (tmp_path / "corpus" / "train.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert source.identity(Reporter()) != before


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize(
    ("settings", "number", "text"),
    [
        ({"split": "nope"}, 309, "nope"),
        ({"text_column": "body"}, 306, "there is no column 'body'; columns: "),
    ],
)
def test_a_missing_split_or_column_is_named(
    tmp_path: Path, build: Callable[[Path], None], streaming: bool, settings: dict[str, str], number: int, text: str
) -> None:
    build(tmp_path / "corpus")
    error = refused(lambda: documents(tmp_path / "corpus", streaming=streaming, **settings))
    assert error.number == number
    assert text in error.what
    assert "text" in error.what or "train" in error.what, "what there is instead is said"


def test_a_column_of_numbers_is_no_text(tmp_path: Path) -> None:
    saved_alone(tmp_path / "corpus")
    error = refused(lambda: documents(tmp_path / "corpus", text_column="number"))
    assert (error.number, "column 'number' holds int" in error.what) == (307, True)


def test_an_unknown_configuration_is_named(tmp_path: Path) -> None:
    parquet_folder(tmp_path / "corpus")
    error = refused(lambda: documents(tmp_path / "corpus", dataset_config="large"))
    assert (error.number, "'large'" in error.what) == (309, True)


def test_a_dataset_must_be_given() -> None:
    error = refused(lambda: open_source(DataConfig(source="hf")))
    assert (error.number, "data.dataset" in error.what) == (301, True)


@pytest.mark.parametrize("name", ["./corpus", "/nowhere/corpus", "~/nowhere/corpus"])
def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(name: str) -> None:
    error = refused(lambda: open_source(config(name)))
    assert (error.number, f"{name}: there is no such folder" in error.what) == (309, True)


def test_without_a_network_the_error_says_so_in_one_line_and_how_to_go_on(tmp_path: Path) -> None:
    error = refused(lambda: prepare(config("someone/corpus", cache=str(tmp_path)), TokenizerConfig()))
    assert error.number == 309
    assert "someone/corpus" in error.what
    assert "\n" not in error.what
    assert "HF_HUB_OFFLINE is set" in error.mend


FROM_THE_HUB = """
import io, sys
import hub_server
import os
os.environ["HF_ENDPOINT"] = hub_server.start()
import datasets
from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data.blocks import prepare

def push(commit, texts):
    content = io.BytesIO()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(content)
    hub_server.Hub.push(commit, **{"train.parquet": content.getvalue()})

for streaming in (False, True):
    for commit in "aab":
        push(commit, [f"document {commit} {number}" for number in range(600)])
        data = DataConfig(source="hf", dataset=hub_server.REPOSITORY, sequence_length=32)
        data.streaming, data.cache = streaming, f"{sys.argv[1]}/{streaming}"
        corpus = prepare(data, TokenizerConfig())
        print(corpus.digest, corpus.documents)
"""


def test_a_dataset_on_the_hub_is_read_stored_or_streamed_and_a_new_commit_is_seen(tmp_path: Path) -> None:
    """In a process of its own, because the address of the hub is read when `datasets` is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", FROM_THE_HUB, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, again, changed = done.stdout.splitlines()[:3]
    assert done.stdout.splitlines()[3:] == [first, again, changed]
    assert first == again != changed
    assert first.endswith(" 600")
