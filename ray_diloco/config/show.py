"""A configuration as YAML: every resolved value, and behind it where it came from.

This is what `--print-config` prints and what a run directory keeps as `config.yaml`.  It says `complete: true`, so
that `--config` takes it back as it is, whatever group files say by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ray_diloco.config.keys import dotted, fields_of
from ray_diloco.config.layers import COMPLETE
from ray_diloco.config.typed import Composed
from ray_diloco.config.yamlfile import KeyPath, escape_references, write_scalar

_HEADER = "# Every value of a run, and where it came from.  Use it again with: ray-diloco train --config FILE\n"
# Origins stand in one column, unless a value is longer than this.
_COLUMN = 60


def config_yaml(composed: Composed) -> str:
    """The whole configuration as commented YAML."""
    lines = [
        (f"{COMPLETE}: true", "nothing is read from conf/ under this file"),
        *_lines(composed, composed.config, ()),
    ]
    column = max(len(text) for text, _ in lines if len(text) <= _COLUMN)
    return _HEADER + "".join(f"{text:<{column}}  # {note}\n" if note else f"{text}\n" for text, note in lines)


def _lines(composed: Composed, section: Any, at: KeyPath) -> Iterator[tuple[str, str]]:
    """Each line with its comment; sections have none."""
    indent = "  " * len(at)
    for name, value in _entries(section).items():
        path = (*at, name)
        if _entries(value):
            yield f"{indent}{write_scalar(name)}:", ""
            yield from _lines(composed, value, path)
        else:
            text = write_scalar(escape_references(value))
            yield f"{indent}{write_scalar(name)}: {text}", composed.origins[dotted(path)]


def _entries(value: Any) -> Mapping[Any, Any]:
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in fields_of(cast(type, type(value)))}
    return value if isinstance(value, Mapping) else {}
