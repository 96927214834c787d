"""The cache of prepared data: keys by content, and folders that appear whole or not at all.

A folder is written under a name of its own and renamed into place, so concurrent preparers need no lock: the first to
finish wins, the others take its result.  Digests of source files are remembered by path, size, times and inode, so that
an unchanged corpus is not read again; a file whose time stamp is too fresh to tell the next change apart is not
remembered (git's "racily clean" rule).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import xxhash

from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

DEFAULT_CACHE = "~/.cache/ray_diloco"
_CHUNK = 4 << 20
# Coarsest time stamp of a file system in use (FAT: two seconds).
_STAMP_NS = 2_000_000_000
_ABANDONED_S = 86_400


def cache_folder(configured: str | None) -> Path:
    """The cache folder of a configuration's `data.cache`."""
    return Path(configured or DEFAULT_CACHE).expanduser().absolute()


def key_of(*parts: object) -> str:
    """32 hexadecimal digits that stand for these values (anything that JSON can write)."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


@contextlib.contextmanager
def publish(target: Path, replace: bool = False) -> Iterator[Path]:
    """Lends an empty folder that becomes `target` when the block ends well, and is removed otherwise.

    If another process published `target` meanwhile, its folder stays and this one is dropped: a target's name says
    what is in it.

    Args:
      target: the folder to publish.
      replace: there is a damaged one to take away first; readers that have it open keep their pages.

    Raises:
      DataError: 333, the cache cannot be written.
    """
    folder = _draft(target)
    try:
        folder.mkdir(parents=True)
        _sweep(target.parent)
        yield folder
        if replace:
            _remove(target)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unwritable(target: Path, error: OSError) -> DataError:
    """The error for a cache that cannot be written."""
    return DataError(
        333,
        f"cannot write prepared data to {target}: {error.strerror or error}",
        "free some space there, or set data.cache to a folder that can be written",
    )


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name[:40]}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def _remove(target: Path) -> None:
    """In one step for whoever looks for it."""
    grave = _draft(target)
    with contextlib.suppress(FileNotFoundError):
        target.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what killed preparers of this machine left.

    Containers may share a host name and a cache but no process numbers, hence the day.
    """
    for folder in parent.glob(f".*-{socket.gethostname()}-*-*"):
        pid = folder.name.rsplit("-", 2)[1]
        with contextlib.suppress(FileNotFoundError):
            old = folder.stat().st_mtime < time.time() - _ABANDONED_S
            if old and pid.isdigit() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)


def files_digest(files: Sequence[Path], cache: Path, reporter: Reporter) -> str:
    """Digest (xxh3, 128 bits, hexadecimal) of the contents of files in this order; their names do not count.

    Raises:
      DataError: 303, a file cannot be read.
    """
    stamps = [_stamp(path) for path in files]
    memory = cache / "digests" / key_of(*stamps)
    try:
        return memory.read_text(encoding="ascii")
    except OSError:
        digest = _read_digest(files, sum(int(stamp[1]) for stamp in stamps), reporter)
    newest = max((max(stamp[2], stamp[3]) for stamp in stamps), default=0)
    if newest + _STAMP_NS < time.time_ns():
        _remember(memory, digest)
    return digest


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a source file that cannot be read."""
    return DataError(
        303, f"cannot read {path}: {error.strerror or error}", "check that the file exists and that you may read it"
    )


def _stamp(path: Path) -> tuple[str, int, int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read_digest(files: Sequence[Path], total: int, reporter: Reporter) -> str:
    """Digest over (digest of a file, its length) of every file."""
    reporter.begin("reading the corpus", total)
    outer = xxhash.xxh3_128()
    for path in files:
        inner, length = xxhash.xxh3_128(), 0
        try:
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    inner.update(chunk)
                    length += len(chunk)
                    reporter.advance(len(chunk))
        except OSError as error:
            raise unreadable(path, error) from error
        outer.update(inner.digest() + length.to_bytes(8, "little"))
    reporter.end()
    return outer.hexdigest()


def _remember(memory: Path, digest: str) -> None:
    """Only spares a later reading, so a cache that cannot be written (shared, read-only) is fine."""
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        draft = memory.with_name(f".{memory.name}-{uuid.uuid4().hex[:8]}")
        draft.write_text(digest, encoding="ascii")
        draft.replace(memory)
