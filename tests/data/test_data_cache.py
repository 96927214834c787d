"""The cache: folders appear whole or not at all, and a changed file is never taken for the one before."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_diloco.data import cache
from ray_diloco.data.cache import cache_folder, files_digest, key_of, publish
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

DAY_S = 86_400


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "ray_diloco"
    assert cache_folder("~/blocks") == tmp_path / "blocks"


def test_keys_tell_values_and_their_borders_apart() -> None:
    keys = [key_of("a", "b"), key_of("ab"), key_of("a", ["b"]), key_of("a", 1), key_of("a", "1"), key_of("a", None)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_a_folder_is_published_with_its_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "blocks" / "key"
    with publish(target) as draft:
        (draft / "a").write_text("a")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["key"]
    assert (target / "a").read_text() == "a"


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), publish(tmp_path / "key") as draft:
        (draft / "a").write_text("a")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_of_two_preparers_at_once_the_first_to_finish_wins(tmp_path: Path) -> None:
    target = tmp_path / "key"
    with publish(target) as slow:
        (slow / "by").write_text("slow")
        with publish(target) as fast:
            (fast / "by").write_text("fast")
    assert (target / "by").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_a_damaged_folder_is_replaced_when_that_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "key"
    target.mkdir()
    (target / "half").write_text("")
    with publish(target, replace=True) as draft:
        (draft / "whole").write_text("")
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_cache_that_cannot_be_written_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError) as caught, publish(tmp_path / "file" / "key"):
        pass
    assert (caught.value.number, "Not a directory" in caught.value.what) == (333, True)


def test_what_a_killed_preparer_left_is_swept_after_a_day(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=60)
    names = {
        "old": f".key-{socket.gethostname()}-{dead.pid}-00000001",
        "fresh": f".key-{socket.gethostname()}-{dead.pid}-00000002",
        "alive": f".key-{socket.gethostname()}-{os.getpid()}-00000003",
        "elsewhere": f".key-another_host-{dead.pid}-00000004",
    }
    for kind, name in names.items():
        (tmp_path / name).mkdir()
        if kind != "fresh":
            os.utime(tmp_path / name, (time.time() - 2 * DAY_S,) * 2)
    with publish(tmp_path / "key"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"key", names["fresh"], names["alive"], names["elsewhere"]}


def digest(*files: Path, to: Path) -> str:
    return files_digest(files, to, Reporter())


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands ten seconds after the files of the test were written."""
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10_000_000_000)


def test_files_are_known_by_content_order_and_borders(tmp_path: Path) -> None:
    for name, content in (("a", "one"), ("b", "two"), ("copy", "one"), ("ab", "onetwo"), ("empty", "")):
        (tmp_path / name).write_text(content)
    a, b, copy, ab, empty = (tmp_path / name for name in ("a", "b", "copy", "ab", "empty"))
    to = tmp_path / "cache"
    assert digest(a, b, to=to) == digest(copy, b, to=to)
    different = [digest(*files, to=to) for files in ((a, b), (b, a), (ab,), (ab, empty), (empty, ab), ())]
    assert len(set(different)) == len(different)


@pytest.mark.usefixtures("later")
def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    first = digest(path, to=tmp_path / "cache")
    monkeypatch.setattr(cache, "_read_digest", None)
    assert digest(path, to=tmp_path / "cache") == first


@pytest.mark.usefixtures("later")
def test_a_change_that_keeps_path_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    stamp = path.stat()
    first = digest(path, to=tmp_path / "cache")
    path.write_text("two")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert digest(path, to=tmp_path / "cache") != first


def test_files_that_have_just_been_written_are_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    digest(path, to=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("later")
def test_a_cache_that_cannot_be_written_does_not_hinder_reading(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(digest(tmp_path / "a", to=tmp_path / "cache")) == 32


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        digest(tmp_path / "a", to=tmp_path)
    assert (caught.value.number, str(tmp_path / "a") in caught.value.what) == (303, True)
