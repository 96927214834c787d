"""Numbered errors: one family per area, what is wrong with the actual value, and how to mend it.

Families by hundreds: 1xx configuration, 2xx cluster, 3xx data, 4xx synchronisation, 5xx checkpoint,
6xx security, 7xx inner training.  `docs/errors.md` has a line for each number.  The doors (`cli.py`,
`jobs/`) print an error as one short text and leave with its exit code; nobody sees a traceback for
a mistake that they can mend.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_INCOMPLETE = 1
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_FAILED = 4
EXIT_INTERRUPTED = 130


class DilocoError(Exception):
    """An error that a user can act on.

    Args:
      number: the number behind `RD-`, unique per cause.
      what: one sentence that says what is wrong, with the actual values.
      mend: one sentence that says how to mend it.
    """

    exit_code = EXIT_FAILED

    def __init__(self, number: int, what: str, mend: str) -> None:
        super().__init__(number, what, mend)
        self.number = number
        self.what = what
        self.mend = mend

    def __str__(self) -> str:
        return f"RD-{self.number}: {self.what}\n  mend: {self.mend}"


class ConfigError(DilocoError):
    """1xx: a configuration value, key, file or combination that cannot be used."""

    exit_code = EXIT_BAD_INPUT


class ClusterError(DilocoError):
    """2xx: the cluster cannot do, or stopped doing, what was asked."""


class InfeasibleError(ClusterError):
    """2xx: the resources that were asked for do not exist on this cluster."""

    exit_code = EXIT_INFEASIBLE


class DataError(DilocoError):
    """3xx: a data source, tokenizer or prepared block file that cannot be used."""

    exit_code = EXIT_BAD_INPUT


class SyncError(DilocoError):
    """4xx: a contribution, round or anchor that cannot be used."""


class BadContribution(SyncError):
    """4xx: a contribution that cannot be used.  The round can be prepared again without it.

    Attributes:
      island: name of the island that sent it.
    """

    def __init__(self, island: str, number: int, what: str, mend: str) -> None:
        super().__init__(number, what, mend)
        self.island = island

    def __reduce__(self) -> tuple[type[BadContribution], tuple[str, int, str, str]]:
        return type(self), (self.island, self.number, self.what, self.mend)


class TooOld(BadContribution):
    """A contribution to measure anew whose base is not kept any more: its island is slow, and did nothing wrong."""


class CheckpointError(DilocoError):
    """5xx: a checkpoint or run directory that cannot be read or written."""


class CommittedError(CheckpointError):
    """5xx: what is asked for contradicts what a run has committed, or asks for a commit that there is not."""

    exit_code = EXIT_BAD_INPUT


class SecurityError(DilocoError):
    """6xx: missing or refused credentials."""


class InnerError(DilocoError):
    """7xx: a model, engine or inner optimiser that cannot be built or used."""

    exit_code = EXIT_BAD_INPUT


class MeetingError(InnerError):
    """7xx: ranks that did not come together; new ones may."""

    exit_code = EXIT_FAILED
