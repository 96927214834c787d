"""The doors for Python: train, evaluate and generate without the command line; `cli.py` calls the same functions.

A run: check the configuration, prepare the data, start or join Ray, let the driver actor run while its view is shown,
then export, sample and report.  SIGINT and SIGTERM ask the driver to stop at its newest commit; a second one leaves
at once, which loses at most the open round.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_diloco.config.check import check
from ray_diloco.config.compose import compose, composed_from
from ray_diloco.config.schema import Config, island_data, slot_names
from ray_diloco.config.typed import Composed
from ray_diloco.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from ray_diloco.checkpoint.rundir import RunDirectory
    from ray_diloco.checkpoint.store import CheckpointStore
    from ray_diloco.data.blocks import Corpus
    from ray_diloco.observe.display import Display
    from ray_diloco.observe.summary import Summary

# Seconds between two lines about the preparation of data.
NOTE_S = 3.0


@dataclass(frozen=True)
class Result(Mapping[str, Any]):
    """How a run ended: a mapping of what `summary.json` holds, and where things are.

    Attributes:
      summary: content of `summary.json`.
      folder: the run directory; `export`, `report` and `checkpoints` below it.
    """

    summary: dict[str, Any]
    folder: Path

    @property
    def export(self) -> Path:
        """Hugging Face folder of the final anchor."""
        return self.folder / "export"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.folder / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Commits, if they are kept in the run directory."""
        return self.folder / "checkpoints"

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)


def train(
    config: Config | Composed | Mapping[str, Any] | Sequence[str] | str | Path | None = None,
    *,
    quiet: bool = True,
    **settings: Any,
) -> Result:
    """Trains, or continues a run.

    Args:
      config: a `Config`; overrides as on the command line (`["model=tiny", "inner.H=50"]`); a mapping, nested or with
        dotted keys; or the path of an experiment file.
      quiet: show nothing.
      settings: more top-level keys or groups (`model="tiny"`, `inner={"H": 50}`).

    Returns:
      What `summary.json` holds, plus paths.  `status` is `finished`, or `stopped` after a signal.

    Raises:
      DilocoError: what went wrong and how to mend it.
    """
    if isinstance(config, Config | Composed):
        if settings:
            raise ConfigError(
                131, f"settings {sorted(settings)} beside a finished configuration", "set them in the configuration"
            )
        composed = config if isinstance(config, Composed) else composed_from(config)
    elif isinstance(config, str | Path):
        composed = compose((), str(config), settings=settings)
    elif isinstance(config, Mapping):
        composed = compose((), settings={**config, **settings})
    else:
        composed = compose(list(config or ()), settings=settings)
    check(composed.config)
    return Result(run(composed, quiet=quiet), _directory(composed.config).path)


