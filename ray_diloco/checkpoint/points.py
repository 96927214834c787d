"""Progress points: what each rank of an island keeps of the midst of a segment, in the storage of the run's commits.

`<url>/points/<island>/r00000-s000001250.safetensors` has the tensors of rank 0 after global step 1250, and a JSON file
of the same name, written after it, says what they belong to and what their digest is.  A file that is torn, or
replaced, differs from that and counts as none.  Each rank keeps its last two: ranks write in the background, and the
newest point of an island is the newest that all of them have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

import numpy as np

from ray_diloco.checkpoint.files import Files, storage_errors
from ray_diloco.checkpoint.tensors import encode, header_length, parse_header

FOLDER = "points"
# How many each rank keeps.
KEPT = 2


@dataclass(frozen=True)
class Mark:
    """What a point belongs to.

    Attributes:
      epoch: of the driver that gave the work.
      world: ranks of the island.
      start_step, steps: the segment, in global steps.
      blocks: its lease, as pairs of start and stop.
      bases: rows of fragment, version, steps and tokens, as the segment began.
      before: blocks that were trained before it, and that no contribution had had.
    """

    epoch: int
    world: int
    start_step: int
    steps: int
    blocks: tuple[tuple[int, int], ...]
    bases: tuple[tuple[int, ...], ...]
    before: tuple[tuple[int, int], ...] = ()

    @property
    def json(self) -> dict[str, Any]:
        """As it is stored."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


@dataclass(frozen=True)
class Points:
    """The progress points of a run."""

    files: Files
    url: str

    def write(self, island: str, rank: int, done: int, mark: Mark, tensors: Mapping[str, np.ndarray]) -> str:
        """Writes a rank's part of a point; returns its name.

        Raises:
          CheckpointError: 503 to 506, the storage fails.
        """
        name = point_name(rank, mark.start_step + done)
        path = f"{_folder(island)}/{name}"
        size, views = encode(tensors)
        digest = hashlib.sha256()

        def digested() -> Iterator[memoryview]:
            for view in views:
                digest.update(view)
                yield view

        with storage_errors(f"write a progress point of {island}", self.url):
            self.files.write(f"{path}.safetensors", digested())
            told = {"done": done, "bytes": size, "sha256": digest.hexdigest(), "mark": mark.json}
            self.files.write(f"{path}.json", [json.dumps(told).encode()])
        return name

    def keep_only(self, island: str, rank: int, names: list[str]) -> None:
        """Removes all that a rank has but some.  Raises as `write`."""
        with storage_errors(f"remove progress points of {island}", self.url):
            for entry in self.files.entries(_folder(island)):
                if entry.startswith(f"r{rank:05d}-") and entry.partition(".")[0] not in names:
                    self.files.remove(f"{_folder(island)}/{entry}")

    def found(self, island: str, rank: int) -> dict[str, dict[str, Any]]:
        """What a rank has kept, by name: how many steps were `done`, and the `mark`.  Raises as `write`."""
        found = {}
        with storage_errors(f"look for progress points of {island}", self.url):
            for entry in self.files.entries(_folder(island)):
                if entry.startswith(f"r{rank:05d}-") and entry.endswith(".json"):
                    told = self._told(f"{_folder(island)}/{entry}")
                    if told is not None:
                        found[entry.removesuffix(".json")] = told
        return found

    def read(self, island: str, name: str) -> dict[str, np.ndarray] | None:
        """A rank's part of a point; None if it is not whole.  Raises as `write`."""
        path = f"{_folder(island)}/{name}"
        with storage_errors(f"read a progress point of {island}", self.url):
            told = self._told(f"{path}.json")
            if told is None or self.files.size(f"{path}.safetensors") != told["bytes"]:
                return None
            content = self.files.view(f"{path}.safetensors")
            if hashlib.sha256(content).hexdigest() != told["sha256"]:
                return None
        length = header_length(bytes(content[:8]), len(content))
        tensors = parse_header(bytes(content[8 : 8 + length]), len(content))
        return {name: np.frombuffer(content[t.start : t.stop], t.dtype).reshape(t.shape) for name, t in tensors.items()}

    def clear(self) -> None:
        """Removes all points of the run.  Raises as `write`."""
        with storage_errors("remove progress points", self.url):
            self.files.remove_folder(FOLDER)

    def _told(self, path: str) -> dict[str, Any] | None:
        size = self.files.size(path)
        try:
            told = json.loads(self.files.read(path, 0, size)) if size else None
        except ValueError:
            return None
        return told if isinstance(told, dict) and told.keys() >= {"done", "bytes", "sha256", "mark"} else None


def point_name(rank: int, step: int) -> str:
    """Name of a rank's part of a point after a global step."""
    return f"r{rank:05d}-s{step:09d}"


def _folder(island: str) -> str:
    return f"{FOLDER}/{quote(island, safe='')}"
