"""The keys of the schema: which exist, what type each has, and which one a mistyped key was meant to be.

A key is a path of names from the root (`("inner", "lr")`, written `inner.lr`).  Sections are dataclasses of
`schema.py`; below `model.config` every name is free.  `islands.<name>.ranks=2` is the short form of
`islands.overrides.<name>.ranks=2`, and `vocab_size` of `tokenizer.vocab_size`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ray_diloco.config.islands import IslandsConfig
from ray_diloco.config.schema import Config
from ray_diloco.config.yamlfile import KeyPath
from ray_diloco.errors import ConfigError

ALIASES: dict[KeyPath, KeyPath] = {("vocab_size",): ("tokenizer", "vocab_size")}

# What other programs call our keys; only errors look here.
_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "micro_batch",
    "local_steps": "H",
    "sync_every": "H",
    "seq_len": "sequence_length",
    "output_dir": "root",
}


def dotted(path: KeyPath) -> str:
    """`inner.lr` for `("inner", "lr")`."""
    return ".".join(map(str, path))


@cache
def fields_of(section: type) -> dict[str, Any]:
    """Names of a section's keys with their types, in the order of the schema."""
    hints = typing.get_type_hints(section)
    return {f.name: hints[f.name] for f in dataclasses.fields(section)}


@cache
def schema_keys() -> tuple[KeyPath, ...]:
    """Every key of the schema that takes a value."""
    return tuple(_keys_under(Config, ()))


def _keys_under(section: type, at: KeyPath) -> Iterator[KeyPath]:
    for name, kind in fields_of(section).items():
        if dataclasses.is_dataclass(kind):
            yield from _keys_under(typing.cast(type, kind), (*at, name))
        else:
            yield (*at, name)


def canonical(path: KeyPath, holds_keys: bool = False) -> KeyPath:
    """The place in the schema that a key means, with the short forms of the module docstring written out.

    Args:
      path: the key as it was written.
      holds_keys: whether its value is a mapping, which tells `islands.<name>` from a mistyped `islands.cuont=2`.
    """
    path = ALIASES.get(path, path)
    if path[:1] != ("islands",) or len(path) < (2 if holds_keys else 3):
        return path
    if path[1] not in fields_of(IslandsConfig):
        path = ("islands", "overrides", *path[1:])
    if path[1] == "overrides" and path[3:4] == ("data",) and len(path) > 4:
        short = {("path",): ("data_path",), ("name",): ("data",)}
        return (*path[:3], *short.get(path[4:], ("data_settings", *path[4:])))
    return path


def type_of(path: KeyPath, where: str) -> Any:
    """Type of a key or section; `Any` for free names.

    Args:
      path: a canonical key.
      where: where the key was read, for the error: `conf/x.yaml:3` or `argument a=b`.

    Raises:
      ConfigError: 101 if there is no such key.
    """
    if path[:2] == ("islands", "overrides") and path[3:4] == ("data_settings",) and len(path) > 4:
        return type_of(("data", *path[4:]), where)
    kind: Any = Config
    for depth, name in enumerate(path):
        if dataclasses.is_dataclass(kind):
            fields = fields_of(typing.cast(type, kind))
            if name not in fields:
                raise _unknown(path, depth, list(fields), where)
            kind = fields[name]
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif kind is not Any:
            raise ConfigError(
                101,
                f"{where}: unknown key {dotted(path)!r}; {dotted(path[:depth])!r} is one value ({describe(kind)})",
                f"set {dotted(path[:depth])!r} itself",
            )
        if kind is Any:
            return Any
    return kind


def leaves(value: Any, path: KeyPath, where: str) -> Iterator[tuple[KeyPath, Any]]:
    """The single values below a key, by canonical key; checks that each key exists.

    Raises:
      ConfigError: 101 for an unknown key, 103 for one value where a section stands.
    """
    path = canonical(path, isinstance(value, Mapping))
    kind = type_of(path, where)
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from leaves(below, (*path, name), where)
    elif dataclasses.is_dataclass(kind) and not (value is None or value == {}):
        names = fields_of(typing.cast(type, kind))
        raise ConfigError(
            103,
            f"{where}: {dotted(path)!r} is a section, not one value; got {value!r}",
            f"set one of its keys: {', '.join(f'{dotted(path)}.{name}' for name in names)}",
        )
    elif not dataclasses.is_dataclass(kind):
        yield path, value


def describe(kind: Any) -> str:
    """A type in words."""
    if isinstance(kind, types.UnionType):
        return " or ".join("null" if part is types.NoneType else describe(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return "a list such as [a, b]"
    if typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind):
        return "a mapping"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(kind, "a value")


def nearest(word: str, candidates: list[str], likeness: float = 0.5) -> str | None:
    """The candidate that a mistyped word most likely meant, if one is as near as that (0 unlike, 1 equal)."""
    by_folded = {candidate.casefold(): candidate for candidate in reversed(candidates)}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=likeness)
    return by_folded[close[0]] if close else None


def _unknown(path: KeyPath, depth: int, siblings: list[str], where: str) -> ConfigError:
    """101 with the nearest key: in the same section, else one of a like name anywhere."""
    section = path[:depth]
    name = _ELSEWHERE.get(str(path[depth]), str(path[depth]))
    close = name if name in siblings else nearest(name, siblings)
    if close is not None:
        guess: str | None = dotted((*section, close, *path[depth + 1 :]))
    else:
        last = nearest(_ELSEWHERE.get(str(path[-1]), str(path[-1])), [key[-1] for key in schema_keys()], likeness=0.75)
        guess = next((dotted(key) for key in schema_keys() if key[-1] == last), None)
    valid = f"keys of {dotted(section)!r}" if section else "sections"
    meant = f"did you mean {guess!r}? " if guess else ""
    return ConfigError(101, f"{where}: unknown key {dotted(path)!r}", f"{meant}{valid}: {', '.join(siblings)}")
