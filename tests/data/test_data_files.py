"""Local files: what a path stands for, what each format yields, and what each mistake says."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from ray_diloco.config.schema import DataConfig
from ray_diloco.data import files
from ray_diloco.data.files import find_files
from ray_diloco.data.sources import open_source
from ray_diloco.errors import EXIT_BAD_INPUT, DataError


def documents(source: str, path: Path | str, **settings: object) -> list[str]:
    return list(open_source(DataConfig(source=source, path=str(path), **settings)).documents())


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    assert caught.value.exit_code == EXIT_BAD_INPUT
    assert caught.value.mend
    return caught.value


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md", "odd,name[1].txt"):
        write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a.txt", ["a.txt"]),
        ("*.txt", ["a.txt", "b.txt", "odd,name[1].txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "deep/er/c.txt", "odd,name[1].txt"]),
        (".", ["a.txt", "b.txt", "deep/er/c.txt", "odd,name[1].txt"]),
        ("deep", ["deep/er/c.txt"]),
        ("deep/**/*.md, b.txt,*.txt", ["a.txt", "b.txt", "deep/d.md", "odd,name[1].txt"]),
        ("odd,name[1].txt", ["odd,name[1].txt"]),
    ],
)
def test_a_path_stands_for_these_files_once_each_and_sorted(tree: Path, path: str, found: list[str]) -> None:
    assert [str(file.relative_to(tree)) for file in find_files(path, (".txt",))] == found


def test_a_home_folder_is_expanded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert find_files("~/a.txt", ()) == [tree / "a.txt"]


def test_a_pattern_that_matches_nothing_is_named_even_beside_one_that_does(tree: Path) -> None:
    error = refused(lambda: documents("text", "*.txt,nothing/*.txt"))
    assert error.number == 302
    assert "'nothing/*.txt'" in error.what
    assert str(tree) in error.what


def test_local_files_need_a_path() -> None:
    error = refused(lambda: open_source(DataConfig(source="jsonl")))
    assert (error.number, "data.path" in error.what) == (301, True)


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "zwei\r\nZeilen\n\n")
    write(tmp_path / "b.txt", "")
    write(tmp_path / "c.txt", "\ufeffkein Ende")
    assert documents("text", tmp_path) == ["zwei\r\nZeilen\n\n", "\ufeffkein Ende"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("a\n é😀"), max_size=60), size=st.integers(4, 20))
def test_a_large_text_file_travels_in_pieces_that_join_to_the_same_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, size: int
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", size)
    path = write(tmp_path / "a.txt", text)
    pieces = list(files.read_text(path))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in pieces) <= 2 * size


def test_pieces_end_behind_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 8)
    path = write(tmp_path / "a.txt", "one\ntwo\nthree\n")
    assert [piece.text for piece in files.read_text(path)] == ["one\ntwo\n", "three\n"]


@pytest.mark.parametrize("offset", [0, 3, 8, 13, 40])
def test_invalid_utf_8_names_the_file_and_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 8)
    path = write(tmp_path / "a.txt", b"x" * offset + b"\xff" + b"y" * 9)
    error = refused(lambda: documents("text", path))
    assert error.number == 304
    assert f"{path} is not UTF-8: byte 0xff at offset {offset} " in error.what


def test_a_character_cut_off_at_the_end_of_the_file_is_invalid(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "ab😀".encode()[:-1])
    assert "byte 0xf0 at offset 2" in refused(lambda: documents("text", path)).what


def test_a_file_that_vanished_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    source = open_source(DataConfig(source="text", path=str(path)))
    path.unlink()
    error = refused(lambda: list(source.documents()))
    assert error.number == 303
    assert str(path) in error.what
    assert "No such file" in error.what


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.jsonl", "{}")
    source = open_source(DataConfig(source="jsonl", path=str(path)))
    monkeypatch.setattr(Path, "open", deny)
    error = refused(lambda: list(source.documents()))
    assert (error.number, error.what) == (303, f"cannot read {path}: Permission denied")


def test_jsonl_yields_the_field_of_every_line_and_skips_empty_and_null(tmp_path: Path) -> None:
    rows = [{"text": "a\nb", "n": 1}, {"text": ""}, {"text": None}, {"text": "ü"}]
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert documents("jsonl", path) == ["a\nb", "ü"]


@pytest.mark.parametrize(
    ("line", "number", "text"),
    [
        ('{"text": "a"', 305, "a.jsonl:3: no JSON"),
        ("[1, 2]", 305, "a.jsonl:3: a JSON list"),
        ('{"body": "x", "id": 7}', 306, "a.jsonl:3: there is no column 'text'; columns: body, id"),
        ('{"text": 7}', 307, "a.jsonl:3: column 'text' holds int"),
        (b'{"text": "\xe9"}', 304, "byte 0xe9 at offset 25"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes | str, number: int, text: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n' + raw + b"\n")
    error = refused(lambda: documents("jsonl", path))
    assert error.number == number
    assert text in error.what


def test_csv_yields_a_named_column_with_quotes_lines_and_long_fields(tmp_path: Path) -> None:
    long = "x" * 200_000
    path = write(
        tmp_path / "a.csv", f'\ufeffbody,id\r\n"two\nlines, ""quoted""",1\r\n\r\nplain,2\r\n,3\r\n{long},4\r\n'
    )
    assert documents("csv", path, text_column="body") == ['two\nlines, "quoted"', "plain", long]


