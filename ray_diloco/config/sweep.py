"""Sweep files: `conf/sweep/<name>.yaml` says what is tried, how it is chosen, and what all trials share.

`common` is an experiment file that lies under every trial, `space` has a domain for each key that is tried
(`space.py`), and the other keys are those of `SweepOptions`.  Arguments lie over the file: `sweep.trials=30`,
`sweep.space.outer.lr=[0.5,1.0]`, and any other key for all trials.  A trial is a run below the sweep's folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.groups import GROUPS, search_path
from ray_diloco.config.keys import canonical, dotted, nearest, type_of
from ray_diloco.config.layers import Layer, entries, read_arguments, read_sections
from ray_diloco.config.schema import Config, island_names
from ray_diloco.config.space import DISTRIBUTIONS, Between, Domain, draws, grid, label_of, read_domain, size_of
from ray_diloco.config.typed import DEFAULT_ORIGIN, Composed
from ray_diloco.config.yamlfile import Document, read_file, read_scalar, write_scalar
from ray_diloco.errors import ConfigError

DEFAULT = "outer"
SEARCHES = ("grid", "random", "optuna")
SCHEDULERS = ("none", "asha")
# What a sweep gives to its trials itself.
_ITS_OWN = ("run.name", "run.root", "run.storage", "run.fresh", "observe.wandb_group")


@dataclass(frozen=True)
class SweepOptions:
    """How trials are chosen and halted.

    Attributes:
      search: grid (all combinations), random or optuna.
      trials: how many, unless it is a grid.
      seed: of the draws.
      concurrent: trials at a time at most; 0: as many as find room.
      tokens: that every trial trains, of all islands together, as near as whole rounds come; 0: run.rounds rounds.
      scheduler: none, or asha, which halts trials that are behind others at the same number of tokens.
      grace_tokens: tokens before which asha halts nobody; 0: an eighth of the longest trial.
      reduction: of so many trials at a rung asha lets one go on.
      diverged: a trial ends when its held-out loss is above so many times that of guessing.
      retries: how often a trial whose process died is started again.
      cpus: that a trial claims beside those of its islands.
    """

    search: str = "grid"
    trials: int = 20
    seed: int = 0
    concurrent: int = 0
    tokens: int = 0
    scheduler: str = "none"
    grace_tokens: int = 0
    reduction: int = 2
    diverged: float = 1.5
    retries: int = 2
    cpus: float = 0.0


_LEAST = {"trials": 1, "concurrent": 0, "tokens": 0, "grace_tokens": 0, "reduction": 2, "retries": 0, "cpus": 0.0}
_SECTIONS = ("common", "space", *(option.name for option in fields(SweepOptions)))


@dataclass(frozen=True)
class Trial:
    """One combination and the run that tries it.

    Attributes:
      label: its name in tables; that of its run has the sweep's name in front.
      composed: its whole configuration; None if that is refused.
      refusal: why it is.
      warnings: what is known to disappoint in it, one sentence each.
    """

    label: str
    parameters: dict[str, Any]
    composed: Composed | None = None
    refusal: ConfigError | None = None
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The configuration of a trial that is not refused."""
        assert self.composed is not None
        return self.composed.config


@dataclass(frozen=True)
class Sweep:
    """What a sweep file and the arguments over it ask for.

    Attributes:
      name: of the sweep, and of its folder below `run.root`.
      folder: where its runs and results go.
      common: what all trials share, `key=value`.
      space: what is tried.
      base: the configuration of all trials but for what is tried.
    """

    name: str
    folder: Path
    common: tuple[str, ...]
    space: dict[str, Domain]
    options: SweepOptions
    base: Composed
    _layer: Layer = field(repr=False)
    _arguments: tuple[str, ...] = ()
    _conf_dir: str | None = None

    def trial(self, parameters: Mapping[str, Any]) -> Trial:
        """The trial of a combination; one that cannot be run says why."""
        label, chosen = label_of(parameters), dict(parameters)
        try:
            composed = compose(self._arguments, conf_dir=self._conf_dir, settings=chosen, experiment=self._layer)
            composed = self._placed(composed, label)
            return Trial(label, chosen, composed, warnings=tuple(check(composed.config)))
        except ConfigError as error:
            return Trial(label, chosen, refusal=error)

    def proposals(self) -> Iterator[Trial]:
        """The trials of a grid or a random search, in order; none of a search that learns."""
        options = self.options
        if options.search == "grid":
            yield from map(self.trial, grid(self.space))
        elif options.search == "random":
            yield from map(self.trial, draws(self.space, options.trials, options.seed))

    @property
    def planned(self) -> int:
        """How many trials there will be."""
        size = size_of(self.space)
        return int(size if self.options.search == "grid" else min(size, self.options.trials))

    def run_name(self, label: str) -> str:
        """Name of the run of a trial; no other run on a cluster has it."""
        return f"{self.name[: 63 - len(label)]}-{label}"

    def _placed(self, composed: Composed, label: str) -> Composed:
        config, options = composed.config, self.options
        name = self.run_name(label)
        storage = config.run.storage and f"{config.run.storage.rstrip('/')}/{name}"
        run = replace(config.run, root=str(self.folder), name=name, storage=storage)
        if options.tokens:
            run = replace(run, rounds=max(1, round(options.tokens / tokens_per_round(config))))
        observe = replace(config.observe, wandb_group=self.name)
        changed = dict.fromkeys(("run.root", "run.name", "run.rounds", "observe.wandb_group"), "sweep")
        return Composed(replace(config, run=run, observe=observe), composed.origins | changed)


