"""Versions: what is installed against what was tested, and one node against another.

Tested are the versions of `constraints.txt`; allowed are those of the package's own requirements.  A wheel comes
without the file, and then only the second is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ray_diloco.doctor.facts import Facts
from ray_diloco.doctor.record import Check, passed

PACKAGES = ("torch", "ray", "deepspeed", "transformers", "tokenizers", "datasets", "numpy", "numba", "safetensors")
_AT_LEAST = re.compile(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)$")
# Versions that have to be the same on all nodes: Ray refuses others, and tensors and code travel between them.
_SAME = ("ray", "torch", "numpy", "ray_diloco")


@dataclass(frozen=True)
class Matrix:
    """Versions by package: those that were tested, and the oldest that the requirements allow."""

    tested: Mapping[str, str]
    oldest: Mapping[str, str]


def matrix() -> Matrix:
    """The matrix of this installation."""
    file = Path(__file__).resolve().parents[2] / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pinned = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    try:
        required = metadata.requires("ray_diloco") or []
    except metadata.PackageNotFoundError:
        required = []
    oldest = {found[1]: found[2] for text in required if (found := _AT_LEAST.match(text))}
    return Matrix({name: pinned[name] for name in PACKAGES if name in pinned}, oldest)


def check_versions(facts: Facts, known: Matrix) -> list[Check]:
    """Installed versions against the matrix, one line for each that differs, or one for all."""
    found = [one for name in PACKAGES if (one := _package(facts, name, known)) is not None]
    if found:
        return found
    installed = ", ".join(f"{name} {facts.packages.get(name)}" for name in PACKAGES[:4])
    tested = "as tested" if known.tested else "within the requirements; what was tested is not known here"
    return [passed("versions", facts.node, f"Python {facts.python}, {installed}: {tested}")]


def check_same_versions(nodes: Sequence[Facts], client: Facts) -> list[Check]:
    """Versions of all nodes against those of the process that asks."""
    checks = []
    for facts in nodes:
        pairs = {"Python": (_minor(facts.python), _minor(client.python))}
        pairs |= {name: (str(facts.packages.get(name)), str(client.packages.get(name))) for name in _SAME}
        differing = [f"{name} {there} there and {here} here" for name, (there, here) in pairs.items() if there != here]
        if differing:
            mend = f"install the same on all nodes: pip install -c constraints.txt {_wanted(client, facts)}"
            checks.append(Check("same versions", facts.node, "fail", "; ".join(differing), mend))
    return checks or [passed("same versions", "", f"{len(nodes)} node(s) have the Python, Ray and torch of this one")]


def _package(facts: Facts, name: str, known: Matrix) -> Check | None:
    there, tested, oldest = facts.packages.get(name), known.tested.get(name), known.oldest.get(name)
    install = f'pip install "{name}=={tested}"' if tested else f'pip install "{name}>={oldest or 0}"'
    if there is None:
        return Check("versions", facts.node, "fail", f"{name} is not installed", install)
    # What a build adds for its accelerator is not a part of the version.
    bare = there.partition("+")[0]
    if oldest and _numbers(bare) < _numbers(oldest):
        return Check("versions", facts.node, "fail", f"{name} {there} is older than {oldest}", install)
    if tested and bare != tested:
        return Check("versions", facts.node, "warn", f"{name} {there} is not the tested {tested}", install)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _wanted(client: Facts, facts: Facts) -> str:
    return " ".join(_pins(client, (n for n in _SAME if client.packages.get(n) != facts.packages.get(n))))


def _pins(client: Facts, names: Iterable[str]) -> list[str]:
    return [f'"{name}=={client.packages[name]}"' for name in names if client.packages.get(name)]
