"""The manifest of a commit: everything that a run needs to go on, and what makes the commit visible.

Plain JSON, written last.  Its own digest tells a torn or edited manifest from a good one; the digest of the commit
before it chains the history of a run, so that a replaced manifest or a second writer is noticed.  What the rounds
layer keeps in here (ledger, membership, counters) passes through unread and unchanged.  Random state is not among it:
whatever is drawn is a function of seed and position.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray_diloco.errors import CheckpointError
from ray_diloco.provenance.digest import canonical_json, digest_json

FORMAT = 1
MANIFEST_END = b"}\n"
KINDS = ("anchor", "outer", "inner")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A tensor file of a commit.

    Attributes:
      name: file name inside the folder of the commit.
      bytes: its size.
      sha256: digest of its content (hex).
      kind: anchor | outer | inner.
      island: whose inner state it is; None for anchor and outer state.
    """

    name: str
    bytes: int
    sha256: str
    kind: str
    island: str | None = None


@dataclass(frozen=True)
class Manifest:
    """One commit.

    Attributes:
      run: name of the run.
      round: outer round that it ends; 0 is the founding commit.
      versions: fragment → how often its anchor has moved.
      step: position of the learning-rate schedule: the run's global inner step.
      layout: name and shape of each tensor, in canonical order.
      files: the tensor files.
      ledger, membership, sinks, counters: plain JSON of the layers above.
      config_digest: SHA-256 of the resolved configuration.
      environment: versions and machine that wrote it (`provenance.environment_report`).
      created: seconds since 1970, by the clock of the driver.
      previous, previous_round: digest and round of the commit before this one; "" and None for the first.
      format: version of this file format.
      digest: SHA-256 over the canonical JSON of all other fields.
    """

    run: str
    round: int
    versions: dict[str, int]
    step: int
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    files: tuple[FileEntry, ...]
    ledger: dict[str, Any] = field(default_factory=dict)
    membership: dict[str, Any] | list[Any] = field(default_factory=dict)
    sinks: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    config_digest: str = ""
    created: float = 0.0
    previous: str = ""
    previous_round: int | None = None
    format: int = FORMAT
    digest: str = ""

    def sealed(self) -> Manifest:
        """This manifest with its digest, as it will be read back (tuples inside the opaque parts become lists).

        Raises:
          CheckpointError: 518, a part is no plain JSON; 510, a field has the wrong type.
        """
        fields = self._fields()
        fields.pop("digest")
        try:
            digest = digest_json(fields)
        except ValueError as error:
            raise CheckpointError(
                518,
                f"the manifest of round {self.round} cannot be written: {error}",
                "hand over plain JSON: dicts with string keys, lists, strings, finite numbers, booleans, null",
            ) from error
        return Manifest.from_json(_text({**fields, "digest": digest}))

    def to_json(self) -> str:
        """The text of the file: one line per field, keys sorted."""
        return _text(self._fields())

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads a manifest and checks it against its digest.

        Raises:
          CheckpointError: 510, not the JSON of a manifest; 511, another format version; 512, the digest differs.
        """
        fields = _parse(text)
        if fields.get("format") != FORMAT:
            raise CheckpointError(
                511,
                f"the manifest has format version {fields.get('format')!r}; this ray_diloco reads version {FORMAT}",
                "continue the run with the ray_diloco that wrote it, or a newer one",
            )
        _check_fields(fields, _MANIFEST_TYPES, "the manifest")
        for entry in fields["files"]:
            _check_fields(entry, _FILE_TYPES, "a file entry of the manifest")
        content = {key: value for key, value in fields.items() if key != "digest"}
        try:
            digest = digest_json(content)
        except ValueError as error:
            raise _unreadable(str(error)) from error
        if digest != fields["digest"]:
            raise CheckpointError(
                512,
                f"the manifest of round {fields['round']} names digest {fields['digest'][:16]}…, its content has "
                f"{digest[:16]}…",
                "it was edited or damaged after it was written; use an earlier commit",
            )
        fields["layout"] = tuple((name, tuple(shape)) for name, shape in fields["layout"])
        fields["files"] = tuple(FileEntry(**entry) for entry in fields["files"])
        return cls(**fields)

    def files_of(self, kind: str, island: str | None = None) -> tuple[FileEntry, ...]:
        """Files of a kind, by name; of one island if it is given."""
        found = [f for f in self.files if f.kind == kind and (island is None or f.island == island)]
        return tuple(sorted(found, key=lambda f: f.name))

    def _fields(self) -> dict[str, Any]:
        # Not dataclasses.asdict, which would copy a large ledger value by value.
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["files"] = [dataclasses.asdict(entry) for entry in self.files]
        return fields


def _text(fields: dict[str, Any]) -> str:
    lines = (f"{json.dumps(key)}: {canonical_json(fields[key])}" for key in sorted(fields))
    return "{\n" + ",\n".join(lines) + "\n" + MANIFEST_END.decode()


def _parse(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(error)) from error
    if not isinstance(fields, dict):
        raise _unreadable(f"it holds a {type(fields).__name__}")
    return fields


def _check_fields(fields: Any, types: dict[str, Callable[[Any], bool]], what: str) -> None:
    if not isinstance(fields, dict):
        raise _unreadable(f"{what} is {fields!r}")
    missing, unknown = sorted(types.keys() - fields.keys()), sorted(fields.keys() - types.keys())
    if missing or unknown:
        raise _unreadable(f"{what} lacks the keys {missing} and has the unknown keys {unknown}")
    for key, fits in types.items():
        if not fits(fields[key]):
            raise _unreadable(f"{what} has {key} = {str(fields[key])[:80]!r}, of type {type(fields[key]).__name__}")


def _unreadable(detail: str) -> CheckpointError:
    return CheckpointError(510, f"this is no readable manifest: {detail}", "use an earlier commit")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_layout(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], list)
        and all(_is_count(n) for n in item[1])
        for item in value
    )


_FILE_TYPES: dict[str, Callable[[Any], bool]] = {
    "name": _is_text,
    "bytes": _is_count,
    "sha256": _is_text,
    "kind": lambda value: value in KINDS,
    "island": lambda value: value is None or isinstance(value, str),
}

_MANIFEST_TYPES: dict[str, Callable[[Any], bool]] = {
    "run": _is_text,
    "round": _is_count,
    "versions": lambda value: isinstance(value, dict) and all(_is_count(n) for n in value.values()),
    "step": _is_count,
    "layout": _is_layout,
    "files": lambda value: isinstance(value, list),
    "ledger": _is_object,
    "membership": lambda value: isinstance(value, dict | list),
    "sinks": _is_object,
    "counters": _is_object,
    "environment": _is_object,
    "config_digest": _is_text,
    "created": lambda value: type(value) in (int, float),
    "previous": _is_text,
    "previous_round": lambda value: value is None or _is_count(value),
    "format": _is_count,
    "digest": _is_text,
}