def tokens_per_round(config: Config) -> int:
    """Tokens that all islands together train in a round of H steps each."""
    inner, islands = config.inner, config.islands
    blocks = 0
    for name in island_names(config):
        own = islands.overrides.get(name)
        ranks = (own.ranks if own and own.ranks is not None else None) or islands.ranks
        blocks += ranks * ((own.micro_batch if own and own.micro_batch is not None else None) or inner.micro_batch)
    return inner.H * blocks * inner.gradient_accumulation * config.data.sequence_length


def read_sweep(arguments: Sequence[str] = (), config_file: str | None = None, *, conf_dir: str | None = None) -> Sweep:
    """Reads a sweep and sees that there is something to try.

    Args:
      arguments: `sweep=<name>`, `sweep.<option>=<value>`, `sweep.space.<key>=<domain>`, and keys for all trials.
      config_file: a sweep file in place of a name.

    Raises:
      ConfigError: 190–193, the file or the space has not the form of the module docstring; else as for a single run.
    """
    name, own, others = _sorted_out(arguments)
    if name is not None and config_file is not None:
        raise ConfigError(108, f"both --config {config_file} and sweep={name} were given", "give one of them")
    if config_file is not None:
        document, label = read_file(Path(config_file).expanduser()), config_file
        name = Path(config_file).stem
    else:
        name = name or DEFAULT
        document, label = search_path(conf_dir).read("sweep", name, f"sweep={name}")
    values, places = _with_arguments(document, label, own)
    options = _options(values, places)
    said = read_arguments(others, {})
    if said.experiment is not None:
        raise ConfigError(
            108, f"both experiment={said.experiment.value} and a sweep were given", "put what it sets under `common`"
        )
    space = _space(values, places, said, options)
    layer = read_sections(document, label, [("common",)])
    base = compose(others, conf_dir=conf_dir, experiment=layer)
    if base.origins["run.name"] != DEFAULT_ORIGIN:
        name = base.config.run.name
    common = tuple(
        f"{dotted(path)}={write_scalar(value)}" for path, value in entries((), document.values["common"]) if path
    )
    folder = Path(base.config.run.root, name).expanduser()
    return Sweep(name, folder, (*common, *others), space, options, base, layer, tuple(others), conf_dir)


Own = list[tuple[tuple[str, ...], Any, str]]


def _sorted_out(arguments: Sequence[str]) -> tuple[str | None, Own, list[str]]:
    """Arguments by what they are about: the sweep's name, its keys with their values and texts, and all others."""
    name, own, others = None, Own(), []
    for text in arguments:
        key, equals, value = text.partition("=")
        if key == "sweep" and equals:
            name = value
        elif key.startswith("sweep."):
            try:
                own.append((tuple(key.split(".")[1:]), read_scalar(value), f"argument {text!r}"))
            except yaml.YAMLError as error:
                raise ConfigError(104, f"argument {text!r}: the value is not YAML", "put it in quotes") from error
        else:
            others.append(text)
    return name, own, others