def run(
    composed: Composed,
    quiet: bool = False,
    *,
    display: Display | None = None,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Runs a checked configuration to its end; returns what `summary.json` holds.

    Args:
      composed: the configuration.
      quiet: show nothing.
      display: what shows the run, in place of the terminal.
      stop: ends the run at its newest commit once it is set, in place of signals.

    Raises:
      DilocoError: the run could not start, or failed.
    """
    from ray_diloco.observe.display import open_display
    from ray_diloco.observe.lines import to_json

    config = composed.config
    _refuse_early(config)
    display = display or open_display(quiet or config.observe.quiet)
    summary: Summary | None = None
    try:
        with stop_signals() if stop is None else nullcontext(stop) as stop:
            summary = _finished(config)
            if summary is None or (config.export.enabled and summary.export is None):
                corpora, heldout = prepare_data(config, display)
                if stop.is_set():
                    raise KeyboardInterrupt
                from ray_diloco.cluster.command import drive

                summary = summary or drive(composed, corpora, heldout, display, stop)
                summary = _complete(config, heldout, summary)
        content: dict[str, Any] = json.loads(to_json(asdict(summary)))
        return content
    finally:
        display.close(summary, str(Path(config.run.root) / config.run.name))


def prepare_data(config: Config, display: Display | None = None) -> tuple[dict[str, Corpus], Corpus]:
    """Training blocks of each island, and the corpus whose held-out blocks the run is measured on.

    Raises:
      DataError: 3xx.
    """
    from ray_diloco.data.blocks import prepare

    said = 0.0

    def progress(what: str, done: int, total: int | None) -> None:
        nonlocal said
        if display is not None and time.monotonic() - said > NOTE_S:
            said = time.monotonic()
            display.note(f"{what}: {done / 1e6:.1f} MB" + (f" of {total / 1e6:.1f} MB" if total else ""))

    heldout = prepare(config.data, config.tokenizer, progress)
    corpora = {}
    for name in slot_names(config):
        data = island_data(config, name)
        corpora[name] = (
            heldout if data == config.data else prepare(data, config.tokenizer, progress, trained_on=config.data)
        )
    return corpora, heldout


def evaluate(run: str, root: str = "runs") -> dict[str, Any]:
    """Held-out loss and perplexity of a run's newest committed anchor, computed in this process.

    Args:
      run: name of the run, or its folder.
      root: folder of all runs.

    Returns:
      run, round, loss (nats per token), ppl, blocks, tokens, unigram_entropy.

    Raises:
      DilocoError: there is no such run or no commit, or its data is gone.
    """
    from ray_diloco.evaluation import evaluate_run

    folder = run_folder(run, root)
    return evaluate_run(folder, compose((), str(folder / "config.yaml")).config)


def generate(
    run: str,
    prompt: str,
    root: str = "runs",
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    show: Callable[[str], object] | None = None,
) -> str:
    """Continues a prompt with the exported model of a run.

    Args:
      run: name of the run, or its folder.
      prompt: text to continue; empty: the start of a document.
      root: folder of all runs.
      tokens, temperature, seed, show: see `ray_diloco.generation.generate`.

    Returns:
      The prompt with its continuation.

    Raises:
      DilocoError: there is no such run or no export, or an argument is out of range.
    """
    from ray_diloco.generation import export_of
    from ray_diloco.generation import generate as continue_text

    export = export_of(run_folder(run, root))
    return continue_text(export, prompt, tokens, temperature, seed=seed, show=show)


def run_folder(run: str, root: str) -> Path:
    """The folder of a run that exists, given by name or by path.

    Raises:
      ConfigError: RD-171, there is none.
    """
    for folder in (Path(root) / run, Path(run)):
        if run and (folder / "config.yaml").is_file():
            return folder
    known = sorted(path.parent.name for path in Path(root).glob("*/config.yaml"))
    raise ConfigError(171, f"there is no run {run!r} in {root}", f"runs there: {', '.join(known) or 'none'}")


def _directory(config: Config) -> RunDirectory:
    from ray_diloco.checkpoint.rundir import RunDirectory

    return RunDirectory(Path(config.run.root), config.run.name)


def _store(config: Config) -> CheckpointStore:
    from ray_diloco.checkpoint.store import CheckpointStore

    return CheckpointStore(config.run.storage or str(_directory(config).path))


def _refuse_early(config: Config) -> None:
    """Says no, before anything starts, to `run.fresh` on a run with commits and to faults that cannot happen."""
    if config.faults.plan:
        from ray_diloco.blocks import faults_of

        faults_of(config)
    rounds = _store(config).rounds() if config.run.fresh else []
    # A founding commit, of round 0, holds nothing that was trained.
    if rounds and rounds[-1] > 0:
        from ray_diloco.checkpoint.fresh import refuse_fresh

        raise refuse_fresh(config.run.name, rounds[-1])


def _finished(config: Config) -> Summary | None:
    """The summary of a run that has ended with all the rounds that are asked for; None if something is left to do."""
    from ray_diloco.blocks import rounds_of
    from ray_diloco.observe.summary import read_summary

    try:
        summary = read_summary(_directory(config).summary)
    except CheckpointError:
        return None
    if summary.status != "finished" or summary.rounds < rounds_of(config):
        return None
    newest = _store(config).newest()
    return summary if newest is not None and newest.round == summary.rounds else None


def _complete(config: Config, heldout: Corpus, summary: Summary) -> Summary:
    """What a finished or stopped run leaves: export and sample, and a summary and report that have them."""
    from ray_diloco.observe.lines import read_lines
    from ray_diloco.observe.report import write_report
    from ray_diloco.observe.summary import write_summary
    from ray_diloco.planning.steps import remember_steps, steps_of_run

    directory, store = _directory(config), _store(config)
    remember_steps(config, steps_of_run(read_lines(directory.metrics)))
    manifest = store.newest() if summary.anchor_digest else None
    if config.export.enabled and manifest is not None and summary.status == "finished":
        from ray_diloco.export import Vocabulary, export_run

        vocabulary = Vocabulary(
            heldout.tokenizer_folder, heldout.vocab_size, heldout.eos_id, config.data.sequence_length
        )
        exported = export_run(
            directory.export, store, manifest, config.model, vocabulary, config.run.seed, config.export.dtype
        )
        summary = replace(summary, export=directory.export.name)
        if config.export.prompt and exported.loadable:
            from ray_diloco.generation import generate as continue_text

            sample = continue_text(directory.export, config.export.prompt, config.export.sample_tokens)
            summary = replace(summary, sample=sample)
    write_summary(directory.summary, summary)
    write_report(directory.path)
    return summary


@contextmanager
def stop_signals(said: bytes = b"") -> Iterator[threading.Event]:
    """Inside, the first SIGINT or SIGTERM sets the event and says so; the second raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        os.write(2, said)

    before: dict[int, Callable[..., Any] | int | None] = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Result", "evaluate", "generate", "prepare_data", "run", "run_folder", "train"]
