"""What a look at the commits of a run finds: the newest good one, and what was passed over on the way to it."""

from __future__ import annotations

from dataclasses import dataclass

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.names import FOLDER
from ray_diloco.checkpoint.reader import UNFINISHED
from ray_diloco.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Skipped:
    """A commit that cannot be used: its round, the number of the error and one sentence that says why."""

    round: int
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The newest good commit (None: no round was ever committed), and the newer ones that were passed over."""

    manifest: Manifest | None
    skipped: tuple[Skipped, ...]

    @property
    def trained(self) -> list[Skipped]:
        """Commits of trained rounds among those that were passed over; what a killed writer left is none."""
        return [s for s in self.skipped if s.round > 0 and s.number != UNFINISHED]


def none_good(url: str, survey: Survey) -> CheckpointError:
    """The error for commits of trained rounds that are all damaged: a run is not begun anew over them."""
    reasons = "; ".join(f"round {s.round}: {s.reason}" for s in survey.skipped)
    return CheckpointError(
        522,
        f"{url} holds commits, but no good one of a trained round: {reasons}",
        f"restore a commit, or remove {FOLDER}/ there to begin anew",
    )