def _with_arguments(document: Document, label: str, own: Own) -> tuple[dict[str, Any], dict[str, str]]:
    """Options and space, flat (`space.outer.lr`), with where each was written."""
    document.values.setdefault("common", {})
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, value in document.values.items():
        at = f"{label}:{document.lines.get((name,), 1)}"
        if name not in _SECTIONS:
            raise _unknown(str(name), at)
        if name in ("common", "space") and not isinstance(value, Mapping):
            raise _wrong(at, f"{name!r} is no mapping of keys")
        if name == "space":
            for path, domain in _domains((), value):
                line = f"{label}:{document.lines.get(('space', *path), document.lines.get((name,), 1))}"
                values[f"space.{dotted(path)}"], places[f"space.{dotted(path)}"] = domain, line
        elif name != "common":
            values[name], places[name] = value, at
    for path, value, where in own:
        key = ".".join(path)
        if path[0] not in _SECTIONS or path[0] == "common" or (path[0] == "space") != (len(path) > 1):
            raise _unknown(key, where)
        if value is None and path[0] == "space":
            values.pop(key, None)
        else:
            values[key], places[key] = value, where
    return values, places


def _domains(at: tuple[Any, ...], section: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value and not set(value) & set(DISTRIBUTIONS):
            yield from _domains((*at, name), value)
        else:
            yield (*at, name), value


def _options(values: Mapping[str, Any], places: Mapping[str, str]) -> SweepOptions:
    given: dict[str, Any] = {}
    for option in fields(SweepOptions):
        if option.name not in values:
            continue
        name, value, default = option.name, values[option.name], option.default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(default, str):
            allowed = SEARCHES if name == "search" else SCHEDULERS
            if value not in allowed:
                raise _wrong(places[name], f"{name}={value!r} is none of {', '.join(allowed)}")
        elif not number or (isinstance(default, int) and value != int(value)):
            words = "a number" if isinstance(default, float) else "a whole number"
            raise _wrong(places[name], f"{name}={value!r} is not {words}")
        elif not _LEAST.get(name, -float("inf")) <= value < float("inf") or (name == "diverged" and value <= 1):
            least = "more than 1" if name == "diverged" else f"at least {_LEAST[name]:g}"
            raise _wrong(places[name], f"{name}={value!r} must be {least}")
        else:
            value = float(value) if isinstance(default, float) else int(value)
        given[name] = value
    return SweepOptions(**given)


def _space(
    values: Mapping[str, Any], places: Mapping[str, str], said: Layer, options: SweepOptions
) -> dict[str, Domain]:
    space: dict[str, Domain] = {}
    for key in [key.removeprefix("space.") for key in values if key.startswith("space.")]:
        where = places[f"space.{key}"]
        path = tuple(key.split("."))
        if not (len(path) == 1 and key in GROUPS):
            path = canonical(path)
            type_of(path, where)
        if dotted(path) in _ITS_OWN or path[0] == "ray" or (options.tokens and dotted(path) == "run.rounds"):
            why = "a sweep with tokens" if dotted(path) == "run.rounds" else "a sweep"
            raise ConfigError(193, f"{where}: {key!r} is what {why} sets itself", "take it out of the space")
        if path in said.leaves or key in said.choices:
            raise ConfigError(
                193,
                f"{where}: {key!r} is tried, and an argument sets it",
                f"drop the argument, or try that value alone with sweep.space.{key}=[…]",
            )
        try:
            space[key] = read_domain(values[f"space.{key}"])
        except ValueError as error:
            raise ConfigError(191, f"{where}: {key!r} {error}", "see docs/tuning.md for what can be tried") from None
        if options.search == "grid" and isinstance(space[key], Between):
            raise ConfigError(
                192,
                f"{where}: a grid cannot draw {key!r} from a distribution",
                "give a list of values, or choose sweep.search=random or optuna",
            )
        listed = getattr(space[key], "values", ())
        if options.search == "optuna" and any(isinstance(value, list | dict) for value in listed):
            raise ConfigError(
                192,
                f"{where}: Optuna cannot choose {key!r} among lists or mappings",
                "choose sweep.search=grid or random",
            )
    if not space:
        raise ConfigError(191, "the space of the sweep is empty", "say what to try: sweep.space.outer.lr=[0.5,0.7,1.0]")
    return space


def _unknown(key: str, where: str) -> ConfigError:
    close = nearest(key.split(".")[0], list(_SECTIONS))
    return _wrong(where, f"unknown key {key!r}" + (f"; did you mean {close!r}?" if close else ""))


def _wrong(where: str, problem: str) -> ConfigError:
    return ConfigError(190, f"{where}: {problem}", f"a sweep has {', '.join(_SECTIONS)}; see conf/sweep/{DEFAULT}.yaml")
