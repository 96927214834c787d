"""Reading the tensor files of a commit: only what is asked for, and nothing that differs from its manifest.

A file is digested once before its first tensor is handed out.  Local files are mapped, so that a tensor is read when
it is touched; files elsewhere are fetched once into an unlinked temporary file, or tensor by tensor when the digest
was checked before.  Memory stays bounded by one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ray_diloco.checkpoint.files import Files
from ray_diloco.checkpoint.manifest import FileEntry, Manifest
from ray_diloco.checkpoint.tensors import CHUNK, StoredTensor, header_length, parse_header
from ray_diloco.errors import CheckpointError, CommittedError

UNFINISHED = 508
MISSING = 513
SIZE = 514
DIGEST = 515
MALFORMED = 516
ANOTHER = "restore the file from a copy, or remove the folder of that round to go on from the commit before it"


class TensorFile:
    """A tensor file of a commit; `tensors` says what is in it, `read` fetches one.

    Args:
      files: where it lies.
      folder: folder of the commit.
      manifest: the commit, for messages.
      entry: the file.

    Raises:
      CheckpointError: 513, it is missing; 514, wrong size; 516, its header is damaged.
      OSError: the storage failed.
    """

    def __init__(self, files: Files, folder: str, manifest: Manifest, entry: FileEntry) -> None:
        self.entry = entry
        self._files = files
        self._path = f"{folder}/{entry.name}"
        self._label = f"file {entry.name} of round {manifest.round}"
        self._memory: memoryview | None = None
        check_size(files, folder, manifest.round, entry)
        self.tensors = self._header()

    def check(self) -> None:
        """Compares the content with the digest of the manifest.  Raises CheckpointError 515 if it differs."""
        if not self._files.atomic_folders:
            self._memory = self._files.view(self._path)
        compare_digest(self._digest(), self.entry, self._label)

    def read(self, name: str) -> np.ndarray:
        """One tensor, read-only.  Raises KeyError for a name that the file does not have."""
        tensor = self.tensors[name]
        if self._memory is None and self._files.atomic_folders:
            self._memory = self._files.view(self._path)
        if self._memory is not None:
            content: memoryview | bytes = self._memory[tensor.start : tensor.stop]
        else:
            content = self._files.read(self._path, tensor.start, tensor.stop)
        if len(content) != tensor.stop - tensor.start:
            raise CheckpointError(SIZE, f"{self._label} became shorter while it was read", ANOTHER)
        return np.frombuffer(content, tensor.dtype).reshape(tensor.shape)

    def _header(self) -> dict[str, StoredTensor]:
        size = self.entry.bytes
        try:
            length = header_length(self._files.read(self._path, 0, 8), size)
            return parse_header(self._files.read(self._path, 8, 8 + length), size)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(MALFORMED, f"{self._label} is no whole tensor file: {error}", ANOTHER) from error

    def _digest(self) -> str:
        if self._memory is None:
            return file_digest(self._files, self._path, self.entry.bytes)
        return hashlib.sha256(self._memory).hexdigest()


def check_size(files: Files, folder: str, round_number: int, entry: FileEntry) -> None:
    """Raises CheckpointError 513 or 514 if a file is missing or has another size than its manifest says."""
    size = files.size(f"{folder}/{entry.name}")
    label = f"file {entry.name} of round {round_number}"
    if size is None:
        raise CheckpointError(
            MISSING,
            f"{label} is missing in {folder}",
            f"{ANOTHER}; on several nodes, run.storage must be a place that all of them reach",
        )
    if size != entry.bytes:
        raise CheckpointError(SIZE, f"{label} has {size} bytes; the manifest says {entry.bytes}", ANOTHER)


def check_digests(
    files: Files, folder: str, round_number: int, entries: Iterable[FileEntry], threads: int
) -> list[CheckpointError]:
    """Digests whole files, several at once; returns what is wrong with them, in the order given."""

    def check(entry: FileEntry) -> CheckpointError | None:
        try:
            check_size(files, folder, round_number, entry)
            digest = file_digest(files, f"{folder}/{entry.name}", entry.bytes)
            compare_digest(digest, entry, f"file {entry.name} of round {round_number}")
        except CheckpointError as error:
            return error
        return None

    with ThreadPoolExecutor(threads, "verify") as pool:
        return [error for error in pool.map(check, entries) if error is not None]


def compare_digest(digest: str, entry: FileEntry, label: str) -> None:
    """Raises CheckpointError 515 if the digest of a file's content differs from its manifest's."""
    if digest != entry.sha256:
        raise CheckpointError(
            DIGEST, f"{label} has digest {digest[:16]}…; the manifest says {entry.sha256[:16]}…", ANOTHER
        )


def file_digest(files: Files, path: str, size: int) -> str:
    """SHA-256 (hex) of the first `size` bytes of a file, in passes of `CHUNK` bytes."""
    digest = hashlib.sha256()
    for start in range(0, size, CHUNK):
        digest.update(files.read(path, start, min(size, start + CHUNK)))
    return digest.hexdigest()


def no_commit(folder: Path) -> CommittedError:
    """The error for a run that has nothing to be read yet."""
    return CommittedError(
        563, f"the run in {folder} has no commit yet", "wait until version 0 is durable, in its first round"
    )


def absent(manifest: Manifest, kind: str, what: str) -> CheckpointError:
    """The error for tensors that are not those that were asked for."""
    return CheckpointError(
        517, f"in the {kind} of round {manifest.round}, {what}", "resume with the model that the commit was made with"
    )
