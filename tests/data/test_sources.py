"""The standard library as a corpus, a user's own function, and the identity of a source's content."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ray_diloco.config.schema import DataConfig
from ray_diloco.data.progress import Reporter
from ray_diloco.data.sources import open_source
from ray_diloco.errors import DataError


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    return caught.value


def documents(config: DataConfig) -> list[str]:
    return list(open_source(config).documents())


def identity(config: DataConfig) -> str:
    return open_source(config).identity(Reporter())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "lib"
    for name in (
        "os.py",
        "abc.py",
        "json/__init__.py",
        "json/tool.py",
        "json/tests/test_tool.py",
        "test/test_os.py",
        "idlelib/idle_test/test_run.py",
        "site-packages/numpy.py",
        "dist-packages/apt.py",
        "__pycache__/os.py",
        "LICENSE.txt",
        "lib-dynload/math.so",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name.endswith("__init__.py") else f"# {name}\n")
    (root / "sitecustomize.py").symlink_to(tmp_path / "not_there.py")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    return root


def test_stdlib_is_the_modules_in_the_order_of_their_paths_without_tests_and_packages(library: Path) -> None:
    assert documents(DataConfig()) == ["# abc.py\n", "# json/tool.py\n", "# os.py\n"]


def test_a_library_without_sources_is_an_error_that_names_its_folder(library: Path) -> None:
    for path in library.rglob("*.py"):
        path.unlink()
    error = refused(lambda: documents(DataConfig()))
    assert (error.number, str(library) in error.what) == (308, True)


def test_the_real_standard_library_is_megabytes_of_python() -> None:
    config = DataConfig()
    total = open_source(config).total_bytes
    assert total is not None
    assert total > 8_000_000
    first = documents(DataConfig(max_documents=3))
    assert len(first) == 3
    assert first == documents(DataConfig(max_documents=3))


def test_equal_content_has_an_equal_identity_wherever_it_stands(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("a")
        (tmp_path / folder / "b.txt").write_text("b")
    one, two = (
        DataConfig(source="text", path=str(tmp_path / name), cache=str(tmp_path / "cache")) for name in ("one", "two")
    )
    assert identity(one) == identity(two)
    (tmp_path / "two" / "a.txt").rename(tmp_path / "two" / "c.txt")
    assert identity(one) != identity(two), "the order of documents is part of the content"


def test_a_change_is_seen_though_size_and_time_stamp_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    config = DataConfig(source="text", path=str(path), cache=str(tmp_path / "cache"))
    path.write_text("before")
    stamp = path.stat()
    before = identity(config)
    path.write_text("after!")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert identity(config) != before


@pytest.mark.parametrize("change", [{"text_column": "body"}, {"max_documents": 3}, {"source": "text"}])
def test_what_is_read_of_the_files_is_part_of_the_identity(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "body": "b"}\n')
    plain = {"source": "jsonl", "path": str(path), "cache": str(tmp_path / "cache")}
    assert identity(DataConfig(**{**plain, **change})) != identity(DataConfig(**plain))


def test_an_unknown_source_is_answered_with_those_that_exist() -> None:
    error = refused(lambda: open_source(DataConfig(source="sdtlib")))
    assert error.number == 301
    assert "sdtlib is unknown; there are stdlib, text, jsonl, csv, parquet, hf" in error.what


class Numbered(list[str]):
    """Documents that say what they are."""

    identity = "corpus-7"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("users_corpus")
    monkeypatch.setitem(sys.modules, "users_corpus", made)
    return made


def built() -> DataConfig:
    return DataConfig(builder="users_corpus:build", text_column="body")


def test_a_builder_is_given_the_configuration_and_yields_documents(module: ModuleType) -> None:
    module.build = lambda config: (f"{config.text_column} {i}" for i in range(3))
    assert documents(built()) == ["body 0", "body 1", "body 2"]


def test_a_builder_is_identified_by_its_documents(module: ModuleType) -> None:
    module.build = lambda config: ["ab", "c"]
    first = identity(built())
    module.build = lambda config: iter(("ab", "", "c"))
    assert identity(built()) == first, "an empty document adds nothing"
    for other in (["a", "bc"], ["abc"], ["ab", "c", "d"], ["c", "ab"]):
        module.build = lambda config, other=other: other
        assert identity(built()) != first


def test_a_builder_may_name_its_content_so_that_it_is_not_read_at_every_start(module: ModuleType) -> None:
    module.build = lambda config: Numbered()
    assert identity(built()) == "builder-users_corpus:build-corpus-7"


def broken(config: DataConfig) -> Iterator[str]:
    yield "one"
    raise KeyError("two")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (broken, "raised KeyError: 'two'"),
        (lambda config: 1 / 0, "raised ZeroDivisionError"),
        (lambda config: None, "returned NoneType, not an iterable"),
        (lambda config: "one long text", "returned str, not an iterable"),
        (lambda config: ["a", b"b"], "yielded bytes b'b', not str"),
    ],
)
def test_what_a_builder_does_wrong_is_said(module: ModuleType, build: Callable[..., object], text: str) -> None:
    module.build = build
    error = refused(lambda: documents(built()))
    assert (error.number, "data.builder=users_corpus:build" in error.what) == (311, True)
    assert text in error.what


def test_half_a_surrogate_pair_is_no_text(module: ModuleType) -> None:
    module.build = lambda config: ["fine", "bad \ud800"]
    error = refused(lambda: identity(built()))
    assert (error.number, "document 1 holds U+D800 at character 4" in error.what) == (304, True)
