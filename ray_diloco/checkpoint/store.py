"""Commits of a run on any storage: written beside what exists, made visible by the manifest, pruned, read back.

`<url>/checkpoints/round-000012/` holds `manifest.json` and the tensor files.  On a disk the folder grows as
`round-000012.partial` and one rename commits it; on a storage without rename the manifest, written last, does.  A
crash at any point leaves the previous commit or the new one.  A damaged commit is passed over and said so; that there
are commits of trained rounds but no good one is an error, because a run may only be founded where none was committed.
Version 0 is committed as round 0; it stands in for a later commit, but not for several.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ray_diloco.checkpoint.epochs import Epochs
from ray_diloco.checkpoint.files import UNREACHABLE, Files, open_files, storage_errors
from ray_diloco.checkpoint.manifest import MANIFEST_END, FileEntry, Manifest
from ray_diloco.checkpoint.names import FOLDER, MANIFEST, PARTIAL, TENSOR_FILE, WHOLE, partial_folder, whole_folder
from ray_diloco.checkpoint.points import Points
from ray_diloco.checkpoint.reader import UNFINISHED, TensorFile, absent, check_digests, check_size
from ray_diloco.checkpoint.survey import Skipped, Survey, none_good
from ray_diloco.checkpoint.tensors import encode
from ray_diloco.errors import CheckpointError

THREADS = 4
# How often a reader looks again when the commits it had listed were pruned under its hands.
LOOKS = 4


class CheckpointStore:
    """The commits below one path or fsspec URL.  Travels to other processes; each opens the storage by itself.

    Args:
      url: storage of one run.
      files: file operations to use instead of those of the URL.

    Raises:
      CheckpointError: 501, unknown protocol; 502, a package for it is missing; 506, it cannot be opened.  Every
        method raises 503 to 506 when the storage fails: permission, full, absent, anything else.
    """

    def __init__(self, url: str, files: Files | None = None) -> None:
        self.url, self._files = open_files(url) if files is None else (url, files)
        self.epochs, self.points = Epochs(self._files, self.url), Points(self._files, self.url)
        self._verified: set[tuple[int, str, str]] = set()

    def write_tensors(
        self,
        round: int,
        name: str,
        tensors: Mapping[str, np.ndarray],
        *,
        kind: str,
        island: str | None = None,
    ) -> FileEntry:
        """Writes one tensor file of a coming commit; it is durable when this returns, and visible when committed.

        Args:
          round: the round of that commit.
          name: file name; each writer has its own (`anchor_filename`, `outer_filename`, `inner_filename`).
          tensors: name → array; not changed until this returns, and not copied.
          kind: anchor | outer | inner.
          island: whose inner state it is.

        Raises:
          CheckpointError: 519, a dtype that cannot be stored; 520, the round is committed; 523, a file name that
            cannot be used; 514, the storage kept another number of bytes.
        """
        if not TENSOR_FILE.fullmatch(name):
            raise CheckpointError(
                523,
                f"{name!r} cannot be the name of a tensor file",
                "use anchor_filename, outer_filename, inner_filename",
            )
        size, views = encode(tensors)
        digest = hashlib.sha256()
        folder = self._writing(round)
        with storage_errors(f"write {name} of round {round}", self.url):
            # Where nothing is renamed, the files of a committed round would be replaced under its manifest.
            if not self._files.atomic_folders and self._files.size(f"{folder}/{MANIFEST}") is not None:
                raise _committed(round, self.url)
            self._files.write(f"{folder}/{name}", _digested(views, digest))
            entry = FileEntry(name, size, digest.hexdigest(), kind, island)
            check_size(self._files, folder, round, entry)
        return entry

    def commit(self, manifest: Manifest, *, epoch: int | None = None) -> Manifest:
        """Makes a round visible; returns the manifest with `previous`, `previous_round` and `digest`.

        Committing the same manifest again returns the commit that exists.

        Args:
          manifest: the new commit.  If `previous` is set, it must be the digest of the newest one: a writer that has
            been succeeded by another is refused.

        Raises:
          CheckpointError: 513, 514, a listed file is missing or has another size; 518, no plain JSON; 520, the round
            is not newer than the newest; 521, another run or writer committed here; 522, no good commit to follow;
            565, there is a newer epoch than that of the writer.
        """
        if epoch is not None:
            self.epochs.check(epoch)
        newest = self.survey().manifest
        if newest is not None:
            if newest.round == manifest.round and _seal(manifest, newest.previous, newest.previous_round) == newest:
                return newest
            _check_successor(manifest, newest, self.url)
        sealed = _seal(manifest, newest.digest if newest else "", newest.round if newest else None)
        folder, final = self._writing(manifest.round), whole_folder(manifest.round)
        with storage_errors(f"commit round {manifest.round}", self.url):
            for entry in sealed.files:
                check_size(self._files, folder, sealed.round, entry)
            self._drop_unlisted(folder, sealed)
            self._files.write(f"{folder}/{MANIFEST}", [sealed.to_json().encode()])
            if self._files.atomic_folders:
                self._files.sync_folder(folder)
                self._remove(final)
                self._files.rename_folder(folder, final)
                self._files.sync_folder(FOLDER)
        return sealed

    def survey(self, *, full: bool = False) -> Survey:
        """Looks for the newest commit whose manifest and files are whole.

        Args:
          full: compare the digest of every file as well, which reads all of them; else their sizes.

        Raises:
          CheckpointError: 522, no commit of a trained round is good, and there is more than one, or not even that of
            round 0 is; 506, the storage does not answer (an older commit is no substitute for one that may be there).
        """
        listed = self.rounds()
        for _ in range(LOOKS):
            skipped: list[Skipped] = []
            for number in reversed(listed):
                try:
                    survey = Survey(self.read(number, full=full), tuple(skipped))
                    if number > 0 or len(survey.trained) < 2:
                        return survey
                except CheckpointError as error:
                    if error.number == UNREACHABLE:
                        raise
                    skipped.append(Skipped(number, error.number, error.what))
            before, listed = listed, self.rounds()
            if listed == before:
                break
        found = Survey(None, tuple(skipped))
        if found.trained:
            raise none_good(self.url, found)
        return found

    def newest(self, *, full: bool = False) -> Manifest | None:
        """The newest good commit; None if nothing was ever committed.  Arguments and errors like `survey`."""
        return self.survey(full=full).manifest

    def read(self, round: int, *, full: bool = False) -> Manifest:
        """The commit of a round.

        Raises:
          CheckpointError: 508, it has no manifest; 510 to 512, its manifest is damaged; 513 to 515, a file is
            missing, has another size or, if `full`, another content.
        """
        path = f"{whole_folder(round)}/{MANIFEST}"
        with storage_errors(f"read the manifest of round {round}", self.url):
            size = self._files.size(path)
            content = self._files.read(path, 0, size) if size else b""
            # Where a file grows under its final name, one that breaks off is a commit that never was.
            if not content or not (self._files.atomic_folders or content.endswith(MANIFEST_END)):
                raise CheckpointError(
                    UNFINISHED,
                    f"round {round} has no whole manifest: its commit was not finished",
                    "use an earlier commit",
                )
            manifest = Manifest.from_json(content.decode(errors="replace"))
            if manifest.round != round:
                raise CheckpointError(
                    510, f"the folder of round {round} holds the manifest of round {manifest.round}", "move it back"
                )
            for entry in manifest.files:
                check_size(self._files, whole_folder(round), round, entry)
        if full:
            self.verify(manifest)
        return manifest

    def verify(self, manifest: Manifest) -> None:
        """Compares every file with its digest, several at once.  Raises CheckpointError 513 to 515 for the first."""
        with storage_errors(f"verify round {manifest.round}", self.url):
            wrong = check_digests(self._files, whole_folder(manifest.round), manifest.round, manifest.files, THREADS)
        if wrong:
            raise wrong[0]
        self._verified.update((manifest.round, entry.name, entry.sha256) for entry in manifest.files)

    def load(
        self,
        manifest: Manifest,
        names: Iterable[str] | None = None,
        kind: str = "anchor",
        *,
        island: str | None = None,
        file: str | None = None,
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Tensors of one kind, over all files; each file is compared with its digest before the first tensor of it.

        Args:
          manifest: the commit.
          names: stored names, in the order wanted; default: all, file by file.
          kind: anchor | outer | inner.
          island: whose, for inner state.
          file: of this one alone, if the commit has it.

        Yields:
          Name and read-only array; local files are mapped and read as the array is touched.

        Raises:
          CheckpointError: 513 to 516, a file is missing or damaged; 517, a name is in no file, or in two of anchor or
            outer state (of inner state, the first one counts).
        """
        with storage_errors(f"read the {kind} of round {manifest.round}", self.url):
            folder = whole_folder(manifest.round)
            entries = [e for e in manifest.files_of(kind, island) if file in (None, e.name)]
            opened = [TensorFile(self._files, folder, manifest, e) for e in entries]
            where: dict[str, TensorFile] = {}
            for opened_file in opened:
                for name in opened_file.tensors:
                    # Ranks of an island cut its state into pieces, but each has the step count.
                    if where.setdefault(name, opened_file) is not opened_file and kind != "inner":
                        raise absent(manifest, kind, f"tensor {name!r} is in two files")
            for name in where if names is None else names:
                if name not in where:
                    raise absent(manifest, kind, f"tensor {name!r} is in no file")
                yield name, self._read(manifest, where[name], name)

    def names(self, manifest: Manifest, kind: str = "anchor") -> set[str]:
        """Names of the tensors of one kind, over all files.

        Raises:
          CheckpointError: 513 to 516, a file is missing or damaged.
        """
        with storage_errors(f"read the {kind} of round {manifest.round}", self.url):
            folder = whole_folder(manifest.round)
            files = [TensorFile(self._files, folder, manifest, entry) for entry in manifest.files_of(kind)]
            return {name for file in files for name in file.tensors}

    def rounds(self) -> list[int]:
        """Rounds that have a folder, ascending; whether a commit is good says `read`."""
        return self._numbers(WHOLE)

    def broken_link(self, manifest: Manifest) -> str | None:
        """How a commit contradicts the one before it, if that is still here; then one of the two was replaced."""
        before = None if manifest.previous_round is None else self._good(manifest.previous_round)
        if before is None or before.digest == manifest.previous:
            return None
        return (
            f"round {manifest.round} follows {manifest.previous[:16]}…, but round {before.round} here has digest "
            f"{before.digest[:16]}…"
        )

    def prune(self, keep_last: int = 2, keep_every: int = 0, keep: Collection[int] = (), limit: int = 8) -> list[int]:
        """Removes old commits and what crashed writers left; returns the rounds that were removed.

        Args:
          keep_last: good commits to keep, counted from the newest; at least that one stays.
          keep_every: rounds that are multiples of it stay too; 0: none.
          keep: rounds that stay in any case.
          limit: commits removed in one call at most, the oldest first, so that a call takes bounded time.
        """
        listed = self.rounds()
        kept: list[int] = []
        for number in reversed(listed):
            if len(kept) == max(1, keep_last):
                break
            if self._good(number) is not None:
                kept.append(number)
        if not kept:
            return []
        with storage_errors("remove old commits", self.url):
            # One round is written at a time, so an unfinished one that is not newer than a commit has no writer.
            for number in self._numbers(PARTIAL):
                if number <= kept[0]:
                    self._files.remove_folder(partial_folder(number))
            stay = {*kept, *keep}
            old = [n for n in listed if n < kept[0] and n not in stay and not (keep_every and n % keep_every == 0)]
            for number in old[:limit]:
                self._remove(whole_folder(number))
        return old[:limit]

    def abandon(self, round: int) -> None:
        """Removes what was written for a round that will not be committed: on a full disk the next one needs room."""
        folder = self._writing(round)
        with storage_errors(f"abandon round {round}", self.url):
            # Where nothing is renamed, a failed commit may have made the round visible after all.
            if self._files.atomic_folders or self._files.size(f"{folder}/{MANIFEST}") is None:
                self._files.remove_folder(folder)

    def discard_after(self, round: int) -> list[int]:
        """Removes everything newer than a round (-1: everything), committed or not; returns those rounds, newest first.

        For a run that goes on from `round`: what was passed over must not be taken for its future.
        """
        partial, whole = set(self._numbers(PARTIAL)), set(self.rounds())
        newer = sorted((n for n in partial | whole if n > round), reverse=True)
        with storage_errors(f"discard what is newer than round {round}", self.url):
            for number in newer:
                self._remove(whole_folder(number))
                if number in partial:
                    self._files.remove_folder(partial_folder(number))
            if newer:
                self._files.sync_folder(FOLDER)
        return newer

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        with storage_errors("list the commits", self.url):
            names = self._files.entries(FOLDER)
        return sorted(int(match[1]) for match in map(pattern.fullmatch, names) if match)

    def _good(self, round: int) -> Manifest | None:
        try:
            return self.read(round)
        except CheckpointError as error:
            if error.number == UNREACHABLE:
                raise
            return None

    def _writing(self, round: int) -> str:
        return partial_folder(round) if self._files.atomic_folders else whole_folder(round)

    def _drop_unlisted(self, folder: str, manifest: Manifest) -> None:
        listed = {entry.name for entry in manifest.files}
        for name in self._files.entries(folder):
            if name not in listed:
                self._files.remove(f"{folder}/{name}")

    def _remove(self, folder: str) -> None:
        # Without its manifest a commit is gone, however much of the rest a crash leaves.
        self._files.remove(f"{folder}/{MANIFEST}")
        self._files.remove_folder(folder)

    def _read(self, manifest: Manifest, file: TensorFile, name: str) -> np.ndarray:
        key = (manifest.round, file.entry.name, file.entry.sha256)
        if key not in self._verified:
            file.check()
            self._verified.add(key)
        return file.read(name)


