"""One file, or all arguments together, as a layer: which groups it chooses and which single values it sets.

Values are read with their place (file and line, or the argument's text), so that an error found later can still name
it.  Values are YAML; an argument whose key holds text is taken as it stands (`run.name=007`, `export.prompt="if x: "`),
and names in a list stay names (`islands.names=[no,se]`).  `inner.H: 20` at the top of a file is short for a section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from ray_diloco.config.groups import GROUPS, Search
from ray_diloco.config.keys import canonical, dotted, leaves, type_of
from ray_diloco.config.tree import Leaf, Tree, put
from ray_diloco.config.yamlfile import Document, KeyPath, read_file, read_scalar
from ray_diloco.errors import ConfigError

ARGUMENT_ORIGIN = "argument"
# A file that says `complete: true` holds every value itself: no group file is read under it.
COMPLETE = "complete"


@dataclass(frozen=True)
class Choice:
    """A group that a layer chooses; `by_name` if it was written as `model.name`, which may be a name of one's own."""

    value: str
    where: str
    by_name: bool


@dataclass
class Layer:
    """What one file, or all arguments together, set."""

    origin: str
    choices: dict[str, Choice] = field(default_factory=dict)
    leaves: Tree = field(default_factory=dict)
    complete: bool = False
    experiment: Choice | None = None


def read_arguments(arguments: Sequence[str], settings: Mapping[str, Any]) -> Layer:
    """All arguments as one layer; the later of two settings of one key wins.

    Args:
      arguments: `key=value` texts.
      settings: nested or dotted keys from Python; they win over the texts.

    Raises:
      ConfigError: 101 unknown key, 103 a section or group that got a wrong value, 104 malformed text.
    """
    layer = Layer(ARGUMENT_ORIGIN)
    for text in arguments:
        _read_argument(text, layer)
    for key, value in settings.items():
        _read_entry(tuple(key.split(".")), value, f"setting {key!r}", layer)
    return layer


def _read_argument(text: str, layer: Layer) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key or any(part == "" or part != part.strip() for part in key.split(".")):
        raise ConfigError(
            104, f"argument {text!r} is not of the form key=value", "write inner.H=50 or model=tiny, without spaces"
        )
    path, where = tuple(key.split(".")), f"argument {text!r}"
    parsed: Any = value
    if path != ("experiment",) and not (len(path) == 1 and path[0] in GROUPS):
        kind = type_of(canonical(path, holds_keys=value.startswith("{")), where)
        parsed = _argument_value(value, kind, where)
    _read_entry(path, parsed, where, layer)


def _argument_value(text: str, kind: Any, where: str) -> Any:
    """Value of an argument: YAML, or where the key holds text, the text as it stands, null and quotes apart."""
    if kind in (str, str | None):
        if text.lower() == "null" or (text == "" and kind is not str):
            return None
        quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        if not quoted:
            return text
    try:
        return read_scalar(text, as_text=kind == list[str])
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(104, f"{where}: the value is not YAML ({problem})", "mend it, or put it in quotes") from error


def _read_entry(path: KeyPath, value: Any, where: str, layer: Layer) -> None:
    """Adds one key of a layer, at any depth: a group choice, or the leaves below it."""
    if path == ("experiment",):
        layer.experiment = Choice(_text(value, path, where), where, by_name=False)
    elif len(path) == 1 and path[0] in GROUPS and not isinstance(value, Mapping | None):
        layer.choices[path[0]] = Choice(_text(value, path, where), where, by_name=False)
    else:
        for leaf_path, leaf in leaves(value, path, where):
            put(layer.leaves, leaf_path, Leaf(leaf, layer.origin, where))
            if len(leaf_path) == 2 and leaf_path[0] in GROUPS and leaf_path[1] == "name" and isinstance(leaf, str):
                layer.choices[leaf_path[0]] = Choice(leaf, where, by_name=True)


def _text(value: Any, path: KeyPath, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(103, f"{where}: {dotted(path)!r} takes a name; got {value!r}", f"write {dotted(path)}=<name>")
    return value


def read_experiment(search: Search, said: Layer, config_file: str | None) -> Layer | None:
    """The experiment file that was asked for, as a layer."""
    if config_file is None and said.experiment is None:
        return None
    if config_file is None:
        choice = cast(Choice, said.experiment)
        document, label = search.read("experiment", choice.value, choice.where)
    elif said.experiment is not None:
        raise ConfigError(
            108, f"both --config {config_file} and experiment={said.experiment.value} were given", "give one of them"
        )
    else:
        document, label = read_file(Path(config_file).expanduser()), config_file
    return _layer_of(document, label)


def read_sections(document: Document, label: str, sections: Sequence[KeyPath]) -> Layer:
    """Sections of a file, each written as an experiment file is, as one layer; the later of two settings wins."""
    layer = Layer(label)
    for at in sections:
        _read_section(document, label, at, layer)
    return layer


def _layer_of(document: Document, label: str) -> Layer:
    layer = Layer(label, complete=document.values.get(COMPLETE) is True)
    _read_section(document, label, (), layer)
    return layer


def _read_section(document: Document, label: str, at: KeyPath, layer: Layer) -> None:
    section: Any = document.values
    for name in at:
        section = section[name]
    for name, value in section.items():
        first = document.lines.get((*at, name), 1)
        if name == "experiment":
            raise ConfigError(
                108, f"{label}:{first}: an experiment file cannot name another", "copy what it needs from there"
            )
        if name == COMPLETE and not at:
            continue
        for path, below in entries((name,), value):
            line = document.lines.get((*at, *path), first)
            _read_entry((*str(name).split("."), *path[1:]), below, f"{label}:{line}", layer)


def entries(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Splits a mapping down to its single entries, so that each is read with its own line."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from entries((*path, name), below)
    else:
        yield path, value
