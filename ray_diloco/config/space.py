"""What a sweep tries: for each key a list of values, or a distribution to draw from.

Pure: parsing, drawing and naming.  Draws come from a seed and have four significant digits, so that a value in a table,
in the name of a trial and in its configuration is one and the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_diloco.config.yamlfile import write_scalar

# Draws in a row that gave what had been drawn before, after which a space counts as exhausted.
_REPEATS = 200
# Longest name of a trial; that of its run has the sweep's name in front and at most 64 characters.
_LONGEST = 44


@dataclass(frozen=True)
class Values:
    """One of these."""

    values: tuple[Any, ...]

    def draw(self, source: random.Random) -> Any:
        """A value."""
        return source.choice(self.values)


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both included; `log`: the logarithm is uniform; `whole`: without a fraction."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def draw(self, source: random.Random) -> float | int:
        """A value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        drawn = source.uniform(low, high)
        return self.rounded(math.exp(drawn) if self.log else drawn)

    def rounded(self, value: float) -> float | int:
        """A value as trials have it: inside, whole or with four significant digits."""
        inside = min(max(value, self.low), self.high)
        return round(inside) if self.whole else float(f"{inside:.4g}")


Domain = Values | Between
Space = Mapping[str, Domain]
# What a domain may be called in a file beside a plain list, and which Between it is: (log, whole).
DISTRIBUTIONS = {
    "uniform": (False, False),
    "log_uniform": (True, False),
    "integers": (False, True),
    "log_integers": (True, True),
}


def read_domain(written: Any) -> Domain:
    """A domain as it is written: `[1, 2]`, or `{log_uniform: [0.1, 1.0]}`.

    Raises:
      ValueError: it is none; the text says why.
    """
    if isinstance(written, list):
        if not written:
            raise ValueError("has no values")
        if len({json.dumps(value) for value in written}) < len(written):
            raise ValueError("has a value twice")
        return Values(tuple(written))
    if not isinstance(written, Mapping) or len(written) != 1 or (kind := next(iter(written))) not in DISTRIBUTIONS:
        raise ValueError(f"is neither a list of values nor one of {', '.join(DISTRIBUTIONS)} with [low, high]")
    bounds = written[kind]
    log, whole = DISTRIBUTIONS[kind]
    numbers = isinstance(bounds, list) and [b for b in bounds if isinstance(b, int | float) and not isinstance(b, bool)]
    if not numbers or len(numbers) != 2 or len(bounds) != 2 or not numbers[0] < numbers[1]:
        raise ValueError(f"{kind} takes [low, high], two numbers of which the first is lower; got {bounds!r}")
    if not all(map(math.isfinite, numbers)) or (log and numbers[0] <= 0) or (whole and any(b % 1 for b in numbers)):
        needs = "whole numbers" if whole else "finite numbers"
        raise ValueError(f"{kind} takes {needs}{' above 0' if log else ''}; got {bounds!r}")
    return Between(numbers[0], numbers[1], log, whole)


def grid(space: Space) -> Iterator[dict[str, Any]]:
    """All combinations, the last key changing fastest; every domain has values."""
    for values in itertools.product(*(domain.values for domain in space.values() if isinstance(domain, Values))):
        yield dict(zip(space, values, strict=True))


def size_of(space: Space) -> float:
    """How many combinations there are; infinite if a number is drawn."""
    return math.prod(len(domain.values) if isinstance(domain, Values) else math.inf for domain in space.values())


def draws(space: Space, trials: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many different combinations, or all there are, drawn from a seed; the first n are those of n trials."""
    source, seen, repeats = random.Random(seed), set[str](), 0
    while len(seen) < min(trials, size_of(space)) and repeats < _REPEATS:
        drawn = {key: domain.draw(source) for key, domain in space.items()}
        text = json.dumps(drawn)
        repeats = repeats + 1 if text in seen else 0
        if not repeats:
            seen.add(text)
            yield drawn


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each key that tell it from the others: `H`, `inner.lr`, `outer.lr`."""
    found = {}
    for key in keys:
        words = key.split(".")
        for count in range(1, len(words) + 1):
            name = ".".join(words[-count:])
            if sum(f".{other}".endswith(f".{name}") for other in keys) == 1:
                break
        found[key] = name
    return found


def label_of(parameters: Mapping[str, Any]) -> str:
    """Name of a trial, `H20-lr0.7-momentum0.9`, that no other parameters have."""
    short = short_names(list(parameters))
    text = "-".join(f"{short[key]}{shown(value)}" for key, value in parameters.items())
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)
    if plain == text and len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:8]
    return f"{plain[: _LONGEST - 9].rstrip('._-')}-{digest}".lstrip("._-")


def shown(value: Any) -> str:
    """A value in few characters."""
    return f"{value:.6g}".replace("e+", "e") if isinstance(value, float) else write_scalar(value)
