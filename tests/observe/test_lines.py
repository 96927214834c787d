import json
import math
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.errors import CheckpointError
from ray_diloco.observe.lines import LineFile, read_lines, replace_text, to_json


def test_not_a_number_and_infinities_become_null_wherever_they_stand() -> None:
    text = to_json({"loss": math.nan, "list": [math.inf, 1.5], "deep": {"x": -math.inf}, "np": np.float32("nan")})
    assert json.loads(text) == {"loss": None, "list": [None, 1.5], "deep": {"x": None}, "np": None}


def test_numpy_scalars_and_paths_are_written_as_plain_values() -> None:
    assert json.loads(to_json({"n": np.int64(3), "x": np.float32(0.5), "p": Path("a/b")})) == {
        "n": 3,
        "x": 0.5,
        "p": "a/b",
    }


def test_a_value_that_has_no_json_form_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object has no place"):
        to_json({"x": object()})


def test_every_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    log = LineFile(tmp_path / "deep" / "log.jsonl")
    log.append({"a": 1})
    assert (tmp_path / "deep" / "log.jsonl").read_text() == '{"a": 1}\n'


def test_reopening_keeps_what_was_there_and_knows_the_last_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    LineFile(path).append({"a": 1})
    again = LineFile(path)
    assert (again.last, again.cut_bytes) == ({"a": 1}, 0)
    again.append({"a": 2})
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]


@given(st.integers(min_value=0, max_value=200))
def test_a_file_cut_at_any_byte_opens_with_the_whole_lines_before_the_cut(cut: int) -> None:
    records = [{"n": n, "text": "ünïcode" * n} for n in range(4)]
    content = "".join(to_json(record) + "\n" for record in records).encode()[:cut]
    whole = content.count(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(content)
        assert list(read_lines(path)) == records[:whole]
        log = LineFile(path)
        assert log.cut_bytes == len(content) - len(b"".join(content.splitlines(keepends=True)[:whole]))
        log.append({"n": "next"})
        log.close()
        assert list(read_lines(path)) == [*records[:whole], {"n": "next"}]


def test_a_whole_line_that_is_not_ours_is_an_error_and_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\nhello\n')
    with pytest.raises(CheckpointError, match=r"RD-581: line 2 of .*hello"):
        LineFile(path)
    with pytest.raises(CheckpointError, match="line 2"):
        list(read_lines(path))
    assert path.read_text() == '{"a": 1}\nhello\n'


def test_a_missing_file_reads_as_empty(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_a_path_that_cannot_be_opened_is_a_numbered_error(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"RD-580: .*log\.jsonl cannot be opened"):
        LineFile(tmp_path / "log.jsonl")


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    log = LineFile(tmp_path / "log.jsonl")
    threads = [threading.Thread(target=lambda: [log.append({"x": "y" * 500}) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert list(read_lines(tmp_path / "log.jsonl")) == [{"x": "y" * 500}] * 200


def test_replacing_leaves_no_other_file_behind(tmp_path: Path) -> None:
    replace_text(tmp_path / "a.json", "one")
    replace_text(tmp_path / "a.json", "two")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.json": "two"}


def test_a_failed_replacement_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "inside").write_text("old")
    with pytest.raises(CheckpointError, match="RD-582"):
        replace_text(tmp_path / "a", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
