"""Where commits go, as all processes of a run open it.

Each opens the storage by its URL.  What fsspec keeps in the memory of one process (`memory://`) would be another
storage in each of them, so there one actor keeps the files and the others ask it; before and after the run they are
carried from and to the process that started it, in whose memory they belong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.placement import here

if TYPE_CHECKING:
    from ray_diloco.checkpoint.files import RemoteFiles
    from ray_diloco.checkpoint.store import CheckpointStore

# Seconds that a file operation in another process's memory may take.
KEEPER_S = 60.0


@dataclass(frozen=True)
class Storage:
    """A storage of commits that can travel: its URL, and the actor that keeps it if it lies in memory."""

    url: str
    keeper: Any = None

    def open(self) -> CheckpointStore:
        """The commits in it."""
        from ray_diloco.checkpoint.store import CheckpointStore

        return CheckpointStore(self.url) if self.keeper is None else CheckpointStore(self.url, KeptFiles(self.keeper))


def shared_storage(url: str) -> Storage:
    """The storage at a URL, kept by an actor if it lies in the memory of this process."""
    files = _in_memory(url)
    return Storage(url) if files is None else Storage(url, KeeperActor.options(**here()).remote(url, _content(files)))


def take_back(storage: Storage) -> None:
    """Brings what an actor keeps into the memory of this process."""
    files = _in_memory(storage.url)
    if storage.keeper is None or files is None:
        return
    files.remove_folder("")
    for path, content in ray.get(storage.keeper.content.remote(), timeout=KEEPER_S).items():
        files.write(path, [content])


class Keeper:
    """Keeps files in the memory of its process."""

    def __init__(self, url: str, content: dict[str, bytes]) -> None:
        from ray_diloco.checkpoint.files import open_files

        self._files: Any = open_files(url)[1]
        for path, data in content.items():
            self._files.write(path, [data])

    def call(self, operation: str, *arguments: Any) -> Any:
        """Does one operation of `checkpoint.files.Files`."""
        return getattr(self._files, operation)(*arguments)

    def content(self) -> dict[str, bytes]:
        """All files."""
        return _content(self._files)


@dataclass(frozen=True)
class KeptFiles:
    """The files of a keeper; see `checkpoint.files.Files`."""

    keeper: Any
    atomic_folders: bool = False

    def write(self, path: str, views: Iterable[memoryview | bytes]) -> None:
        """Sends the whole file."""
        self._ask("write", path, [b"".join(views)])

    def size(self, path: str) -> int | None:
        """See `Files`."""
        size: int | None = self._ask("size", path)
        return size

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See `Files`."""
        content: bytes = self._ask("read", path, start, stop)
        return content

    def view(self, path: str) -> memoryview:
        """Fetches the whole file."""
        return memoryview(self.read(path, 0, self.size(path) or 0))

    def entries(self, folder: str) -> list[str]:
        """See `Files`."""
        names: list[str] = self._ask("entries", folder)
        return names

    def remove(self, path: str) -> None:
        """See `Files`."""
        self._ask("remove", path)

    def remove_folder(self, folder: str) -> None:
        """See `Files`."""
        self._ask("remove_folder", folder)

    def rename_folder(self, source: str, target: str) -> None:
        """Refused, as by every storage without rename."""
        self._ask("rename_folder", source, target)

    def sync_folder(self, folder: str) -> None:
        """Nothing to do."""

    def _ask(self, operation: str, *arguments: Any) -> Any:
        try:
            return ray.get(self.keeper.call.remote(operation, *arguments), timeout=KEEPER_S)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, OSError) else error) from None
        except (RayActorError, TimeoutError) as error:
            raise OSError(None, f"the process that keeps the storage in memory does not answer: {error}") from error


def _in_memory(url: str) -> RemoteFiles | None:
    from fsspec.implementations.memory import MemoryFileSystem

    from ray_diloco.checkpoint.files import RemoteFiles, open_files

    files = open_files(url)[1]
    return files if isinstance(files, RemoteFiles) and isinstance(files.filesystem, MemoryFileSystem) else None


def _content(files: RemoteFiles) -> dict[str, bytes]:
    root = f"{files.root}/"
    return {path.removeprefix(root): files.filesystem.cat_file(path) for path in files.filesystem.find(files.root)}


KeeperActor = actor(Keeper, num_cpus=0)
