"""The commands that speak to a run under way: scale, drain, status, stop.

    ray-diloco scale RUN 3            ray-diloco drain RUN eu-1
    ray-diloco scale RUN eu=2 us=1    ray-diloco status RUN

They find its driver wherever it runs (`cluster/control.py`) and say what it answered.  A run that has ended has no
driver; `status` reads in its tape how it did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_diloco.errors import EXIT_FINISHED, ClusterError, ConfigError
from ray_diloco.observe.lines import read_lines
from ray_diloco.observe.view import RunView

if TYPE_CHECKING:
    from ray_diloco.cluster.control import Control

# What a command that ends a run writes last, and what the run is then.
_ENDS = {"run_finished": "finished", "run_stopped": "stopped", "run_failed": "failed"}


def add_commands(commands: Any) -> None:
    """Adds the commands to the parser of `ray-diloco`."""
    scale = commands.add_parser("scale", help="ask a run under way for a number of islands")
    _add_run(scale)
    scale.add_argument("islands", nargs="+", metavar="N | REGION=N", help="islands in all, or of a region")
    scale.set_defaults(handler=_scale)

    drain = commands.add_parser("drain", help="ask an island to finish its segment and leave")
    _add_run(drain)
    drain.add_argument("island", metavar="ISLAND", help="name of the island")
    drain.set_defaults(handler=_drain)

    status = commands.add_parser("status", help="where a run stands, and its islands")
    _add_run(status)
    status.add_argument("--json", action="store_true", help="print it as JSON")
    status.set_defaults(handler=_status)

    stop = commands.add_parser("stop", help="ask a run under way to stop at its newest commit")
    _add_run(stop)
    stop.set_defaults(handler=_stop)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    parser.add_argument("--root", default="runs", metavar="DIR", help="folder of all runs (default %(default)s)")
    parser.add_argument("--address", metavar="HOST:PORT", help="its cluster (default: RAY_ADDRESS, or the run's own)")


def numbers_of(texts: Sequence[str]) -> dict[str, int]:
    """What `3` or `eu=2 us=1` asks for: islands by region, "" for the whole run.

    Raises:
      ConfigError: RD-127, it asks for no number, or for the whole and for parts.
    """
    asked: dict[str, int] = {}
    for text in texts:
        region, _, number = text.rpartition("=")
        if not number.isdigit() or region in asked:
            raise ConfigError(127, f"{text!r} says no number of islands", "write 3, or eu=2 us=1")
        asked[region] = int(number)
    if "" in asked and len(asked) > 1:
        raise ConfigError(127, f"{' '.join(texts)!r} asks for the whole and for parts", "write 3, or eu=2 us=1")
    return asked


def _scale(arguments: argparse.Namespace) -> int:
    asked = numbers_of(arguments.islands)
    with _control(arguments) as run:
        print(f"wanted are now {', '.join(run.scale(asked)) or 'no islands'}")
    return EXIT_FINISHED


def _drain(arguments: argparse.Namespace) -> int:
    with _control(arguments) as run:
        run.drain(arguments.island)
        print(f"{arguments.island} leaves when its segment is done")
    return EXIT_FINISHED


def _status(arguments: argparse.Namespace) -> int:
    try:
        with _control(arguments) as run:
            view = run.view()
    except ClusterError as error:
        past = ended(Path(arguments.root).expanduser() / arguments.run) or ended(Path(arguments.run))
        if error.number != 205 or past is None:
            raise
        view = past
    print(json.dumps(asdict(view), indent=2) if arguments.json else "\n".join(lines_of(view)))
    return EXIT_FINISHED


def _stop(arguments: argparse.Namespace) -> int:
    with _control(arguments) as run:
        run.stop()
        print("stopping at the newest commit; the same command goes on from there")
    return EXIT_FINISHED


def ended(folder: Path) -> RunView | None:
    """How a run ended, from the tape in its folder; None where there is none, or it does not say."""
    view, status = RunView(folder.name, "", 0, 0), ""
    for event in read_lines(folder / "events.jsonl"):
        known = {key: event[key] for key in ("round", "rounds", "tokens") if event.get(key) is not None}
        if event["event"] in ("run_started", "run_resumed", "round_committed"):
            view, status = replace(view, **known), ""
        elif event["event"] == "evaluation":
            view = replace(view, eval_loss=event["loss"], eval_ppl=event["ppl"])
        status = _ENDS.get(event["event"], status)
    return replace(view, status=status) if status else None


def lines_of(view: RunView) -> list[str]:
    """A run in a few lines: where it stands, for what it waits, and a line for each island."""
    head = f"{view.run} {view.status}: round {view.round} of {view.rounds}, {view.tokens} tokens committed"
    waiting = [f"  waiting for {view.waiting_for}"] if view.waiting_for else []
    width = max((len(island.name) for island in view.islands), default=0)
    rows = []
    for island in view.islands:
        steps = f" {island.step}/{island.steps}" if island.steps else ""
        region = f" in {island.region}" if island.region else ""
        again = f", started again {island.restarts} times" if island.restarts else ""
        rows.append(f"  {island.name:<{width}}  {island.state}{steps}{region}{again}")
    return [head, *waiting, *rows]


def _control(arguments: argparse.Namespace) -> AbstractContextManager[Control]:
    from ray_diloco.cluster.control import control

    return control(arguments.run, arguments.root, arguments.address)
