"""Which trial comes next: those of a grid or a random search in order, or what Optuna proposes.

A searcher for Tune.  Every trial passes `admit`, which knows what is decided already and what cannot be run, so that a
sweep that goes on asks for the same trials and runs only those that are left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optuna
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from ray_diloco.config.space import Between, Domain
from ray_diloco.config.sweep import Sweep, Trial
from ray_diloco.sweep.record import DIVERGED, FINISHED, HALTED, Entry

# What Optuna may propose in a row that was tried before, after which there is nothing left.
_REPEATS = 50

Admit = Callable[[Trial], dict[str, Any] | None]


class Guide:
    """Optuna: proposes combinations and is told what they came to.

    Args:
      sweep: its space and seed.
      entries: what is known already.
    """

    def __init__(self, sweep: Sweep, entries: Mapping[str, Entry]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = sweep.space
        self._distributions = {key: distribution(domain) for key, domain in sweep.space.items()}
        # A sweep that goes on draws on, instead of proposing again what it began with.
        seed = sweep.options.seed + len(entries)
        self._search = OptunaSearch(dict(self._distributions), metric="loss", mode="min", seed=seed)
        for entry in entries.values():
            bad = entry.status == DIVERGED
            known = bad or (entry.status in (FINISHED, HALTED) and entry.loss is not None)
            if known and contains(self._distributions, entry.parameters):
                self._search.add_evaluated_point(entry.parameters, entry.loss or 0.0, error=bad)
        self._asked = 0

    def ask(self) -> tuple[str, dict[str, Any]]:
        """A combination, and under which name to tell of it."""
        self._asked += 1
        name = str(self._asked)
        asked = self._search.suggest(name)
        assert isinstance(asked, dict)
        return name, {key: rounded(domain, asked[key]) for key, domain in self._space.items()}

    def tell(self, name: str, loss: float | None) -> None:
        """What a combination came to; None: nothing."""
        self._search.on_trial_complete(name, None if loss is None else {"loss": loss}, error=loss is None)


class Proposals(Searcher):
    """Gives Tune one trial after the other.

    Args:
      sweep: what to try.
      entries: what is known of trials, by label; it changes while the sweep runs.
      admit: makes what Tune is given of a trial; None if it is not to be run.
      stop: once it is set, no trial begins.
    """

    def __init__(self, sweep: Sweep, entries: Mapping[str, Entry], admit: Admit, stop: threading.Event) -> None:
        super().__init__(metric="loss", mode="min")
        self._sweep, self._entries, self._admit, self._stop = sweep, entries, admit, stop
        self._guide = Guide(sweep, dict(entries)) if sweep.options.search == "optuna" else None
        self._names: dict[str, str] = {}
        self._pending = ""
        self._trials = self._asked_for() if self._guide is not None else sweep.proposals()

    def suggest(self, trial_id: str) -> Any:
        """The next trial."""
        while not self._stop.is_set() and (trial := next(self._trials, None)) is not None:
            name, self._pending = self._pending, ""
            if (given := self._admit(trial)) is not None:
                if name:
                    self._names[trial_id] = name
                return given
            if name and self._guide is not None:
                self._guide.tell(name, None)
        return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells Optuna what a trial came to."""
        if self._guide is not None and (name := self._names.pop(trial_id, None)) is not None:
            result = result or {}
            good = not error and result.get("status") != DIVERGED
            self._guide.tell(name, result.get("loss") if good else None)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: what counts is how a trial ends."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        """Nothing to set."""
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Nothing of it travels: Tune writes what it was given to a file that nobody reads."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing: see `record.py`."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: see `record.py`."""

    def _asked_for(self) -> Iterator[Trial]:
        """First the trials that are known, then those that Optuna proposes, each of them once."""
        guide, seen = self._guide, set[str]()
        assert guide is not None
        for entry in list(self._entries.values()):
            seen.add(entry.label)
            yield self._sweep.trial(entry.parameters)
        repeats = 0
        while len(seen) < self._sweep.planned and repeats < _REPEATS:
            name, parameters = guide.ask()
            trial = self._sweep.trial(parameters)
            if trial.label in seen:
                known = self._entries.get(trial.label)
                guide.tell(name, known.loss if known else None)
                repeats += 1
                continue
            repeats, self._pending = 0, name
            seen.add(trial.label)
            yield trial


def distribution(domain: Domain) -> Any:
    """A domain as Optuna has it."""
    if isinstance(domain, Between):
        if domain.whole:
            return optuna.distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
        return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
    return optuna.distributions.CategoricalDistribution(domain.values)


def rounded(domain: Domain, value: Any) -> Any:
    """A proposal as trials have it."""
    return domain.rounded(value) if isinstance(domain, Between) else value


def contains(distributions: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Whether a combination lies in a space, which may have been another when it was tried."""
    if distributions.keys() != parameters.keys():
        return False
    try:
        return all(each._contains(each.to_internal_repr(parameters[key])) for key, each in distributions.items())
    except (ValueError, TypeError):
        return False