def test_a_tsv_file_is_separated_by_tabs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "id\ttext\n1\ta, b\n")
    assert documents("csv", path) == ["a, b"]


@pytest.mark.parametrize(
    ("content", "number", "text"),
    [
        ("body,id\nx,1\n", 306, "no column 'text'; columns: body, id"),
        ("", 306, "no column 'text'; columns: none"),
        ("text,id\nx,1\ny\n", 305, "a.csv:3: 1 fields, the header has 2"),
        ('text,id\n"x,1\n', 305, "a.csv:2: unexpected end of data"),
        (b"text,id\nx,1\n\xfc,2\n", 304, "byte 0xfc at offset 12"),
    ],
)
def test_a_bad_csv_file_is_named(tmp_path: Path, content: bytes | str, number: int, text: str) -> None:
    path = write(tmp_path / "a.csv", content)
    error = refused(lambda: documents("csv", path))
    assert error.number == number
    assert text in error.what


def test_parquet_yields_the_column_of_every_row_in_order(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(600)] + [None, ""]
    parquet.write_table(pa.table({"n": list(range(602)), "text": texts}), tmp_path / "a.parquet", row_group_size=100)
    parquet.write_table(pa.table({"text": pa.array(["x", "x"]).dictionary_encode()}), tmp_path / "b.parquet")
    assert documents("parquet", tmp_path) == [*texts[:600], "x", "x"]


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"n": [1], "body": ["x"]}), path)
    missing = refused(lambda: documents("parquet", path))
    assert (missing.number, "columns: n, body" in missing.what) == (306, True)
    numbers = refused(lambda: documents("parquet", path, text_column="n"))
    assert (numbers.number, "holds int" in numbers.what) == (307, True)
    write(path, b"PAR1 no parquet at all PAR1")
    broken = refused(lambda: documents("parquet", path))
    assert (broken.number, str(path) in broken.what) == (303, True)


def test_documents_of_a_limit_are_read_and_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "a"}\n{"text": "b"}\nbroken\n')
    assert documents("jsonl", path, max_documents=2) == ["a", "b"]


@pytest.mark.parametrize("content", ["", '{"text": ""}\n{"text": null}\n'])
def test_a_source_without_text_is_an_error(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "a.jsonl", content)
    error = refused(lambda: documents("jsonl", path))
    assert (error.number, f"1 jsonl file ({path})" in error.what) == (308, True)
