"""What a script reads after the run: `summary.json`.

Its figures are counted from `metrics.jsonl` and `events.jsonl`, which survive stops and hold every committed round
once; so a run that was resumed three times has the summary of one that was never stopped, apart from its wall time
and from `bytes_network`, of which every process of the run counts its own.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ray_diloco.errors import CheckpointError
from ray_diloco.observe.lines import read_lines, replace_text, to_json

# What a process that begins a run, or takes it up again, writes before anything else.
_FIRST_EVENTS = ("log_repaired", "run_started", "run_resumed")

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class IslandSummary:
    """What one island did in the whole run.

    Args:
      rounds_contributed: rounds that its contribution was merged into.
      steps, tokens: inner steps and tokens of those rounds.
      restarts: how often it was lost and begun again.
    """

    name: str
    region: str
    rounds_contributed: int
    steps: int
    tokens: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Tally:
    """The figures of a run that its two logs determine.

    Args:
      rounds: rounds committed.
      steps: inner steps of the run: summed over rounds, those of the island with most steps in it.
      tokens_committed: tokens credited by commits.
      final_train_loss: token-weighted mean loss of the islands in the last round, nats per token.
      final_eval_loss, final_eval_ppl: the newest evaluation of the anchor.
      bytes_up, bytes_down: payload bytes of all committed rounds.
      wall_s: seconds between first and last event of each process that ran it, added up.
      train_s: seconds in inner steps, mean over islands.
      utilisation: seconds in inner steps / seconds of rounds, mean over islands.
      expected: of a round, as planned at the start: bytes_up, bytes_down, round_s, train_s; None: nobody reckoned it.
      bytes_network: what the network interfaces of the run's machines sent, all of it; None: there is one machine only.
    """

    rounds: int
    steps: int
    tokens_committed: int
    final_train_loss: float | None
    final_eval_loss: float | None
    final_eval_ppl: float | None
    bytes_up: int
    bytes_down: int
    wall_s: float
    train_s: float
    utilisation: float | None
    islands: tuple[IslandSummary, ...]
    expected: dict[str, float | None] | None = None
    bytes_network: int | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """All of `summary.json`; the figures are explained at `Tally`.

    Args:
      anchor_digest: SHA-256 over the canonical fp32 anchor, hexadecimal.
      unigram_entropy: of the held-out tokens, nats per token: the loss of a model that knows only token frequencies.
      parameters: elements of the anchor.
      export, report: paths, relative to the run directory.
      sample: text that the anchor generated.
      reason: why the run stopped or failed.
      environment: versions and machine, for the record.
      wandb_run_id: the mirror's run, if there is one.
      version: version of ray_diloco.
    """

    run: str
    status: Status
    rounds: int
    steps: int
    tokens_committed: int
    final_train_loss: float | None
    final_eval_loss: float | None
    final_eval_ppl: float | None
    bytes_up: int
    bytes_down: int
    wall_s: float
    train_s: float
    utilisation: float | None
    anchor_digest: str
    islands: tuple[IslandSummary, ...]
    expected: dict[str, float | None] | None = None
    bytes_network: int | None = None
    reason: str | None = None
    unigram_entropy: float | None = None
    parameters: int | None = None
    export: str | None = None
    report: str | None = None
    sample: str | None = None
    wandb_run_id: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


def tally(directory: Path) -> Tally:
    """Count a run's figures from its `metrics.jsonl` and `events.jsonl`.

    Args:
      directory: the run directory; a log that is missing counts as empty.

    Raises:
      CheckpointError: RD-581, a log is broken.
    """
    metrics = list(read_lines(directory / "metrics.jsonl"))
    events = list(read_lines(directory / "events.jsonl"))
    of_island: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    steps_of_round: defaultdict[int, int] = defaultdict(int)
    for line in metrics:
        if line["kind"] == "island":
            of_island[line["island"]].append(line)
            steps_of_round[line["round"]] = max(steps_of_round[line["round"]], line["steps"])
    commits = [line for line in metrics if line["kind"] == "commit"]
    evaluations = [line for line in metrics if line["kind"] == "eval"]
    islands = _count_islands(of_island, events)
    counted = [event["bytes_sent"] for event in events if event["event"] == "network_counted"]
    return Tally(
        rounds=commits[-1]["round"] if commits else 0,
        steps=sum(steps_of_round.values()),
        tokens_committed=commits[-1]["tokens_committed"] if commits else 0,
        final_train_loss=mean_loss(
            line for lines in of_island.values() for line in lines if commits and line["round"] == commits[-1]["round"]
        ),
        final_eval_loss=evaluations[-1]["loss"] if evaluations else None,
        final_eval_ppl=evaluations[-1]["ppl"] if evaluations else None,
        bytes_up=sum(line["bytes_up"] for line in commits),
        bytes_down=sum(line["bytes_down"] for line in commits),
        wall_s=(active_seconds(events) or [0.0])[-1],
        train_s=_mean([_seconds(lines, ("train_s",)) for lines in of_island.values()]) or 0.0,
        utilisation=_mean([_utilisation(lines) for lines in of_island.values()]),
        islands=islands,
        expected=_expected(events),
        bytes_network=sum(counted) if counted else None,
    )


def summarise(
    directory: Path,
    *,
    run: str,
    status: Status,
    anchor_digest: str,
    **more: Any,
) -> Summary:
    """The summary of the run in `directory`: what `tally` counts, and what only the driver knows.

    Args:
      more: further fields of `Summary`.
    """
    counted = tally(directory)
    figures = {each.name: getattr(counted, each.name) for each in fields(counted)}
    return Summary(run=run, status=status, anchor_digest=anchor_digest, **{**figures, **more})


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary.json` in one move.

    Raises:
      CheckpointError: RD-582, the disk refuses.
    """
    replace_text(path, to_json(asdict(summary), indent=2) + "\n")


