"""Real runs whose ranks, shards and driver are killed and frozen at random, each audited when it has been stopped.

A fault every two to ten seconds; the seed chooses what is struck.  After so many seconds the run is asked to stop, and
`ray-diloco audit` says whether commits, ledger, summary and trace hold together.  Leaves with 1 where one does not.

    python tests/bench/soak.py --seconds 60 --seed 1 algorithm=diloco
    python tests/bench/soak.py --seconds 60 --seed 2 --driver algorithm=streaming quorum.kind=at_least quorum.n=2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

NAME = "soak"
# What is struck, by the title that Ray gives its process, and how often of a hundred: as it comes, and with `--driver`.
STRIKES = {
    ("kill", "ray::Rank"): (55, 25),
    ("suspend", "ray::Rank"): (15, 0),
    ("kill", "ray::Shard"): (18, 35),
    ("kill", "ray::Driver"): (12, 40),
}


def processes(title: str) -> Iterator[psutil.Process]:
    """Living processes below this one that have a title."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith(title):
                yield process


def strike(draw: random.Random, seconds: float, driver: bool, over: threading.Event) -> list[str]:
    """Strikes for so long; what was struck."""
    struck, end = [], time.monotonic() + seconds
    weights = [rates[driver] for rates in STRIKES.values()]
    while time.monotonic() < end and not over.wait(draw.uniform(2.0, 10.0)):
        ((how, title),) = draw.choices(list(STRIKES), weights)
        found = sorted(processes(title), key=lambda process: process.pid)
        if found:
            with contextlib.suppress(psutil.Error):
                getattr(draw.choice(found), how)()
                struck.append(f"{how} {title.removeprefix('ray::')}")
    return struck


def stop(over: threading.Event) -> None:
    """Asks the run to stop, as soon as its driver is there to hear it."""
    import ray

    while not over.is_set():
        try:
            ray.get(ray.get_actor(NAME).stop.remote(), timeout=10)
            return
        except (ValueError, ray.exceptions.RayError):
            over.wait(1.0)


def soak(place: Any, options: argparse.Namespace) -> str:
    """One run under fire; how it ended."""
    from cluster_runs import Tape, seen

    over, tape, struck = threading.Event(), Tape(place.folder(NAME)), []

    def attack() -> None:
        with contextlib.suppress(AssertionError):
            tape.wait(seen("round_committed", 2), lambda: not over.is_set())
            struck.extend(strike(random.Random(options.seed), options.seconds, options.driver, over))
            stop(over)

    thread = threading.Thread(target=attack)
    thread.start()
    settings = {
        "islands.count": 3,
        "inner.H": 20,
        "run.rounds": 1_000_000,
        "run.max_restarts": 1000,
        "evaluate.every": 0,
        "evaluate.blocks": 1,
        "deadlines.heartbeat_s": 5,
        "deadlines.losses": 1000,
        **dict(setting.split("=", 1) for setting in options.settings),
    }
    try:
        ended = str(place.train(NAME, settings)["status"])
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    finally:
        over.set()
        thread.join()
    print(ended, Counter(struck), Counter(event["event"] for event in tape.read()), sep="\n")
    return ended


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", action="store_true", help="strike the driver and the anchor most")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for train")
    options = parser.parse_args(arguments)

    import ray
    from cluster_runs import Place

    from ray_diloco.cluster.local_ray import LOCAL_RAY

    os.environ |= LOCAL_RAY
    with tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as folder, tempfile.TemporaryDirectory() as runs:
        ray.init(
            address="local", num_cpus=8, namespace="ray_diloco", include_dashboard=False, log_to_driver=False,
            object_store_memory=512 << 20, _node_ip_address="127.0.0.1", _temp_dir=folder,
        )  # fmt: skip
        place = Place(Path(runs), blocks=3000)
        ended = soak(place, options)
        ray.shutdown()
        audited = subprocess.run([sys.executable, "-m", "ray_diloco.cli", "audit", str(place.folder(NAME))])
    return 0 if ended == "stopped" and audited.returncode == 0 else 1


if __name__ == "__main__":
    from ray_diloco.cluster.credentials import credentials

    with credentials(None):
        sys.exit(main())
