"""A run directory as a run of some rounds leaves it, for looking at reports: `python observe_fake_run.py FOLDER`."""

import math
import random
import sys
from pathlib import Path

from ray_diloco.observe.events import EventLog
from ray_diloco.observe.metrics import CommitMetrics, EvalMetrics, IslandMetrics, MetricsLog, perplexity
from ray_diloco.observe.report import write_report
from ray_diloco.observe.summary import summarise, write_summary

REGIONS = {"i0": "eu-central", "i1": "us-east", "i2": "ap-south"}
SAMPLE = '''def parse(self, line: str) -> list[str]:
    """Return the <fields> of a line & its "rest"."""
    if len(line) < 2 and not self.strict:
        return []
'''
CONFIG = """run:
  name: demo  # command line
  rounds: 40  # conf/experiment/demo.yaml
model:
  name: tiny
outer:
  lr: 0.7
  momentum: 0.9
"""


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


def fake_run(directory: Path, rounds: int = 40, islands: int = 3, status: str = "finished", seed: int = 0) -> Path:
    """Writes the four files that a report is made of; i1 dies at two fifths of the run, which resumes at three."""
    directory.mkdir(parents=True, exist_ok=True)
    draw, clock = random.Random(seed), Clock()
    events = EventLog(directory / "events.jsonl", clock=clock)
    metrics = MetricsLog(directory / "metrics.jsonl", clock=clock)
    names = [f"i{k}" for k in range(islands)]
    (directory / "config.yaml").write_text(CONFIG)
    events.append("run_started", run="demo", islands=names, rounds=rounds)
    _launch(events, clock, names)
    metrics.append(EvalMetrics(0, 5.55, perplexity(5.55), 64, 16_384))
    tokens = 0
    for round in range(1, rounds + 1):
        present = list(names)
        if round == max(2, rounds * 2 // 5) and islands > 1:
            present.remove("i1")
            clock.now += 3.0
            events.append("island_lost", island="i1", incarnation=0, reason="rank 0 died (exit code -9) <kill>")
        if round == max(2, rounds * 3 // 5):
            events.append("stop_requested", round=round - 1)
            events.append("run_stopped", round=round - 1, rounds=rounds, reason="SIGTERM")
            clock.now += 7200.0
            events.append("run_resumed", run="demo", round=round - 1, rounds=rounds, tokens=tokens)
            _launch(events, clock, names)
        tokens += _round(draw, clock, events, metrics, round, rounds, present, tokens)
        if len(present) < len(names):
            _launch(events, clock, ["i1"], incarnation=1)
    events.append(f"run_{status}", round=rounds, rounds=rounds, tokens=tokens, reason="no islands left")
    summary = summarise(
        directory,
        run="demo",
        status=status,
        anchor_digest="9f86d081884c7d65" * 4,
        reason=None if status == "finished" else "no islands left: i0, i1 & i2 died <6 times>",
        unigram_entropy=3.31,
        parameters=1_200_000,
        sample=SAMPLE,
        export="export",
        environment={"python": "3.11.9", "torch": "2.13.0", "machine": "2 × CPU"},
        version="0.1.0",
    )
    write_summary(directory / "summary.json", summary)
    return directory


def _launch(events: EventLog, clock: Clock, names: list[str], incarnation: int = 0) -> None:
    for name in names:
        events.append("island_launching", island=name, incarnation=incarnation)
    clock.now += 6.0
    for name in names:
        events.append("island_joined", island=name, incarnation=incarnation, region=REGIONS.get(name, "eu-central"))


def _round(
    draw: random.Random,
    clock: Clock,
    events: EventLog,
    metrics: MetricsLog,
    round: int,
    rounds: int,
    present: list[str],
    before: int,
) -> int:
    base = 1.75 + 3.4 * math.exp(-round / (0.16 * rounds + 1))
    train = {name: 4.4 + 0.5 * k % 3 + draw.random() * 0.3 for k, name in enumerate(present)}
    slowest = max(train.values())
    clock.now += slowest + 0.25
    for name, train_s in train.items():
        loss = base + draw.gauss(0, 0.03)
        metrics.append(
            IslandMetrics(
                island=name,
                round=round,
                steps=50,
                tokens=51_200,
                loss=loss,
                pseudo_gradient_norm=0.4 + 2.2 * math.exp(-round / (0.2 * rounds + 1)) + draw.random() * 0.05,
                train_s=train_s,
                send_s=0.09,
                wait_s=slowest - train_s + 0.05,
                adopt_s=0.06,
                bytes_up=4_800_064,
                bytes_down=4_800_064,
                tokens_per_s=51_200 / train_s,
                wall_s=slowest + 0.2,
            )
        )
    tokens = 51_200 * len(present)
    total = 4_800_064 * len(present)
    norm = 0.3 + 1.5 * math.exp(-round / (0.2 * rounds + 1))
    metrics.append(
        CommitMetrics(round, round, 41.0 + round / 10, norm, len(present), 0.05, before + tokens, total, total)
    )
    events.append("round_committed", round=round, rounds=rounds, version=round, loss=base, islands=present)
    held_out = base + 0.06 + draw.gauss(0, 0.01)
    metrics.append(EvalMetrics(round, held_out, perplexity(held_out), 64, 16_384))
    if round % 10 == 7:
        reason = "the pseudo-gradient is not finite"
        events.append("contribution_rejected", island="i0", round=round, fragment=0, reason=reason)
    events.append("checkpoint_written", round=round, bytes=14_400_000, write_s=0.3)
    return tokens


if __name__ == "__main__":
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    print(write_report(fake_run(Path(sys.argv[1]), rounds, int(sys.argv[3]) if len(sys.argv) > 3 else 3)))
