"""Append-only files of JSON lines, and files that are replaced in one move.

A line is written with one call and flushed; a process that dies while writing leaves at most a torn last line, which
the next opening cuts off and reports.  Every line is valid JSON: NaN and infinities become null.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ray_diloco.errors import CheckpointError


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON; numpy scalars become numbers, paths strings, non-finite numbers null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines in order; none if there is no file.  A torn last line is left out.

    Raises:
      CheckpointError: RD-581, a whole line is not a JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            record = _parse(raw)
            if record is not None:
                yield record
            elif raw.endswith(b"\n"):
                raise _broken(path, number, raw)


class LineFile:
    """A file of JSON lines, open for appending; safe to use from several threads.

    Args:
      path: the file; it and its folder are made if missing.

    Raises:
      CheckpointError: RD-580, the file cannot be opened; RD-581, its last whole line is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab+")
            self.last, self.cut_bytes = _repair(path, self._file)
        except OSError as error:
            raise _unusable(580, path, "opened", error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record as a line and flush it to the operating system.

        Raises:
          CheckpointError: RD-582, the disk refuses.
        """
        line = (to_json(record) + "\n").encode()
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                raise _unusable(582, self.path, "written", error) from error

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Rewrite the file in one move with only the records for which `wanted(record)` is true.

        Returns:
          Number of records dropped.
        """
        with self._lock:
            records = list(read_lines(self.path))
            kept = [record for record in records if wanted(record)]
            if len(kept) < len(records):
                replace_text(self.path, "".join(to_json(record) + "\n" for record in kept))
                self._file.close()
                self._file = self.path.open("ab+")
                self.last = kept[-1] if kept else None
            return len(records) - len(kept)

    def close(self) -> None:
        """Close the file; appending after that is an error."""
        with self._lock:
            self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Put `text` at `path` so that a reader, or a crash, sees the old content or the new one and nothing else.

    Raises:
      CheckpointError: RD-582, the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unusable(582, path, "written", error) from error


def _repair(path: Path, file: BinaryIO) -> tuple[dict[str, Any] | None, int]:
    """Cut what stands behind the last newline; return the record before it and the number of bytes cut."""
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    line = content[content.rfind(b"\n", 0, max(end - 1, 0)) + 1 : end]
    last = _parse(line)
    # A whole line that is no record was not torn by a crash: somebody's file, not ours to cut.
    if line and last is None:
        raise _broken(path, content.count(b"\n"), line)
    file.truncate(end)
    return last, len(content) - end


def _parse(raw: bytes) -> dict[str, Any] | None:
    """The record of one whole line, or None if it is torn."""
    if not raw.endswith(b"\n"):
        return None
    try:
        record = json.loads(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(getattr(value, "item", None)):
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} has no place in a line of JSON: {value!r}")


def _broken(path: Path, number: int, line: bytes) -> CheckpointError:
    return CheckpointError(
        581,
        f"line {number} of {path} is not a JSON object: {line[:80]!r}",
        "mend or remove that line, or move the file away; the run's commits don't depend on it",
    )


def _unusable(number: int, path: Path, action: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        number,
        f"{path} cannot be {action}: {error.strerror or error}",
        "free space or mend the permissions of that folder, or choose another with run.root",
    )
