"""The driver: a Ray actor named after the run that puts ports and run loop together and keeps the run directory.

It holds references and numbers, no tensors.  `run` ends with a summary whatever happened; `view` and `stop` answer
while it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ray_diloco.blocks import channels_of, cuts_of, needs_layout
from ray_diloco.checkpoint.fresh import refuse_fresh
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.books import Books, Ending, close_books, open_books
from ray_diloco.cluster.build import (
    anchor_settings,
    bundles,
    digest_of,
    island_specs,
    journal_settings,
    labels_of,
    misfortunes_of,
    rules_of,
    store_settings,
)
from ray_diloco.cluster.calls import ActorFailed, actor, answer
from ray_diloco.cluster.enclosure import Enclosure
from ray_diloco.cluster.expectation import announce
from ray_diloco.cluster.fleet import RayFleet
from ray_diloco.cluster.island import FleetSettings
from ray_diloco.cluster.journal import RunJournal
from ray_diloco.cluster.layout import model_layout
from ray_diloco.cluster.misfortune import Misfortune
from ray_diloco.cluster.placement import check_feasible, nodes, release
from ray_diloco.cluster.roster import end_all, survivors
from ray_diloco.cluster.storage import Storage
from ray_diloco.cluster.store import RayStore
from ray_diloco.cluster.traffic import Interface, Traffic, own_address
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.config.schema import Config, island_names
from ray_diloco.data.blocks import Corpus
from ray_diloco.errors import CheckpointError, ClusterError
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.metrics import perplexity
from ray_diloco.observe.summary import Summary
from ray_diloco.observe.view import IslandView, RunView
from ray_diloco.outer.layout import Layout
from ray_diloco.provenance.environment import environment_report
from ray_diloco.rounds.faults import DRIVER
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.members import State


@dataclass(frozen=True)
class Job:
    """What a driver is asked to run: the configuration, its text for the run directory, and the prepared data.

    `folders` are where a user's own modules are imported from; `within` is room that the run was given.
    """

    config: Config
    config_yaml: str
    corpora: Mapping[str, Corpus]
    heldout: Corpus
    storage: Storage
    folders: tuple[str, ...] = ()
    within: Enclosure | None = None


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
        self._rounds = job.config.run.rounds
        self._stop_asked = False
        self._epoch = 0
        self._traffic, self._interface = Traffic(), Interface(own_address())

    async def run(self, successor: bool = False) -> Summary:
        """Runs to the end; raises DilocoError if it failed, after leaving a summary that says so.

        `successor`: in the place of a driver that died within the same command, and that has heeded `run.fresh`.
        """
        config = self._config
        directory = RunDirectory(Path(config.run.root), config.run.name)
        lock = directory.lock()
        try:
            storage = self._job.storage
            self._epoch = await asyncio.to_thread(storage.open().epochs.claim)
            fresh = config.run.fresh and not successor
            manifest, warnings = await asyncio.to_thread(_survey, storage.open(), config, fresh)
            if storage.keeper is not None:
                warnings.append(f"{storage.url} is memory: the commits end with the process that started this run")
            directory.config.write_text(self._job.config_yaml, encoding="utf-8")
            with open_books(config, directory, manifest, warnings) as books:
                return await self._run(books, storage, successor)
        finally:
            lock.release()

    async def view(self) -> RunView:
        """The run, now."""
        run, config = self._loop, self._config
        round_ = run.position.round if run else 0
        elapsed = time.monotonic() - self._started
        done = round_ - self._first_round
        left = self._rounds - round_
        journal = self._journal
        loss = journal.eval_loss if journal else None
        return RunView(
            run=config.run.name,
            status=self._status,
            round=round_,
            rounds=self._rounds,
            tokens=run.position.tokens if run else 0,
            islands=tuple(self._island_view(name) for name in (run.shown if run else island_names(config))),
            waiting_for=run.waiting if run else "",
            last_commit=journal.last_commit if journal else None,
            eval_loss=loss,
            eval_ppl=None if loss is None else perplexity(loss),
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

    async def scale(self, asked: Mapping[str, int]) -> list[str]:
        """Asks for numbers of islands by region; returns those that are wanted now."""
        return self._sailing.scale(asked)

    async def drain(self, island: str) -> None:
        """Asks an island to leave."""
        self._sailing.drain(island)

    @property
    def _sailing(self) -> Run:
        if self._loop is None:
            raise ClusterError(206, f"the run {self._config.run.name} is still starting", "ask again in a moment")
        return self._loop

    async def _run(self, books: Books, storage: Storage, successor: bool) -> Summary:
        """Puts the ports together, runs the loop over them, and closes the books however that ended."""
        config, environment = self._config, environment_report()
        self._first_round = books.position.round
        faults = self._faults = misfortunes_of(config, books.directory)
        # Every driver has an epoch of its own, so the first one of a run is of epoch 1.
        self._misfortune = Misfortune(faults.of(DRIVER), self._epoch - 1)
        anchor = RayAnchor(anchor_settings(config, faults), driver=self._misfortune)
        self._count_own()
        journal = self._journal = RunJournal(books, anchor, journal_settings(config, books.directory))
        anchor.tell(journal)
        settings = store_settings(config, environment, {"wandb_run_id": books.mirror.run_id}, self._epoch, faults)
        durable = RayStore(storage, books.manifest, anchor, journal, settings)
        said = successor and any(line["event"] == "run_expected" for line in read_lines(books.directory.events))
        announcing = asyncio.ensure_future(announce(config, anchor, journal, said))
        ending = await self._sail(books, anchor, durable, journal)
        announcing.cancel()
        self._count_own()
        if (traffic := self._traffic).machines > 1:
            counted = {"bytes_sent": traffic.sent, "bytes_received": traffic.received}
            journal.event("network_counted", **counted, machines=traffic.machines)
        self._status = ending.status
        facts = {
            "unigram_entropy": self._job.heldout.unigram_entropy,
            "parameters": anchor.layout.numel if anchor.layout else None,
            "environment": environment,
            "version": environment["versions"]["ray_diloco"],
        }
        wall_s = time.monotonic() - self._started
        summary = await close_books(books, ending, durable.store, durable.newest, wall_s, facts)
        if ending.failure is not None:
            raise ending.failure
        return summary

    def _count_own(self) -> None:
        """Hears what this machine has counted."""
        self._traffic.hear(self._interface.counted())

    async def _layout(self) -> Layout | None:
        """The canonical form of the model, where the number of fragments depends on it."""
        if not needs_layout(channels_of(self._config)):
            return None
        what, deadline_s = "laying out the model", self._config.deadlines.launch_s
        length, job = self._config.data.sequence_length, self._job
        asked = model_layout.remote(self._config.model, job.heldout, length, job.folders)
        try:
            layout: Layout = await answer(asked, what, deadline_s)
        except ActorFailed as failed:
            raise ClusterError(
                221, f"the model could not be laid out: {failed}", "see the logs of that node"
            ) from failed
        return layout

    async def _sail(self, books: Books, anchor: RayAnchor, durable: RayStore, journal: RunJournal) -> Ending:
        """Runs the loop to its end, whatever that is."""
        config, job = self._config, self._job
        try:
            if config.islands.max <= config.islands.count:
                check_feasible(bundles(config), {name: labels_of(config, name) for name in island_names(config)})
            if len(nodes()) == 1:
                anchor.prestart()
            cuts = cuts_of(channels_of(config), await self._layout())
            rules = rules_of(config, job.corpora, job.heldout, books.position, cuts)
            most = config.anchor.kept_gb * 1e9
            rules = replace(rules, crowded=lambda: 0 < most < anchor.kept_bytes)
            journal.follow(rules.schedule)
            self._rounds = rules.schedule.rounds
            if books.manifest is None:
                # Whatever is left has trained, and a run is founded by parameters as they are initialised.
                end_all(config.run.name)
                release(config.run.name)
                await self._clear_points(durable.store, journal)
            crews = survivors(config.run.name, job.within)
            fleet = self._fleet = RayFleet(
                island_specs(config, job.corpora, job.heldout, job.folders),
                anchor,
                journal,
                FleetSettings(
                    config.run.name,
                    durable.storage,
                    config.checkpoint.inner,
                    config.deadlines,
                    lambda: durable.newest,
                    durable.inner_of,
                    self._epoch,
                    self._faults,
                    self._misfortune,
                    job.within,
                    Whereabouts.of(config.islands),
                    config.checkpoint.progress_every,
                    self._traffic,
                ),
                crews,
            )
            position, owes = books.position, books.owes_evaluation
            run = self._loop = Run(rules, position, fleet, anchor, durable, journal, owes_evaluation=owes)
            run.keep(crews)
            fleet.noticed = lambda name: run.drain(name, "its machine is about to go", returns=True)
            self._status = "running"
            if self._stop_asked:
                run.stop()
            ending = Ending(await run.run())
            # Before the first round has ended there is nothing yet that could be lost.
            if durable.trouble is not None and position.round > 0:
                raise CheckpointError(
                    564,
                    f"round {position.round} could not be made durable: {durable.trouble}",
                    "mend the storage, then run the same command again: it goes on from the newest commit",
                )
            if ending.status == "finished":
                await self._clear_points(durable.store, journal)
            return ending
        except Exception as error:  # also for a defect, tape and summary must say how the run ended
            return Ending("failed", error)

    async def _clear_points(self, store: CheckpointStore, journal: RunJournal) -> None:
        """Removes progress points that nobody will take up."""
        try:
            await asyncio.to_thread(store.points.clear)
        except CheckpointError as error:
            journal.event("warning", text=f"progress points were not removed: {error.what}")

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


def _survey(store: CheckpointStore, config: Config, fresh: bool) -> tuple[Manifest | None, list[str]]:
    """The commit that the run goes on from, and what a person should know of the others; removes what is newer.

    A founding commit (round 0) holds nothing that was trained: only the same settings go on from it.

    Raises:
      CommittedError: RD-562, there is one and a `fresh` run is asked for.
      CheckpointError: 5xx, there are commits and none is good, or the storage fails.
    """
    # Full: a damaged file must cost one commit now, not the resume later.
    survey = store.survey(full=True)
    newest = survey.manifest
    if newest is not None and newest.round == 0 and not survey.trained:
        newest = None if fresh or newest.config_digest != digest_of(config) else newest
    if newest is not None and fresh:
        raise refuse_fresh(config.run.name, newest.round)
    # What was passed over would be taken for the future of the commit that the run goes on from.
    store.discard_after(newest.round if newest else -1)
    warnings = [f"commit of round {passed.round} is not usable: {passed.reason}" for passed in survey.skipped]
    if newest is not None and (broken := store.broken_link(newest)):
        warnings.append(f"the history of commits is broken: {broken}")
    return newest, warnings


DriverActor = actor(Driver, num_cpus=0)