def _seal(manifest: Manifest, previous: str, previous_round: int | None) -> Manifest:
    return replace(manifest, previous=previous, previous_round=previous_round).sealed()


def _digested(views: Iterable[memoryview], digest: hashlib._Hash) -> Iterator[memoryview]:
    for view in views:
        digest.update(view)
        yield view


def _check_successor(manifest: Manifest, newest: Manifest, url: str) -> None:
    if manifest.run != newest.run:
        raise CheckpointError(
            521,
            f"{url} holds commits of run {newest.run!r}; run {manifest.run!r} cannot commit there",
            "give each run a run.storage of its own",
        )
    if manifest.round <= newest.round:
        raise _committed(manifest.round, url, newest.round)
    if manifest.previous not in ("", newest.digest):
        raise CheckpointError(
            521,
            f"round {manifest.round} follows commit {manifest.previous[:16]}…, but the newest is round {newest.round} "
            f"with digest {newest.digest[:16]}…",
            "another driver of this run has taken over; stop this one",
        )


def _committed(round: int, url: str, newest: int | None = None) -> CheckpointError:
    return CheckpointError(
        520,
        f"round {round} cannot be written: {url} has round {round if newest is None else newest} already",
        "continue from the newest commit, or discard what is newer than the one you continue from",
    )
