"""Comparison files: `conf/compare/<name>.yaml` names variants that are trained in turn and laid side by side.

`common` is an experiment file that all variants share, and each entry of `variants` lies over it; both may choose
groups (`algorithm: eager`), nested or with dotted keys.  Arguments lie over every variant.  `orderings` are claims
about which of two variants ends with the lower loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.groups import search_path
from ray_diloco.config.keys import dotted, nearest
from ray_diloco.config.layers import entries, read_sections
from ray_diloco.config.typed import DEFAULT_ORIGIN, Composed
from ray_diloco.config.yamlfile import Document, read_file, write_scalar
from ray_diloco.errors import ConfigError

DEFAULT = "family"
_SECTIONS = ("common", "variants", "orderings")
_ORDERING = ("claim", "better", "worse", "source", "within")


@dataclass(frozen=True)
class Variant:
    """One run of a comparison.

    Attributes:
      settings: what the file sets for it alone, `key=value`.
      composed: its whole configuration, which makes it a run of its own below the comparison's folder.
      warnings: what is known to disappoint in it, one sentence each.
    """

    name: str
    settings: tuple[str, ...]
    composed: Composed
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Ordering:
    """A claim: `better` ends with a lower loss than `worse`, or at most `within` nats above it."""

    claim: str
    better: str
    worse: str
    source: str
    within: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """What a comparison file and the arguments over it ask for.

    Attributes:
      name: of the comparison, and of its folder below `run.root`.
      folder: where its runs and results go.
      common: what the file sets for all variants, `key=value`.
    """

    name: str
    folder: Path
    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    orderings: tuple[Ordering, ...]


def read_comparison(
    name: str | None = None,
    arguments: Sequence[str] = (),
    config_file: str | None = None,
    *,
    conf_dir: str | None = None,
) -> Comparison:
    """Reads a comparison and puts the configuration of every variant together.

    Args:
      name: of a file in `conf/compare/`; default `family`.
      arguments: `key=value` texts that lie over all variants; `run.name` names the comparison.
      config_file: a comparison file in place of `name`.

    Raises:
      ConfigError: 150, the file has not the form of the module docstring; else as for a single run.
    """
    if name is not None and config_file is not None:
        raise ConfigError(108, f"both --config {config_file} and the comparison {name} were given", "give one of them")
    if config_file is not None:
        document, label = read_file(Path(config_file).expanduser()), config_file
        name = Path(config_file).stem
    else:
        name = name or DEFAULT
        document, label = search_path(conf_dir).read("compare", name, f"compare {name}")
    _check_form(document, label)
    folder, variants = None, []
    for variant, section in document.values["variants"].items():
        layer = read_sections(document, label, [("common",), ("variants", variant)])
        composed = compose(arguments, conf_dir=conf_dir, experiment=layer)
        run = composed.config.run
        named = run.name if composed.origins["run.name"] != DEFAULT_ORIGIN else name
        here = Path(run.root, named).expanduser()
        if folder not in (None, here):
            raise _wrong(document, label, ("variants", variant), "a variant has its own run.name or run.root")
        folder = here
        config = replace(composed.config, run=replace(run, root=str(folder), name=variant))
        origins = composed.origins | {"run.name": label}
        variants.append(Variant(variant, _settings(section), Composed(config, origins), tuple(check(config))))
    assert folder is not None  # `_check_form` has seen a variant
    return Comparison(
        folder.name, folder, _settings(document.values["common"]), tuple(variants), _orderings(document, label)
    )


def _check_form(document: Document, label: str) -> None:
    values = document.values
    for name in values:
        if name not in _SECTIONS:
            close = nearest(str(name), list(_SECTIONS))
            problem = f"unknown key {name!r}" + (f"; did you mean {close!r}?" if close else "")
            raise _wrong(document, label, (name,), problem)
    values.setdefault("common", {})
    if not isinstance(values["common"], Mapping):
        raise _wrong(document, label, ("common",), "'common' is no mapping of keys")
    variants = values.get("variants")
    if not isinstance(variants, dict) or not variants:
        raise _wrong(document, label, ("variants",), "'variants' is no mapping of names to settings")
    for name in variants:
        # A variant without settings is the common configuration itself.
        variants[name] = {} if variants[name] is None else variants[name]
        if not isinstance(name, str) or not isinstance(variants[name], Mapping):
            raise _wrong(document, label, ("variants", name), f"the variant {name!r} is no name with settings")


def _orderings(document: Document, label: str) -> tuple[Ordering, ...]:
    found, variants = [], document.values["variants"]
    given = document.values.get("orderings") or []
    if not isinstance(given, list):
        raise _wrong(document, label, ("orderings",), "'orderings' is no list")
    for number, item in enumerate(given, start=1):
        what = f"ordering {number}"
        if not isinstance(item, Mapping) or not {"claim", "better", "worse"} <= item.keys() <= set(_ORDERING):
            problem = f"{what} has not the keys claim, better, worse, source and within"
            raise _wrong(document, label, ("orderings",), problem)
        for key in ("better", "worse"):
            if item[key] not in variants:
                raise _wrong(document, label, ("orderings",), f"{what}: there is no variant {item[key]!r}")
        within = item.get("within", 0.0)
        if isinstance(within, bool) or not isinstance(within, int | float) or not 0 <= within < float("inf"):
            raise _wrong(document, label, ("orderings",), f"{what}: within={within!r} is no number of nats")
        found.append(
            Ordering(str(item["claim"]), item["better"], item["worse"], str(item.get("source", "")), float(within))
        )
    return tuple(found)


def _settings(section: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{dotted(path)}={write_scalar(value)}" for path, value in entries((), section) if path)


def _wrong(document: Document, label: str, at: tuple[Any, ...], problem: str) -> ConfigError:
    return ConfigError(
        150,
        f"{label}:{document.lines.get(at, 1)}: {problem}",
        "a comparison has `common:` (settings), `variants:` (name: settings) and `orderings:` (claim, better, worse, "
        "source, within); see conf/compare/family.yaml",
    )
