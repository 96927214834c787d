"""A storm on real processes: ranks of three islands are killed or frozen at seeded times, and what that costs.

First the same run in a calm, for as long; then the storm.  A fault strikes a rank, `kill -9` three times in four and
SIGSTOP otherwise, at times that are uniform in the window, with as many as its rate gives.

    throughput       tokens committed in the storm, of those in the calm
    next commit      from a fault to the next commit, less the usual time of a round
    contributes      from a fault to the first commit that its island is in again

`--failing N` is another run: a contribution of each of N rounds is refused, and the memory of driver and shard is
compared between the first fifth and the last.

    python tests/bench/bench_storm.py --minutes 5 --faults-per-hour 120 --seed 0
    python tests/bench/bench_storm.py --minutes 5 --set quorum.kind=at_least --set quorum.n=2
    python tests/bench/bench_storm.py --failing 200
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

ISLANDS = 3
HEARTBEAT_S = 5.0


@dataclass(frozen=True)
class Strike:
    """What was done to an island, and when (unix seconds)."""

    at: float
    island: str
    kind: str


def storm(seed: int, minutes: float, per_hour: float) -> list[tuple[float, int, str]]:
    """Seconds from the start, number of the island, and kind of each fault."""
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, 60 * minutes) for _ in range(round(per_hour * minutes / 60)))
    return [(t, draw.randrange(ISLANDS), "freeze" if draw.random() < 0.25 else "kill") for t in times]


def pid_of(island: str) -> int | None:
    """Process of the living rank of an island."""
    from ray._private.state import actors

    for actor in actors().values():
        if actor["State"] == "ALIVE" and f": island {island}, " in (actor["Name"] or ""):
            return int(actor["Pid"])
    return None


def train(
    place: Any, name: str, minutes: float, faults: list[tuple[float, int, str]], choices: Sequence[str]
) -> tuple[list[Any], list[Strike]]:
    """Trains for so many minutes from the first commit on, with these faults; its events and what was struck."""
    import psutil
    import ray
    from cluster_runs import DEADLINE_S, Tape, events, seen

    struck: list[Strike] = []
    tape, over = Tape(place.folder(name)), threading.Event()

    def strike() -> None:
        tape.wait(seen("round_committed", 3), lambda: not over.is_set())
        began = time.monotonic()
        for at, number, kind in [*faults, (60 * minutes, 0, "stop")]:
            over.wait(max(0.0, began + at - time.monotonic()))
            if kind == "stop":
                ray.get(ray.get_actor(name).stop.remote())
                return
            pid = pid_of(f"i{number}")
            # An island that is down has nothing to be struck.
            if pid is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(psutil.Process(pid), {"kill": "kill", "freeze": "suspend"}[kind])()
                    struck.append(Strike(time.time(), f"i{number}", kind))

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        place.train(
            name,
            {
                "islands.count": ISLANDS,
                "inner.H": 100,
                "run.rounds": 100_000,
                "evaluate.every": 0,
                "evaluate.blocks": 1,
                "trace.contributions": False,
                "deadlines.heartbeat_s": HEARTBEAT_S,
                "deadlines.losses": 1000,
            }
            | dict(choice.split("=", 1) for choice in choices),
        )
    finally:
        over.set()
        thread.join(DEADLINE_S)
    return events(place.folder(name)), struck


def commits_of(tape: list[Any]) -> list[Any]:
    return [event for event in tape if event["event"] == "round_committed"]


def tokens_in(tape: list[Any], minutes: float) -> int:
    """Tokens committed in the window, which begins with the third commit."""
    commits = commits_of(tape)
    begin = commits[2]["t"]
    inside = [event for event in commits if event["t"] <= begin + 60 * minutes]
    return int(inside[-1]["tokens"] - commits[2]["tokens"])


def compare(place: Any, minutes: float, per_hour: float, seed: int, choices: Sequence[str]) -> dict[str, Any]:
    """Calm and storm."""
    calm, _ = train(place, "calm", minutes, [], choices)
    rounds = [event["t"] for event in commits_of(calm)]
    round_s = statistics.median(b - a for a, b in pairwise(rounds))
    tape, struck = train(place, "storm", minutes, storm(seed, minutes, per_hour), choices)
    commits = commits_of(tape)
    next_s, back_s = [], []
    for strike in struck:
        lost = next(
            (e for e in tape if e["event"] == "island_lost" and e["island"] == strike.island and e["t"] > strike.at),
            None,
        )
        after = [event for event in commits if event["t"] > strike.at]
        if lost is None or not after:
            continue
        next_s.append((strike.kind, max(0.0, after[0]["t"] - strike.at - round_s)))
        back = next((e for e in after if e["t"] > lost["t"] and strike.island in e["islands"]), None)
        if back is not None:
            back_s.append((strike.kind, back["t"] - strike.at))
    joined = sum(event["event"] == "island_joined" for event in tape)
    return {
        "minutes": minutes,
        "faults": len(struck),
        "killed": sum(strike.kind == "kill" for strike in struck),
        "joined_again": joined - ISLANDS,
        "round_s": round_s,
        "throughput": tokens_in(tape, minutes) / tokens_in(calm, minutes),
    } | {
        f"{what}_after_{kind}_s": spread([s for k, s in values if k == kind])
        for what, values in (("next_commit", next_s), ("contributes_again", back_s))
        for kind in ("kill", "freeze")
    }


def failing(place: Any, rounds: int) -> dict[str, Any]:
    """Memory of driver and shard over rounds of which each refuses a contribution."""
    import psutil
    from cluster_runs import Tape, actor_processes, seen

    tape, over = Tape(place.folder("failing")), threading.Event()
    sizes: dict[str, list[float]] = {"Driver": [], "Shard": []}

    def watch() -> None:
        for count in (rounds // 5, rounds - 2):
            tape.wait(seen("round_committed", count), lambda: not over.is_set())
            for kind, seen_so_far in sizes.items():
                found = actor_processes(kind)
                seen_so_far.append(sum(psutil.Process(p.pid).memory_full_info().uss for p in found) / 2**20)

    thread = threading.Thread(target=watch)
    thread.start()
    plan = [f"corrupt_payload i{r % 2} {r} before_send" for r in range(1, rounds + 1)]
    more = {"faults.plan": plan, "faults.allowed": True, "guard.strikes": 0, "evaluate.every": 0}
    try:
        place.train("failing", {"run.rounds": rounds, "trace.contributions": False, "inner.H": 8} | more)
    finally:
        over.set()
        thread.join()
    refused = sum(event["event"] == "contribution_rejected" for event in tape.read())
    return {"rounds": rounds, "refused": refused, "mib_after_a_fifth_and_at_the_end": sizes}


def spread(values: list[float]) -> dict[str, float]:
    """Median and worst."""
    return {"median": round(statistics.median(values), 2), "max": round(max(values), 2)} if values else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--faults-per-hour", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="choices", metavar="KEY=VALUE", help="of both runs")
    parser.add_argument("--failing", type=int, default=0, metavar="ROUNDS")
    arguments = parser.parse_args()

    import os

    import ray
    from cluster_runs import Place

    from ray_diloco.cluster.credentials import credentials
    from ray_diloco.cluster.local_ray import LOCAL_RAY

    os.environ |= LOCAL_RAY
    with credentials(None), tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=8,
            namespace="ray_diloco",
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        with tempfile.TemporaryDirectory() as runs:
            place = Place(Path(runs), blocks=4000)
            if arguments.failing:
                result = failing(place, arguments.failing)
            else:
                result = compare(place, arguments.minutes, arguments.faults_per_hour, arguments.seed, arguments.choices)
        ray.shutdown()
    print(json.dumps(result | {"load": os.getloadavg()}, indent=2))


if __name__ == "__main__":
    main()
