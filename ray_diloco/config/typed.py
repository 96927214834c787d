"""The merged values as a typed `Config`.

OmegaConf's structured configuration converts (3 to 3.0, "1e-3" to 0.001), resolves `${…}` and refuses wrong types; its
errors become ours, with the place where the value was written.  What it would convert in silence is refused first.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ray_diloco.config.keys import describe, dotted, fields_of, type_of
from ray_diloco.config.limits import ALLOWED
from ray_diloco.config.schema import Config, DataConfig
from ray_diloco.config.tree import Leaf, Tree
from ray_diloco.config.yamlfile import KeyPath, escape_references, write_scalar
from ray_diloco.errors import ConfigError

DEFAULT_ORIGIN = "default"


@dataclass(frozen=True)
class Composed:
    """A configuration and where each value came from.

    Attributes:
      config: the whole run.
      origins: for every dotted key `default`, `conf/<group>/<name>.yaml`, the experiment file, or `argument`.
    """

    config: Config
    origins: dict[str, str]


def typed(tree: Tree) -> Composed:
    """The tree as a `Config`.

    Raises:
      ConfigError: 103 for a value of the wrong type, 107 for a `${…}` that cannot be resolved.
    """
    nested: dict[Any, Any] = {}
    for path, leaf in tree.items():
        _check_truth(path, leaf)
        inner = nested
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = leaf.value
    try:
        merged = OmegaConf.merge(_schema(), OmegaConf.create(nested))
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise _type_error(error, (), tree) from error
    for name, override in config.islands.overrides.items():
        override.data_settings = _typed_data_settings(name, override.data_settings, tree)
    by_text = {dotted(path): leaf.origin for path, leaf in tree.items()}
    origins = {key: by_text.get(key, DEFAULT_ORIGIN) for key in (dotted(path) for path, _ in leaf_values(config))}
    return Composed(config, origins)


@cache
def _schema() -> Any:
    """The schema for OmegaConf, which copies it at every merge: making it takes longer than all else here."""
    return OmegaConf.structured(Config)


def _typed_data_settings(island: str, settings: dict[str, Any], tree: Tree) -> dict[str, Any]:
    """The free keys of an island's data, with the types that they have in the section `data`."""
    try:
        section = OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.create(escape_references(settings)))
    except OmegaConfBaseException as error:
        raise _type_error(error, ("islands", "overrides", island, "data_settings"), tree) from error
    return {key: getattr(section, key) for key in settings}


def _check_truth(path: KeyPath, leaf: Leaf) -> None:
    """Refuses what OmegaConf would convert in silence: true to 1.0 or "True", 7 to true, `???` to the default.

    And one value where a mapping stands, of which it speaks in words of its own.
    """
    kind, value = type_of(path, leaf.where), leaf.value
    if typing.get_origin(kind) is dict:
        wrong = not isinstance(value, Mapping)
    elif kind in (bool, bool | None):
        wrong = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        parts = value if isinstance(value, list) else [value]
        wrong = kind is not Any and any(isinstance(part, bool) for part in parts)
    if wrong or value == "???":
        raise _wrong_type(path, leaf)


def _wrong_type(path: KeyPath, leaf: Leaf) -> ConfigError:
    expected = describe(type_of(path, leaf.where))
    allowed = ALLOWED.get(dotted(path))
    choices = f" ({', '.join(map(str, allowed))})" if allowed else ""
    got = write_scalar(leaf.value)
    return ConfigError(
        103, f"{leaf.where}: {dotted(path)!r} must be {expected}; got {got}", f"give {expected}{choices}"
    )


def _type_error(error: OmegaConfBaseException, at: KeyPath, tree: Tree) -> ConfigError:
    """Turns OmegaConf's error about a key below `at` into ours."""
    key = dotted((*at, *(error.full_key or "").split("[")[0].split(".")))
    path = next((path for path in tree if dotted(path) == key), None)
    if path is None:
        return ConfigError(103, f"{key}: {str(error).splitlines()[0]}", "see conf/config.yaml for the key's meaning")
    leaf = tree[path]
    if isinstance(leaf.value, str) and "${" in leaf.value:
        problem = str(error).splitlines()[0]
        return ConfigError(
            107, f"{leaf.where}: {problem}", "mend the reference, or write \\${ for the plain characters"
        )
    return _wrong_type(path, leaf)


def leaf_values(section: Any, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every single value of a configuration, by key, in the order of the schema."""
    if dataclasses.is_dataclass(section):
        section = {name: getattr(section, name) for name in fields_of(cast(type, type(section)))}
    if isinstance(section, Mapping) and section:
        for name, below in section.items():
            yield from leaf_values(below, (*at, name))
    else:
        yield at, section
