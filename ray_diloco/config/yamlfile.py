"""Reading and writing of YAML scalars as the configuration means them.

Plain YAML 1.1 turns `off` into false, `no` into false, `010` into 8 and `1e-3` into text, each of which is a trap in
a configuration (`observe.wandb: off`, an island named `no`, a learning rate).  This reader knows true/false, decimal
numbers with exponents and null, and nothing else; it keeps the line of every key, so that an error can name it.
The writer quotes whatever this reader or a plain YAML 1.1 reader would take for something other than text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ray_diloco.errors import ConfigError

# The place of a key: names from the root of the configuration (or of a file) down.
KeyPath = tuple[Any, ...]

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)

_REFERENCE = re.compile(r"(\\*)\$\{")


class _Reader(yaml.SafeLoader):  # type: ignore[misc]
    """SafeLoader with the resolvers named in the module docstring."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (yaml's own protocol: replaces the inherited table)


class _Writer(yaml.SafeDumper):  # type: ignore[misc]
    """SafeDumper that also quotes what only our reader takes for a number."""


_Reader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]
)
_Reader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), [*"-+0123456789"])
_Reader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+0123456789."])
_Reader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Writer.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+0123456789."])
_Writer.add_representer(
    str,
    lambda writer, text: writer.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"'),
)


@dataclass(frozen=True)
class Document:
    """What a configuration file says.

    Attributes:
      values: the mapping at the root of the file.
      lines: line number (from 1) of every key, by its place in the file.
    """

    values: dict[Any, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_file(path: Path) -> Document:
    """Reads a configuration file.

    Raises:
      ConfigError: 105 if it cannot be read, 106 if it is no YAML mapping (with file and line).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _bad_yaml(f"{path}", f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(105, f"cannot read {path}: {reason}", "give the path of a readable YAML file") from error
    reader = _Reader(text)
    lines: dict[KeyPath, int] = {}
    try:
        root = reader.get_single_node()
        if root is None:
            return Document({})
        _note_lines(root, (), lines, path)
        values = reader.construct_document(root)
    except yaml.YAMLError as error:
        raise _bad_yaml(_position(path, error), getattr(error, "problem", None) or str(error)) from error
    finally:
        reader.dispose()
    if not isinstance(values, dict):
        raise _bad_yaml(f"{path}:1", f"the file holds {_kind(values)}, not keys with values")
    return Document(values, lines)


def read_scalar(text: str, as_text: bool = False) -> Any:
    """Value of one argument; with `as_text`, numbers stay text.  Raises yaml.YAMLError if it is not YAML."""
    return yaml.load(text, Loader=yaml.BaseLoader if as_text else _Reader)


def write_scalar(value: Any) -> str:
    """One line of YAML for a value, lists and mappings in flow style."""
    text: str = yaml.dump(
        value, Dumper=_Writer, default_flow_style=True, width=2**31, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def escape_references(value: Any) -> Any:
    """The same value, list or mapping, with `${` written so that OmegaConf takes it for plain characters."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: match[1] * 2 + "\\${", value)
    if isinstance(value, list):
        return [escape_references(item) for item in value]
    return {key: escape_references(item) for key, item in value.items()} if isinstance(value, dict) else value


def _note_lines(node: yaml.Node, at: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        place = (*at, key.value)
        line = key.start_mark.line + 1
        if place in lines and key.value != "<<":
            dotted = ".".join(map(str, place))
            raise _bad_yaml(f"{path}:{line}", f"the key {dotted!r} stands here and in line {lines[place]}")
        lines[place] = line
        _note_lines(value, place, lines, path)


def _bad_yaml(where: str, problem: str) -> ConfigError:
    return ConfigError(
        106, f"{where}: {problem}", "mend the YAML in that line; `key: value`, sections indented by spaces"
    )


def _position(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}" if mark is not None else f"{path}"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else f"the value {value!r}"
