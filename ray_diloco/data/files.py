"""Documents in local files: text (one file is one document), jsonl, csv and parquet (one row is one document).

Every reader streams.  What cannot be read is an error that names the file and the place in it; nothing is skipped but
rows whose text is empty or null.
"""

from __future__ import annotations

import csv
import glob
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ray_diloco.config.schema import DataConfig
from ray_diloco.data.cache import cache_folder, files_digest, key_of, unreadable
from ray_diloco.data.documents import Piece, Source, whole
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

# Larger text files travel in pieces of about this many bytes, cut behind a line where there is one.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Format:
    """How files of one kind become documents."""

    # Endings that a folder is searched for.
    suffixes: tuple[str, ...]
    # Reads one file; the column is ignored where there are none.
    read: Callable[[Path, str], Iterator[Piece]]
    columns: bool = True


def files_source(config: DataConfig) -> Source:
    """The local files of `data.path`, in the order of their paths.

    Raises:
      DataError: 301 no path given, 302 no file matches.
    """
    form = FORMATS[config.source]
    if not config.path:
        raise DataError(
            301,
            f"data.source={config.source} needs data.path, which is not set",
            "set data.path to a file, a folder or a glob; several are joined by commas",
        )
    files = find_files(config.path, form.suffixes)
    # The ending of a name says how its fields are separated.
    settings = (config.source, config.text_column, *(path.suffix for path in files)) if form.columns else ()
    return Source(
        title=f"{len(files)} {config.source} file{'s' if len(files) > 1 else ''} ({config.path})",
        pieces=lambda: read_files(files, form, config.text_column),
        identity=lambda reporter: files_identity(files, cache_folder(config.cache), reporter, *settings),
        # Columns of other content and compression make a file's size say little about its text.
        total_bytes=None if form.columns else sum(path.stat().st_size for path in files if path.exists()),
    )


def files_identity(files: list[Path], cache: Path, reporter: Reporter, *settings: str) -> str:
    """Identity of the documents that files hold when they are read with these settings."""
    return key_of("files", files_digest(files, cache, reporter), *settings)


def read_files(files: list[Path], form: Format, column: str = "") -> Iterator[Piece]:
    """Pieces of all documents, file after file; raises DataError 303–307."""
    for path in files:
        try:
            yield from form.read(path, column)
        except OSError as error:
            raise unreadable(path, error) from error


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Files that a file name, folder, glob (`**` recurses) or comma-separated list of them stands for, sorted.

    Raises:
      DataError: 302, one of them stands for no file.
    """
    found: set[str] = set()
    # A name may hold commas and brackets: what exists is taken as it is.
    patterns = [path] if os.path.exists(path) else [part.strip() for part in path.split(",") if part.strip()]
    for pattern in patterns:
        matches = _matches(os.path.expanduser(pattern), suffixes)
        if not matches:
            raise DataError(
                302,
                f"no file matches {pattern!r} of data.path (searched from {os.getcwd()})",
                f"correct the path; a folder is searched for {' and '.join('*' + s for s in suffixes)}, "
                "other names need a glob such as folder/**/*.md",
            )
        found.update(matches)
    return [Path(name) for name in sorted(found)]


def _matches(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isfile(pattern):
        return [os.path.abspath(pattern)]
    if os.path.isdir(pattern):
        names = glob.glob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        names = [name for name in names if name.endswith(suffixes)]
    else:
        names = glob.glob(pattern, recursive=True)
    return [os.path.abspath(name) for name in names if os.path.isfile(name)]


def read_text(path: Path, _column: str = "") -> Iterator[Piece]:
    """One document: the whole file, byte for byte."""
    offset, rest = 0, b""
    with path.open("rb") as file:
        while len(chunk := file.read(PIECE_BYTES)) == PIECE_BYTES:
            raw = rest + chunk
            cut = raw.rfind(b"\n") + 1 or _character_border(raw)
            yield Piece(_decode(raw[:cut], path, offset), False)
            offset, rest = offset + cut, raw[cut:]
    yield Piece(_decode(rest + chunk, path, offset), True)


def _character_border(raw: bytes) -> int:
    """The largest position up to the end at which no character is cut in two (raw has at least four bytes)."""
    cut = len(raw)
    while raw[cut - 1] & 0xC0 == 0x80 and cut > len(raw) - 4:
        cut -= 1
    return cut - 1 if raw[cut - 1] >= 0xC0 else cut


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            304,
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start} ({error.reason})",
            "convert the file to UTF-8, or take it out of data.path",
        ) from error


def _lines(path: Path) -> Iterator[str]:
    """Lines with their ends, decoded one by one; a byte order mark is taken off."""
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            line = _decode(raw, path, offset)
            yield line.removeprefix("\ufeff") if offset == 0 else line
            offset += len(raw)


def read_jsonl(path: Path, column: str) -> Iterator[Piece]:
    """A document per line: the field `column` of a JSON object."""
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad_row(path, number, f"no JSON: {error}") from error
        if not isinstance(row, dict):
            raise _bad_row(path, number, f"a JSON {type(row).__name__}, not an object with a field {column!r}")
        if column not in row:
            raise missing_column(f"{path}:{number}", column, list(row))
        yield Piece(text_of(row[column], f"{path}:{number}", column), True)


def read_csv(path: Path, column: str) -> Iterator[Piece]:
    """A document per row: the field `column`, named by the first row; tabs separate the fields of a .tsv file."""
    # The module's own limit of 128 KiB is below the length of many documents.
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(_lines(path), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    try:
        header = next(rows, [])
        if column not in header:
            raise missing_column(str(path), column, header)
        place = header.index(column)
        for row in rows:
            if row and len(row) != len(header):
                raise _bad_row(path, rows.line_num, f"{len(row)} fields, the header has {len(header)}")
            if row:
                yield Piece(row[place], True)
    except csv.Error as error:
        raise _bad_row(path, rows.line_num, str(error)) from error


def read_parquet(path: Path, column: str) -> Iterator[Piece]:
    """A document per row: the string column `column`."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise missing_column(str(path), column, names)
            for number, batch in enumerate(file.iter_batches(batch_size=256, columns=[column])):
                values = batch.column(0).to_pylist()
                yield from whole(text_of(value, f"{path} from row {256 * number}", column) for value in values)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            303, f"cannot read {path} as parquet: {error}", "write the file again, or take it out of data.path"
        ) from error


def text_of(value: object, place: str, column: str) -> str:
    """The text of a column's value, nothing for null; raises DataError 307 if it is something else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            307,
            f"{place}: column {column!r} holds {type(value).__name__}, not text",
            "set data.text_column to a column of text",
        )
    return value


def missing_column(place: str, column: str, columns: list[str]) -> DataError:
    """The error for a text column that is not there."""
    have = ", ".join(columns) if columns else "none"
    return DataError(306, f"{place}: there is no column {column!r}; columns: {have}", "set data.text_column to one")


def _bad_row(path: Path, line: int, what: str) -> DataError:
    return DataError(305, f"{path}:{line}: {what}", "repair that line, or take the file out of data.path")


# By `data.source`.
FORMATS = {
    "text": Format((".txt",), read_text, columns=False),
    "jsonl": Format((".jsonl", ".ndjson"), read_jsonl),
    "csv": Format((".csv", ".tsv"), read_csv),
    "parquet": Format((".parquet",), read_parquet),
}
