"""The few file operations that a checkpoint needs, on a local disk or on any fsspec storage.

Local: a file is written beside its name, synced and renamed; a whole folder becomes visible by one rename.  Elsewhere
nothing can be relied on but "what was closed can be read", so that the order of writes has to do the rest.  Every
failure of a storage leaves here as an OSError; `storage_errors` turns it into the numbered error that a user reads.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ray_diloco.checkpoint.tensors import CHUNK
from ray_diloco.errors import CheckpointError

PERMISSION = 503
FULL = 504
ABSENT = 505
UNREACHABLE = 506


class Files(Protocol):
    """Files below one root; paths are relative to it, with `/`.  All methods raise OSError when the storage fails."""

    @property
    def atomic_folders(self) -> bool:
        """Whether `rename_folder` exists and is atomic."""

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        """Creates or replaces a file, and its parent folders; its content is durable when this returns."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop` (exclusive) of a file."""

    def view(self, path: str) -> memoryview:
        """The whole file as read-only memory that is paged in as it is touched."""

    def entries(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none if it is absent."""

    def remove(self, path: str) -> None:
        """Removes a file if it is there."""

    def remove_folder(self, folder: str) -> None:
        """Removes a folder with all that is in it, if it is there."""

    def rename_folder(self, source: str, target: str) -> None:
        """Makes a folder appear under a name that is not taken."""

    def sync_folder(self, folder: str) -> None:
        """Makes the names in a folder durable."""


def open_files(url: str) -> tuple[str, Files]:
    """The files below a path or fsspec URL, and that URL with a local path made absolute.

    Raises:
      CheckpointError: 501, unknown protocol; 502, a package for it is missing; 506, it cannot be opened.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise CheckpointError(
            502, f"storage {url!r} needs a package that is not installed: {error}", "install that package on every node"
        ) from error
    except ValueError as error:
        known = ", ".join(sorted(p for p in fsspec.available_protocols() if p in _COMMON_PROTOCOLS))
        raise CheckpointError(
            501, f"storage {url!r} cannot be used: {error}", f"use a path or a URL of a protocol such as {known}"
        ) from error
    except Exception as error:  # clients of remote storages raise types of their own while they connect
        raise CheckpointError(
            UNREACHABLE, f"storage {url!r} cannot be opened: {_described(error)}", "check its address and credentials"
        ) from error
    if isinstance(filesystem, LocalFileSystem):
        return root, LocalFiles(Path(root))
    return url, RemoteFiles(filesystem, root.rstrip("/"))


@contextmanager
def storage_errors(doing: str, url: str) -> Iterator[None]:
    """Turns OSError into a CheckpointError: 503 permission, 504 full, 505 absent, 506 anything else."""
    try:
        yield
    except OSError as error:
        number, mend = _cause(error)
        what = f"cannot {doing} in {url}: {_described(error)}"
        raise CheckpointError(number, what, mend) from error


@dataclass(frozen=True)
class LocalFiles:
    """Files on a disk that this machine mounts."""

    root: Path
    atomic_folders: bool = True

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        """Writes beside the name, syncs, then renames."""
        target = self.root / path
        _make_folder(target.parent)
        # A name of its own for each attempt: a writer that was given up cannot spoil the file of its successor.
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb", buffering=0) as file:
                for view in views:
                    _write_all(file.fileno(), view)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:  # an interrupt, too, must not leave half a file to fill the disk
            with suppress(OSError):
                temporary.unlink()
            raise

    def size(self, path: str) -> int | None:
        """See `Files`."""
        try:
            return (self.root / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See `Files`."""
        with open(self.root / path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)

    def view(self, path: str) -> memoryview:
        """Maps the file."""
        with open(self.root / path, "rb") as file:
            return _mapped(file.fileno())

    def entries(self, folder: str) -> list[str]:
        """See `Files`."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        """See `Files`."""
        (self.root / path).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """See `Files`."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root / folder)

    def rename_folder(self, source: str, target: str) -> None:
        """See `Files`."""
        os.rename(self.root / source, self.root / target)

    def sync_folder(self, folder: str) -> None:
        """See `Files`."""
        _sync(self.root / folder)


@dataclass(frozen=True)
class RemoteFiles:
    """Files on any fsspec storage.  Nothing is cached: other processes write there too."""

    filesystem: Any
    root: str
    atomic_folders: bool = False

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        """Streams to the final name; an object store shows it when it is closed."""
        with self._client_errors(path) as full:
            target = self._open(full)
            with target:
                for view in views:
                    target.write(view)

    def size(self, path: str) -> int | None:
        """See `Files`."""
        with self._client_errors(path) as full:
            try:
                return int(self.filesystem.info(full)["size"])
            except FileNotFoundError:
                return None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Fetches a range."""
        with self._client_errors(path) as full:
            return bytes(self.filesystem.cat_file(full, start=start, end=stop))

    def view(self, path: str) -> memoryview:
        """Fetches the file into an unlinked temporary one, and maps that."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        with tempfile.TemporaryFile() as file:
            for start in range(0, size, CHUNK):
                file.write(self.read(path, start, min(size, start + CHUNK)))
            file.flush()
            return _mapped(file.fileno())

    def entries(self, folder: str) -> list[str]:
        """See `Files`."""
        with self._client_errors(folder) as full:
            try:
                names = self.filesystem.ls(full, detail=False)
            except FileNotFoundError:
                return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in names} - {""})

    def remove(self, path: str) -> None:
        """See `Files`."""
        with self._client_errors(path) as full, suppress(FileNotFoundError):
            self.filesystem.rm_file(full)

    def remove_folder(self, folder: str) -> None:
        """See `Files`."""
        with self._client_errors(folder) as full, suppress(FileNotFoundError):
            self.filesystem.rm(full, recursive=True)

    def rename_folder(self, source: str, target: str) -> None:
        """Refused: there is none."""
        raise OSError(errno.ENOTSUP, "this storage has no atomic rename", source)

    def sync_folder(self, folder: str) -> None:
        """Nothing to do: there is nothing behind a closed remote file that a client could sync."""

    def _open(self, full: str) -> Any:
        try:
            return self.filesystem.open(full, "wb")
        except FileNotFoundError:
            # A storage with real folders, or an absent bucket; a bucket that nobody made is a typo, not our task.
            if not self.filesystem.exists(self.root):
                raise
            self.filesystem.makedirs(full.rpartition("/")[0], exist_ok=True)
            return self.filesystem.open(full, "wb")

    @contextmanager
    def _client_errors(self, path: str) -> Iterator[str]:
        self.filesystem.invalidate_cache()
        try:
            yield f"{self.root}/{path}" if path else self.root
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # each client library has exception types of its own
            raise OSError(None, _described(error), path) from error


def _write_all(descriptor: int, view: memoryview | bytes) -> None:
    left = memoryview(view)
    while left:
        left = left[os.write(descriptor, left) :]


def _mapped(descriptor: int) -> memoryview:
    if os.fstat(descriptor).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _described(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


def _cause(error: OSError) -> tuple[int, str]:
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return PERMISSION, "let the user of the run read and write there, or choose another run.storage"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return FULL, "free space there, keep fewer commits (checkpoint.keep_last, keep_every), or move run.storage"
    if isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
        return ABSENT, "create the folder or bucket, and see that no part of the path is a file"
    return UNREACHABLE, "see that the storage answers on every node, then run the same command again"


_COMMON_PROTOCOLS = {"file", "memory", "s3", "gs", "abfs", "hdfs", "sftp", "smb", "webdav", "oci", "hf"}
