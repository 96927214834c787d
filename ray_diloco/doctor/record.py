"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ray_diloco.errors import EXIT_FINISHED, EXIT_INFEASIBLE

Status = Literal["pass", "warn", "fail"]
_MARKS = {"pass": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor.

    Attributes:
      name: of the check.
      where: node, region or pair of them; empty: this machine.
      status: pass, warn (it runs, but worse) or fail (it will not run).
      said: what was found.
      mend: a command or a setting that mends it; empty where nothing has to be.
    """

    name: str
    where: str
    status: Status
    said: str
    mend: str = ""


def passed(name: str, where: str, said: str) -> Check:
    """All is well."""
    return Check(name, where, "pass", said)


def exit_code(checks: Iterable[Check]) -> int:
    """0 where nothing failed, else that of resources that are not there."""
    return EXIT_INFEASIBLE if any(check.status == "fail" for check in checks) else EXIT_FINISHED


def show_checks(checks: Sequence[Check]) -> str:
    """A line for each, with its mending below, and a last one that counts."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        where = f"{check.where}: " if check.where else ""
        lines.append(f"{_MARKS[check.status]} {check.name:<{width}}  {where}{check.said}")
        if check.mend:
            lines.append(f"     {'':<{width}}  mend: {check.mend}")
    counts = {status: sum(check.status == status for check in checks) for status in _MARKS}
    lines.append(f"{counts['pass']} passed, {counts['warn']} warned, {counts['fail']} failed")
    return "\n".join(lines)