def read_summary(path: Path) -> Summary:
    """Read `summary.json`.

    Raises:
      CheckpointError: RD-583, there is none, or it is not a summary of this version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        islands = tuple(IslandSummary(**island) for island in content.pop("islands"))
        return Summary(islands=islands, **content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            583,
            f"{path} is not a readable summary of a run: {error}",
            "run the same command again: it ends at once where all rounds are committed, and writes the summary anew",
        ) from error


def mean_loss(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Token-weighted mean of `loss` over lines of kind `island`, nats per token; None without a finite one."""
    pairs = [(line["loss"], line["tokens"]) for line in lines if line["loss"] is not None]
    tokens = sum(weight for _, weight in pairs)
    return math.fsum(loss * weight for loss, weight in pairs) / tokens if tokens else None


def active_seconds(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """When each event happened, in seconds during which a process ran the run: the time between two does not count."""
    seconds: list[float] = []
    last = 0.0
    for event in events:
        pause = not seconds or event["event"] in _FIRST_EVENTS
        seconds.append((seconds[-1] if seconds else 0.0) + (0.0 if pause else max(0.0, event["t"] - last)))
        last = event["t"]
    return seconds


def _expected(events: Iterable[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """What the newest process of the run expected of a round."""
    newest = [event for event in events if event["event"] == "run_expected"][-1:]
    return {key: newest[0].get(key) for key in ("bytes_up", "bytes_down", "round_s", "train_s")} if newest else None


def _count_islands(
    of_island: Mapping[str, list[dict[str, Any]]], events: list[dict[str, Any]]
) -> tuple[IslandSummary, ...]:
    restarts: defaultdict[str, int] = defaultdict(int)
    region: dict[str, str] = {}
    for event in events:
        if event["event"] == "island_lost":
            restarts[event["island"]] += 1
        if event.get("region") and event.get("island"):
            region[event["island"]] = event["region"]
    return tuple(
        IslandSummary(
            name=name,
            region=region.get(name, ""),
            rounds_contributed=len({line["round"] for line in of_island.get(name, ())}),
            steps=sum(line["steps"] for line in of_island.get(name, ())),
            tokens=sum(line["tokens"] for line in of_island.get(name, ())),
            restarts=restarts[name],
        )
        for name in sorted({*of_island, *region})
    )


def _seconds(lines: Iterable[Mapping[str, Any]], names: tuple[str, ...]) -> float:
    return math.fsum(line[name] for line in lines for name in names)


def _utilisation(lines: list[dict[str, Any]]) -> float | None:
    whole = math.fsum(
        line.get("wall_s") or _seconds([line], ("train_s", "send_s", "wait_s", "adopt_s")) for line in lines
    )
    return _seconds(lines, ("train_s",)) / whole if whole else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
