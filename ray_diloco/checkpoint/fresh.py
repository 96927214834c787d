"""The refusal of `run.fresh=true` where a run has trained: no committed round is ever overwritten."""

from __future__ import annotations

from ray_diloco.errors import CommittedError


def refuse_fresh(run: str, round: int) -> CommittedError:
    """The error to raise for a run whose newest commit is of `round`."""
    return CommittedError(
        562,
        f"run {run!r} has commits up to round {round}, and run.fresh=true asks for a new one",
        "choose another run.name, remove the folder of that run, or leave run.fresh out to continue it",
    )
