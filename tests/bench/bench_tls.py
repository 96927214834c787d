"""What token and TLS cost between two nodes of a Ray: latency of a call, and pulls of objects over the loopback.

Each setting is a cluster of its own, one after the other and again in turn; medians.

    python tests/bench/bench_tls.py --rounds 2
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CALLS, PULLS, MB = 300, 7, 64


def measure() -> dict[str, Any]:
    """In a process whose environment has the setting."""
    import numpy as np
    import ray
    from ray.cluster_utils import Cluster

    temp = tempfile.mkdtemp(prefix="rd-", dir="/tmp")
    small = {"num_cpus": 1, "object_store_memory": 1 << 30, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=small | {"temp_dir": temp})
    nodes.add_node(num_cpus=1, resources={"there": 1}, object_store_memory=1 << 30)
    ray.init(address=nodes.address, log_to_driver=False)

    @ray.remote(resources={"there": 1})
    class There:
        def echo(self) -> None:
            pass

        def make(self, seed: int) -> Any:
            return np.full(MB * 1_000_000 // 8, float(seed))

    there = There.remote()
    for _ in range(50):
        ray.get(there.echo.remote())
    calls, pulls = [], []
    for _ in range(CALLS):
        begun = time.perf_counter()
        ray.get(there.echo.remote())
        calls.append(time.perf_counter() - begun)
    for seed in range(PULLS):
        made = there.make.remote(seed)
        ray.wait([made], fetch_local=False)
        begun = time.perf_counter()
        ray.get(made)
        pulls.append(time.perf_counter() - begun)
        del made
    ray.shutdown()
    nodes.shutdown()
    shutil.rmtree(temp, ignore_errors=True)
    return {"call_ms": 1e3 * statistics.median(calls), "pull_mb_s": MB / statistics.median(pulls[1:])}


def settings(folder: Path) -> dict[str, dict[str, str]]:
    for words in (["ca"], ["node", "127.0.0.1", *addresses()]):
        subprocess.run(
            [ROOT / "jobs/certificates.sh", *words],
            env=os.environ | {"TLS": str(folder)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    node = folder / "nodes/127.0.0.1"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    tls = {"RAY_TLS_CA_CERT": "ca.crt", "RAY_TLS_SERVER_CERT": "node.crt", "RAY_TLS_SERVER_KEY": "node.key"}
    return {
        "neither": {"RAY_AUTH_MODE": "disabled"},
        "token": token,
        "token and TLS": token | {"RAY_USE_TLS": "1"} | {name: str(node / file) for name, file in tls.items()},
    }


def addresses() -> list[str]:
    import psutil

    return [each.address for card in psutil.net_if_addrs().values() for each in card if each.family == 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure()))
        return
    with tempfile.TemporaryDirectory() as folder:
        known = settings(Path(folder))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in known}
        for _ in range(arguments.rounds):
            for name, variables in known.items():
                environment = os.environ | variables | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
                done = subprocess.run(
                    [sys.executable, __file__, "--here"], env=environment, check=True, capture_output=True, text=True
                )
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(name, found[name][-1], flush=True)
    for name, results in found.items():
        call, pull = (statistics.median(result[key] for result in results) for key in ("call_ms", "pull_mb_s"))
        print(f"{name:<14} call {call:.2f} ms, pull {pull:.0f} MB/s")


if __name__ == "__main__":
    main()
