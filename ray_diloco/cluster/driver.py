"""The driver: a Ray actor named after the run that puts ports and run loop together and keeps the run directory.

It holds references and numbers, no tensors.  `run` ends with a summary whatever happened; `view` and `stop` answer
while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ray_diloco.checkpoint.anchor import anchor_digest
from ray_diloco.checkpoint.fresh import refuse_fresh
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cluster.anchor import AnchorSettings, RayAnchor
from ray_diloco.cluster.build import bundles, island_specs, rules_of
from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.fleet import FleetSettings, RayFleet
from ray_diloco.cluster.journal import JournalSettings, RunJournal
from ray_diloco.cluster.placement import check_feasible
from ray_diloco.cluster.store import RayStore, StoreSettings
from ray_diloco.config.schema import Config, island_names
from ray_diloco.data.blocks import Corpus
from ray_diloco.errors import CheckpointError, DilocoError
from ray_diloco.observe.events import EventLog
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.metrics import MetricsLog
from ray_diloco.observe.summary import IslandSummary, Summary, summarise, write_summary
from ray_diloco.observe.view import IslandView, RunView
from ray_diloco.observe.wandb_mirror import WandbMirror
from ray_diloco.provenance.digest import digest_json
from ray_diloco.provenance.environment import environment_report
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.members import State
from ray_diloco.rounds.position import Position

# Seconds that a mirror may take at the end of a run.
MIRROR_S = 30.0


@dataclass(frozen=True)
class Job:
    """What a driver is asked to run: the configuration, its text for the run directory, and the prepared data.

    `folders` are where a user's own modules are imported from.
    """

    config: Config
    config_yaml: str
    corpora: Mapping[str, Corpus]
    heldout: Corpus
    folders: tuple[str, ...] = ()


class Driver:
    """The driver of one run."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = job.config
        self._started = time.monotonic()
        self._status = "starting"
        self._loop: Run | None = None
        self._fleet: RayFleet | None = None
        self._journal: RunJournal | None = None
        self._first_round = 0
        self._stop_asked = False

    async def run(self) -> Summary:
        """Runs to the end; raises DilocoError if it failed, after leaving a summary that says so."""
        config = self._config
        directory = RunDirectory(Path(config.run.root), config.run.name)
        with contextlib.ExitStack() as closing:
            closing.callback(directory.lock().release)
            store = CheckpointStore(config.run.storage or str(directory.path))
            # Full: a damaged file must cost one commit now, not the resume later.
            survey = await asyncio.to_thread(lambda: store.survey(full=True))
            manifest = survey.manifest
            if manifest is not None and config.run.fresh:
                raise refuse_fresh(config.run.name, manifest.round)
            # What was passed over would be taken for the future of the commit that the run goes on from.
            await asyncio.to_thread(store.discard_after, manifest.round if manifest else -1)
            directory.config.write_text(self._job.config_yaml, encoding="utf-8")
            events, metrics = EventLog(directory.events), MetricsLog(directory.metrics)
            closing.callback(events.close)
            closing.callback(metrics.close)
            return await self._run(directory, store, manifest, survey.skipped, events, metrics)

    async def view(self) -> RunView:
        """The run, now."""
        run, config = self._loop, self._config
        round_ = run.position.round if run else 0
        elapsed = time.monotonic() - self._started
        done = round_ - self._first_round
        left = config.run.rounds - round_
        journal = self._journal
        loss = journal.eval_loss if journal else None
        return RunView(
            run=config.run.name,
            status=self._status,
            round=round_,
            rounds=config.run.rounds,
            tokens=run.position.tokens if run else 0,
            islands=tuple(self._island_view(name) for name in island_names(config)),
            last_commit=journal.last_commit if journal else None,
            eval_loss=loss,
            eval_ppl=None if loss is None else _perplexity(loss),
            elapsed_s=elapsed,
            eta_s=elapsed / done * left if done > 0 else None,
            notes=journal.notes if journal else (),
        )

    async def stop(self) -> None:
        """Asks the run to end at its newest commit."""
        self._stop_asked = True
        if self._loop is not None:
            self._status = "stopping"
            self._loop.stop()

    async def _run(
        self,
        directory: RunDirectory,
        store: CheckpointStore,
        manifest: Manifest | None,
        skipped: Any,
        events: EventLog,
        metrics: MetricsLog,
    ) -> Summary:
        config = self._config
        position = _position(manifest)
        self._first_round = position.round
        dropped = metrics.truncate_after(position.round if manifest else -1)
        mirror = self._mirror(manifest, dropped > 0, events, directory)
        anchor = RayAnchor(
            AnchorSettings(
                asdict(config.outer),
                config.codec.down.kind,
                1,
                config.anchor.shards,
                len(island_names(config)),
                config.deadlines.exchange_s,
            )
        )
        journal = self._journal = RunJournal(
            events, metrics, mirror, position, anchor, _journal_settings(config, directory)
        )
        self._open_books(journal, metrics.cut_bytes, dropped, manifest, skipped)
        environment = environment_report()
        durable = RayStore(
            store,
            manifest,
            anchor,
            journal,
            StoreSettings(
                config.run.name,
                digest_json(asdict(config)),
                environment,
                config.checkpoint.keep_last,
                config.checkpoint.keep_every,
                config.deadlines.exchange_s,
                lambda: {"wandb_run_id": mirror.run_id},
            ),
        )
        status, reason = "failed", None
        failure: Exception | None = None
        try:
            check_feasible(bundles(config))
            fleet = self._fleet = RayFleet(
                island_specs(config, self._job.corpora, self._job.heldout, self._job.folders),
                anchor,
                journal,
                FleetSettings(
                    store.url, config.checkpoint.inner, config.deadlines, lambda: durable.newest, durable.inner_of
                ),
            )
            rules = rules_of(config, self._job.corpora, self._job.heldout)
            owes = manifest is not None and not _was_evaluated(directory.metrics, position.round)
            run = self._loop = Run(rules, position, fleet, anchor, durable, journal, owes_evaluation=owes)
            self._status = "running"
            if self._stop_asked:
                run.stop()
            status = await run.run()
        except Exception as error:  # also for a defect, tape and summary must say how the run ended
            failure, reason = (
                error,
                error.what if isinstance(error, DilocoError) else f"{type(error).__name__}: {error}",
            )
        self._status = status
        summary = await self._finish(directory, durable, position, status, reason, mirror, environment, anchor)
        if failure is not None:
            raise failure
        return summary

    def _open_books(
        self, journal: RunJournal, torn: int, dropped: int, manifest: Manifest | None, skipped: Any
    ) -> None:
        """Says on the tape where the run begins or goes on, and what had to be left behind for that."""
        config = self._config
        if manifest is None:
            journal.event("run_started", run=config.run.name, islands=island_names(config), rounds=config.run.rounds)
        else:
            journal.event(
                "run_resumed",
                run=config.run.name,
                round=manifest.round,
                rounds=config.run.rounds,
                tokens=manifest.counters["tokens"],
            )
        if torn:
            journal.event("log_repaired", file="metrics.jsonl", bytes=torn)
        for passed in skipped:
            journal.event("warning", text=f"commit of round {passed.round} is not usable: {passed.reason}")
        if dropped:
            journal.event("metrics_truncated", round=manifest.round if manifest else 0, lines=dropped)

    def _mirror(
        self, manifest: Manifest | None, rolled_back: bool, events: EventLog, directory: RunDirectory
    ) -> WandbMirror:
        """The mirror: the run's own, or a new one with the old as parent where history would have to be rewritten."""
        config = self._config
        before = manifest.sinks.get("wandb_run_id") if manifest else None

        def warn(text: str) -> None:
            loop.call_soon_threadsafe(lambda: events.append("warning", text=text))

        loop = asyncio.get_running_loop()
        return WandbMirror(
            config.observe.wandb,  # type: ignore[arg-type]
            config.observe.wandb_project,
            config.run.name,
            None if rolled_back else before,
            asdict(config),
            directory.path,
            warn=warn,
            parent=before if rolled_back else None,
        )

    async def _finish(
        self,
        directory: RunDirectory,
        durable: RayStore,
        position: Position,
        status: str,
        reason: str | None,
        mirror: WandbMirror,
        environment: Mapping[str, Any],
        anchor: RayAnchor,
    ) -> Summary:
        """Writes the last events and the summary."""
        journal = self._journal
        assert journal is not None
        newest = durable.newest
        digest = ""
        if newest is not None:
            try:
                digest = await asyncio.to_thread(anchor_digest, durable.store, newest)
            except CheckpointError as error:
                journal.event("warning", text=f"the last commit cannot be read back: {error.what}")
        elapsed = time.monotonic() - self._started
        if status == "finished":
            journal.event("run_finished", rounds=position.round, tokens=position.tokens, wall_s=elapsed)
        elif status == "stopped":
            journal.event("run_stopped", round=position.round, rounds=self._config.run.rounds, reason="asked to")
        else:
            journal.event("run_failed", round=position.round, reason=reason)
        summary = summarise(
            directory.path,
            run=self._config.run.name,
            status=status,  # type: ignore[arg-type]
            anchor_digest=digest,
            reason=reason,
            unigram_entropy=self._job.heldout.unigram_entropy,
            parameters=anchor.layout.numel if anchor.layout else None,
            wandb_run_id=mirror.run_id,
            environment=dict(environment),
            version=environment["versions"]["ray_diloco"],
        )
        summary = _with_books(summary, position)
        write_summary(directory.summary, summary)
        await asyncio.to_thread(mirror.finish, MIRROR_S, asdict(summary))
        return summary

    def _island_view(self, name: str) -> IslandView:
        run, fleet = self._loop, self._fleet
        member = run.members.get(name) if run else None
        island = fleet.islands.get(name) if fleet else None
        if run is None or member is None:
            return IslandView(name, "", "launching")
        progress = island.progress if island else None
        training = member.state is State.TRAINING and progress is not None
        waiting = member.state is State.WAITING
        return IslandView(
            name=name,
            region=island.region if island else "",
            state=str(member.state),
            step=progress.step if progress and training else 0,
            steps=progress.steps if progress and training else 0,
            loss=progress.loss if progress and progress.beats else None,
            tokens_per_s=progress.tokens_per_s if progress and progress.beats else None,
            restarts=run.position.tally(name).restarts,
            waiting_for="; ".join(f"{what}: {', '.join(who)}" for what, who in run.awaited.items() if who)
            if waiting
            else "",
        )


def _position(manifest: Manifest | None) -> Position:
    if manifest is None:
        return Position()
    versions = {int(fragment): version for fragment, version in manifest.versions.items()}
    return Position.resume(manifest.round, manifest.step, versions, manifest.ledger, manifest.counters)


def _was_evaluated(metrics: Path, round_: int) -> bool:
    return any(line["kind"] == "eval" and line["round"] == round_ for line in read_lines(metrics))


def _journal_settings(config: Config, directory: RunDirectory) -> JournalSettings:
    return JournalSettings(
        config.run.rounds,
        directory.trace if config.trace.contributions else None,
        asdict(config.outer),
        config.deadlines.exchange_s,
    )


def _with_books(summary: Summary, position: Position) -> Summary:
    """The summary with the figures of islands as the ledger has them: what was committed, not what was tried."""
    from dataclasses import replace

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


def _perplexity(loss: float) -> float:
    from ray_diloco.observe.metrics import perplexity

    return perplexity(loss)


DriverActor = actor(Driver, num_cpus=0)
