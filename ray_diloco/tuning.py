"""The door to sweeps: `ray-diloco tune`, and `tune` for Python.

Before Ray starts: the sweep file, every combination of a grid or random search, and runs that were made with other
settings.  Then Ray Tune runs what is left, and the results are written whatever happened.  SIGINT and SIGTERM ask all
trials to stop at their newest commits; a second one leaves at once.  The same command goes on.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_diloco.config.sweep import Sweep, Trial, read_sweep, tokens_per_round
from ray_diloco.errors import EXIT_FINISHED, EXIT_INCOMPLETE, EXIT_INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from ray_diloco.observe.sweep import SweepResults
    from ray_diloco.sweep.record import Entry

_HELP = """\
Tries settings with Ray Tune, each trial a complete run on islands of its own, and says which was best.

  ray-diloco tune sweep=outer model=tiny
  ray-diloco tune sweep=outer sweep.search=optuna sweep.trials=30 'sweep.space.outer.lr={log_uniform: [0.1, 1.5]}'
sweep=NAME is a file in conf/sweep/ (default: outer).  sweep.KEY=VALUE sets its options, sweep.space.KEY=VALUES what is
tried, and any other KEY=VALUE lies over all trials; run.name names the sweep.  docs/tuning.md explains all of it.
The same command again goes on: what is decided is not run again, what was interrupted goes on from its last commit.
runs/NAME/ gets sweep.html, sweep.md and sweep.json, and best.yaml for ray-diloco train --config."""


def add_commands(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "tune",
        help="try settings with Ray Tune, and find the best",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="the sweep, and keys for all trials")
    parser.add_argument("--config", metavar="FILE", help="sweep file, in place of a name")
    parser.add_argument("--conf-dir", metavar="DIR", help="folder with group files of your own, searched first")
    parser.add_argument("--print-config", action="store_true", help="print what would be tried, and try nothing")
    parser.add_argument("--quiet", action="store_true", help="print errors and nothing else")
    parser.set_defaults(handler=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    sweep = read_sweep(arguments.settings, arguments.config, conf_dir=arguments.conf_dir)
    if arguments.print_config:
        print(preview(sweep))
        return EXIT_FINISHED
    options = ["--config", arguments.config] if arguments.config else []
    options += ["--conf-dir", arguments.conf_dir] if arguments.conf_dir else []
    command = ["ray-diloco", "tune", *options, *arguments.settings]
    quiet = arguments.quiet or sweep.base.config.observe.quiet
    results, stopped = tune(sweep, command, quiet=quiet)
    if not quiet:
        show(results, sweep.folder)
    if stopped:
        return EXIT_INTERRUPTED
    undone = any(trial.status in ("failed", "stopped", "begun") for trial in results.trials)
    return EXIT_FINISHED if results.best is not None and not undone else EXIT_INCOMPLETE


def tune(sweep: Sweep, command: Sequence[str] = (), *, quiet: bool = True) -> tuple[SweepResults, bool]:
    """Runs what is left of a sweep and writes its results into its folder.

    Args:
      sweep: see `read_sweep`.
      command: words of the command, for the record.
      quiet: show nothing.

    Returns:
      The results, and whether a signal stopped the sweep.

    Raises:
      ConfigError: RD-151, a run in the folder was made with other settings; RD-194, nothing can be run.
      CheckpointError: RD-530, another process runs this sweep.
      ClusterError: RD-201 or RD-202, there is no Ray.
    """
    proposed = _proposed(sweep)

    from ray_diloco import api
    from ray_diloco.checkpoint.rundir import RunDirectory
    from ray_diloco.cluster.build import cpus_needed
    from ray_diloco.cluster.session import ray_session
    from ray_diloco.comparing import is_finished
    from ray_diloco.sweep.record import DECIDED, Record
    from ray_diloco.sweep.running import Keeper, run_trials

    lock = RunDirectory(sweep.folder.parent, sweep.folder.name).lock()
    record = Record(sweep.folder)
    keeper = Keeper(sweep, record, api.run, api.prepare_data, is_finished, quiet=quiet)
    try:
        with api.stop_signals(b"stopping all trials at their newest commits; once more to leave at once\n") as stop:
            left = [trial for trial in proposed if not keeper.is_decided(trial)]
            configs = [trial.config for trial in left] or [sweep.base.config]
            learns = sweep.options.search == "optuna"
            done = learns and sum(entry.status in DECIDED for entry in record.entries.values()) >= sweep.planned
            if (left or learns) and not done:
                with ray_session(sweep.base.config, max(map(cpus_needed, configs)) + sweep.options.cpus):
                    run_trials(sweep, proposed, keeper, stop)
            else:
                for trial in proposed:
                    keeper.find_decided(trial)
            stopped = stop.is_set()
    finally:
        record.close()
        lock.release()
        results = results_of(sweep, command, record.entries)
        write_results(sweep, results)
    return results, stopped


def results_of(sweep: Sweep, command: Sequence[str], entries: Mapping[str, Entry]) -> SweepResults:
    """What the trials of a sweep came to so far."""
    from ray_diloco.observe.sweep import Known, gather_sweep

    options = sweep.options
    chosen = {"grid": "All combinations", "random": "Drawn at random", "optuna": "Proposed by Optuna"}[options.search]
    chosen += ", halted by ASHA" if options.scheduler == "asha" else ""
    known = [
        Known(entry.label, sweep.run_name(entry.label), entry.parameters, entry.status, entry.reason)
        for entry in entries.values()
    ]
    return gather_sweep(
        sweep.folder,
        known,
        command=shlex.join(command),
        common=sweep.common,
        keys=tuple(sweep.space),
        chosen=chosen,
        planned=sweep.planned,
    )


def write_results(sweep: Sweep, results: SweepResults) -> None:
    """Writes the results, and the best configuration as an experiment file."""
    from ray_diloco.observe.lines import replace_text
    from ray_diloco.observe.sweep_page import write_sweep

    write_sweep(sweep.folder, results)
    best = next((trial for trial in results.trials if trial.label == results.best), None)
    if best is not None:
        replace_text(sweep.folder / "best.yaml", best_yaml(sweep, best.parameters, best.loss))


def best_yaml(sweep: Sweep, parameters: Mapping[str, Any], loss: float | None) -> str:
    """An experiment file that trains as the best trial did, as a run of its own."""
    from ray_diloco.config.show import config_yaml
    from ray_diloco.config.typed import Composed
    from ray_diloco.config.yamlfile import write_scalar
    from ray_diloco.observe.units import show_number

    composed = sweep.trial(parameters).composed
    assert composed is not None  # it has run
    config, base = composed.config, sweep.base.config
    run = replace(config.run, name=f"{sweep.name}-best"[:64], root=base.run.root, storage=None)
    config = replace(
        config,
        run=run,
        observe=replace(config.observe, wandb_group=None),
        export=replace(config.export, enabled=True),
    )
    origins = {key: "sweep" if key in parameters else origin for key, origin in composed.origins.items()}
    chosen = "".join(f"#   {key}: {write_scalar(value)}\n" for key, value in parameters.items())
    text = f"# The best of the sweep {sweep.name}, held-out loss {show_number(loss)} nats per token:\n{chosen}"
    return text + config_yaml(Composed(config, origins))


def preview(sweep: Sweep) -> str:
    """What would be tried, and what is refused."""
    lines = [f"{sweep.folder}: {sweep.options.search}, {sweep.planned} trials", *(f"  {s}" for s in sweep.common)]
    lines += [f"try {key}: {domain}" for key, domain in sweep.space.items()]
    for trial in sweep.proposals():
        if trial.refusal is not None:
            lines.append(f"{trial.label}  refused: RD-{trial.refusal.number}: {trial.refusal.what}")
        else:
            config = trial.config
            tokens = config.run.rounds * tokens_per_round(config)
            lines.append(f"{trial.label}  {config.run.rounds} rounds, {tokens:,} tokens")
            lines += [f"  warning: {warning}" for warning in trial.warnings]
    return "\n".join(lines)


def show(results: SweepResults, folder: Path) -> None:
    """Prints the table: with rules and colours in a terminal, plain elsewhere."""
    from ray_diloco.observe import sweep_page
    from ray_diloco.observe.sweep import counts

    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{results.sweep}: {counts(results)}")
        for name in sweep_page.head(results):
            table.add_column(name, justify="right")
        for k, trial in enumerate(results.trials, start=1):
            style = {"finished": "", "halted": "yellow"}.get(trial.status, "red")
            table.add_row(
                *sweep_page.row(results, k, trial), style="bold green" if trial.label == results.best else style
            )
        Console().print(table)
        for trial in results.trials:
            if trial.reason:
                print(f"{trial.label} {trial.status}: {trial.reason}")
    else:
        print(f"\n{sweep_page.plain(results)}\n\n{counts(results)}")
    if results.best is not None:
        print(f"best: {results.best}\n  ray-diloco train --config {folder / 'best.yaml'}")
    print(folder / "sweep.html")


def _proposed(sweep: Sweep) -> list[Trial]:
    """The trials of a grid or random search, looked at before anything starts; none of a search that learns."""
    from ray_diloco.comparing import refuse_other_settings
    from ray_diloco.sweep.record import read_record

    if sweep.options.search == "optuna":
        proposed, known = [], [sweep.trial(entry.parameters) for entry in read_record(sweep.folder).values()]
    else:
        proposed = list(sweep.proposals())
        known = proposed
        refusals = [trial.refusal for trial in proposed if trial.refusal is not None]
        if len(refusals) == len(proposed):
            raise ConfigError(
                194, f"every combination is refused, the first because {refusals[0].what}", refusals[0].mend
            )
    for trial in known:
        if trial.composed is not None:
            refuse_other_settings(trial.config)
    return proposed


__all__ = ["Sweep", "best_yaml", "preview", "read_sweep", "results_of", "tune"]
