"""What a driver writes beside commits: tape, metrics, mirror and summary, opened at a commit, closed with an ending.

Lines of rounds behind the commit that a run goes on from are dropped, since those rounds are done again.  The figures
of the summary that commits count (tokens, bytes, rounds of islands) come from the run's position, not from the logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from ray_diloco.checkpoint.anchor import anchor_digest
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.config.schema import Config, island_names
from ray_diloco.errors import CheckpointError, DilocoError
from ray_diloco.observe.events import EventLog
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.metrics import MetricsLog
from ray_diloco.observe.report import write_report
from ray_diloco.observe.summary import IslandSummary, Status, Summary, summarise, write_summary
from ray_diloco.observe.wandb_mirror import Mode, WandbMirror, mirror_metrics
from ray_diloco.rounds.position import Position

# Seconds that a mirror may take at the end of a run.
MIRROR_S = 30.0


@dataclass(frozen=True)
class Books:
    """The open books of a run.

    Attributes:
      config: the run.
      directory: where they lie.
      manifest: the commit that the run goes on from; None for a new run.
      position: where the run stands; the loop moves it.
      events, metrics, mirror: what is written.
    """

    config: Config
    directory: RunDirectory
    manifest: Manifest | None
    position: Position
    events: EventLog
    metrics: MetricsLog
    mirror: WandbMirror

    @property
    def owes_evaluation(self) -> bool:
        """True if the run before ended between its last commit and the evaluation of it."""
        if self.manifest is None:
            return False
        lines = read_lines(self.directory.metrics)
        return not any(line["kind"] == "eval" and line["round"] == self.manifest.round for line in lines)


@dataclass(frozen=True)
class Ending:
    """How a run ended; `failure` is what ended it, if anything did."""

    status: Status
    failure: Exception | None = None

    @property
    def reason(self) -> str | None:
        """Why, in one sentence."""
        error = self.failure
        if error is None:
            return None
        return error.what if isinstance(error, DilocoError) else f"{type(error).__name__}: {error}"


@contextmanager
def open_books(
    config: Config, directory: RunDirectory, manifest: Manifest | None, warnings: Sequence[str]
) -> Iterator[Books]:
    """Opens the books at a commit, or new ones, for the length of the block.

    Args:
      config: the run.
      directory: its folder, locked by this process.
      manifest: the commit that it goes on from, if there is one.
      warnings: what else the tape shall say at its beginning.

    Raises:
      CheckpointError: RD-580 to RD-582, a log is broken or cannot be written.
    """
    with closing(EventLog(directory.events)) as events, closing(MetricsLog(directory.metrics)) as metrics:
        dropped = metrics.truncate_after(manifest.round if manifest else -1)
        mirror = _open_mirror(config, directory, manifest, events, rolled_back=dropped > 0)
        if manifest is None:
            events.append("run_started", run=config.run.name, islands=island_names(config), rounds=config.run.rounds)
        else:
            tokens = manifest.counters["tokens"]
            goal = {"rounds": config.run.rounds, "tokens": tokens}
            events.append("run_resumed", run=config.run.name, round=manifest.round, **goal)
        if metrics.cut_bytes:
            events.append("log_repaired", file=directory.metrics.name, bytes=metrics.cut_bytes)
        for text in warnings:
            events.append("warning", text=text)
        if dropped:
            events.append("metrics_truncated", round=manifest.round if manifest else 0, lines=dropped)
        yield Books(config, directory, manifest, _position(manifest), events, metrics, mirror)


async def close_books(
    books: Books,
    ending: Ending,
    store: CheckpointStore,
    newest: Manifest | None,
    wall_s: float,
    facts: Mapping[str, Any],
) -> Summary:
    """Writes the last event, the summary and a report, which the command completes if the run did not fail.

    Ends the mirror too.

    Args:
      books: the open books.
      ending: how the run ended.
      store: where its commits lie.
      newest: the newest of them.
      wall_s: seconds since this process took up the run.
      facts: more fields of `Summary`, which only the driver knows.
    """
    digest = ""
    if newest is not None:
        try:
            digest = await asyncio.to_thread(anchor_digest, store, newest)
        except CheckpointError as error:
            books.events.append("warning", text=f"the last commit cannot be read back: {error.what}")
    # After a failure only what is durable counts: the next start goes on from there.
    run, position = books.config.run, books.position if ending.failure is None else _position(newest)
    if ending.status == "finished":
        books.events.append("run_finished", rounds=position.round, tokens=position.tokens, wall_s=wall_s)
    elif ending.status == "stopped":
        books.events.append("run_stopped", round=position.round, rounds=run.rounds, reason="asked to")
    else:
        books.events.append("run_failed", round=position.round, reason=ending.reason)
    counted = summarise(
        books.directory.path,
        run=run.name,
        status=ending.status,
        anchor_digest=digest,
        reason=ending.reason,
        wandb_run_id=books.mirror.run_id,
        **facts,
    )
    summary = replace(_as_committed(counted, position), report=books.directory.report.name)
    write_summary(books.directory.summary, summary)
    write_report(books.directory.path)
    await asyncio.to_thread(books.mirror.finish, MIRROR_S, asdict(summary))
    return summary


def _position(manifest: Manifest | None) -> Position:
    if manifest is None:
        return Position()
    versions = {int(fragment): version for fragment, version in manifest.versions.items()}
    return Position.resume(manifest.round, manifest.step, versions, manifest.ledger, manifest.counters)


def _open_mirror(
    config: Config, directory: RunDirectory, manifest: Manifest | None, events: EventLog, *, rolled_back: bool
) -> WandbMirror:
    """The mirror: the run's own, or a new one with all history where there is none or the old one cannot go on."""
    before = manifest.sinks.get("wandb_run_id") if manifest else None
    loop = asyncio.get_running_loop()
    mirror = WandbMirror(
        cast(Mode, config.observe.wandb),
        config.observe.wandb_project,
        config.run.name,
        None if rolled_back else before,
        asdict(config),
        directory.path,
        warn=lambda text: loop.call_soon_threadsafe(lambda: events.append("warning", text=text)),
        group=config.observe.wandb_group,
        parent=before if rolled_back else None,
    )
    if mirror.run_id not in (None, before):
        mirror_metrics(directory.metrics, mirror)
    return mirror


def _as_committed(summary: Summary, position: Position) -> Summary:
    """The summary with the figures that commits have counted: what was credited, not what was tried."""
    regions = {island.name: island.region for island in summary.islands}
    islands = tuple(
        IslandSummary(name, regions.get(name, ""), t.rounds, t.steps, t.tokens, t.restarts)
        for name, t in sorted(position.tallies.items())
    )
    return replace(
        summary,
        rounds=position.round,
        steps=position.step,
        tokens_committed=position.tokens,
        bytes_up=position.bytes_up,
        bytes_down=position.bytes_down,
        islands=islands,
    )
