"""Storages that fail: an operation that raises, and a disk that forgets what was not synced when it crashes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from random import Random

from ray_diloco.checkpoint.files import LocalFiles


@dataclass(frozen=True)
class FailingFiles(LocalFiles):
    """Real files whose n-th changing operation raises; a write raises after its first view when `torn`."""

    error: Callable[[], BaseException] = OSError
    fail_at: int = -1
    torn: bool = False
    done: list[str] = field(default_factory=list)

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        due = len(self.done) == self.fail_at
        self.done.append(f"write {path}")
        super().write(path, self._failing(views) if due else views)

    def remove(self, path: str) -> None:
        self._count(f"remove {path}")
        super().remove(path)

    def remove_folder(self, folder: str) -> None:
        self._count(f"remove_folder {folder}")
        super().remove_folder(folder)

    def rename_folder(self, source: str, target: str) -> None:
        self._count(f"rename {source}")
        super().rename_folder(source, target)

    def sync_folder(self, folder: str) -> None:
        self._count(f"sync {folder}")
        super().sync_folder(folder)

    def _count(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) - 1 == self.fail_at:
            raise self.error()

    def _failing(self, views: Iterable[memoryview | bytes]) -> Iterator[memoryview | bytes]:
        if self.torn:
            yield next(iter(views))
        raise self.error()


class PowerLost(BaseException):
    """Not an Exception: a process that dies handles nothing."""


# A folder is its entries: a name → bytes of a file, or the entries of a folder.
Entries = dict


class SimulatedDisk:
    """A disk with a power switch.

    The content of a written file is safe when `write` returns; the names in a folder are safe after `sync_folder`.
    Until then each change of a name may or may not have reached the disk, in any combination.  With
    `atomic_folders=False` it is a remote storage instead: what was closed is safe, and a write that breaks off
    leaves its beginning under the final name.
    """

    def __init__(self, atomic_folders: bool = True, root: Entries | None = None) -> None:
        self.atomic_folders = atomic_folders
        self.live: Entries = root if root is not None else {}
        self.pending: list[tuple[str, ...]] = []
        self.synced = _copied(self.live)
        self.points = 0
        self.crash_at = -1

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        content = b"".join(bytes(view) for view in views)
        torn = path if not self.atomic_folders else f"{path}.0.tmp"
        for cut in (0, len(content) // 2, max(0, len(content) - 1)):
            self._change("set", torn, content[:cut])
            self._point()
        if torn != path:
            self._change("drop", torn)
        self._change("set", path, content)
        self._point()

    def size(self, path: str) -> int | None:
        found = _found(self.live, path)
        return len(found) if isinstance(found, bytes) else None

    def read(self, path: str, start: int, stop: int) -> bytes:
        found = _found(self.live, path)
        if not isinstance(found, bytes):
            raise FileNotFoundError(path)
        return found[start:stop]

    def view(self, path: str) -> memoryview:
        return memoryview(self.read(path, 0, 2**40))

    def entries(self, folder: str) -> list[str]:
        found = _found(self.live, folder)
        return sorted(found) if isinstance(found, dict) else []

    def remove(self, path: str) -> None:
        if _found(self.live, path) is not None:
            self._change("drop", path)
            self._point()

    def remove_folder(self, folder: str) -> None:
        for name in self.entries(folder):
            self._change("drop", f"{folder}/{name}")
            self._point()
        self.remove(folder)

    def rename_folder(self, source: str, target: str) -> None:
        assert _found(self.live, target) is None
        self._change("move", source, target)
        self._point()

    def sync_folder(self, folder: str) -> None:
        for change in [change for change in self.pending if _parent(change[1]) == folder]:
            _apply(self.synced, change)
            before = self.pending.index(change)
            # What was open inside a folder that is gone for good concerns nobody any more.
            inside = [c for c in self.pending[:before] if change[0] == "drop" and c[1].startswith(f"{change[1]}/")]
            self.pending = [c for c in self.pending if c is not change and c not in inside]
        self._point()

    def after_power_loss(self) -> Iterator[SimulatedDisk]:
        """Disks that may be found afterwards: with none, all and some seeded choices of the open changes."""
        random = Random(self.points)
        choices = [[False] * len(self.pending), [True] * len(self.pending)]
        choices += [[random.random() < 0.5 for _ in self.pending] for _ in range(6)]
        for kept in choices if self.pending else choices[:1]:
            root = _copied(self.synced)
            for change in itertools.compress(self.pending, kept):
                _apply(root, change)
            yield SimulatedDisk(self.atomic_folders, root)

    def _change(self, *change) -> None:
        _apply(self.live, change)
        if self.atomic_folders:
            self.pending.append(change)
        else:
            _apply(self.synced, change)

    def _point(self) -> None:
        self.points += 1
        if self.points - 1 == self.crash_at:
            raise PowerLost


def _apply(root: Entries, change: tuple) -> None:
    kind, path = change[0], PurePosixPath(change[1])
    parent = root
    for part in path.parent.parts:
        # Making a folder is synced at once, by LocalFiles and so here.
        parent = parent.setdefault(part, {})
    if kind == "set":
        parent[path.name] = change[2]
    elif kind == "drop":
        parent.pop(path.name, None)
    elif path.name in parent:
        parent[PurePosixPath(change[2]).name] = parent.pop(path.name)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _found(root: Entries, path: str):
    for part in PurePosixPath(path).parts:
        if not isinstance(root, dict) or part not in root:
            return None
        root = root[part]
    return root


def _copied(entries: Entries) -> Entries:
    return {name: _copied(item) if isinstance(item, dict) else item for name, item in entries.items()}


def flip_byte(path: Path, position: int = -1) -> None:
    """Damages one byte and keeps the size."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
