"""Three regions on one machine, over the links of ../shared/wanlab: object pulls, and real runs of several methods.

    pulls    Mbit/s of `ray.get` from eu to us (90 ms, 1000 Mbit/s each way), in one object and in several, with the
             buffers that Linux comes with and with those of `regions.TUNED`
    train    a run of each method on one cluster: seconds of a round, utilisation, tokens per second, and bytes on the
             links by the router's count beside those of summary.json
    plan     what `ray-diloco plan` says of the same runs, with the links as given and the steps as measured

Utilisation is inner training over the wall time of the segments, as summary.json has it; `whole` is the same over all
the time from one commit to another, with what lies between segments.  Each rank is held to half a processor (a quota
of its control group), so that three islands of equal speed fit on two and do not wait for one another's processor.

    sudo python tests/bench/bench_regions.py pulls
    sudo python tests/bench/bench_regions.py train --mbit 12 --variants streaming sync_dp --set codec.down.kind=bf16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from cluster_runs import Tape, seen
from regions import LAB, TUNED, Regions, lacking, regions

COMMON = (
    "model=tiny", "islands.regions.us=1", "islands.regions.eu=1", "islands.regions.asia=1", "evaluate.every=0",
    "evaluate.blocks=1", "export.enabled=false", "deadlines.placement_s=120",
)  # fmt: skip
VARIANTS = {
    "diloco": ("algorithm=diloco", "inner.H=50"),
    "streaming": ("algorithm=streaming", "inner.H=50", "schedule.delay=5"),
    "sync_dp": ("algorithm=sync_dp",),
}
REGIONS = ("us", "eu", "asia")
CGROUPS = Path("/sys/fs/cgroup/cpu")
# Of a processor, for each rank.
PROCESSORS = 0.5
# Bytes a round may differ by, beside 1 %.
SLACK = 10_000

PULL = """
import sys, time
import numpy as np, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Near
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
where = {n["Labels"]["ray.io/availability-region"]: n["NodeID"] for n in ray.nodes()}
@ray.remote(num_cpus=0)
class Source:
    def made(self, nbytes, count):
        parts = [np.ones(nbytes // count, np.uint8) for _ in range(count)]
        return parts if count > 1 else parts[0]
source = Source.options(scheduling_strategy=Near(where[sys.argv[2]], soft=False)).remote()
nbytes, rates = int(sys.argv[3]), {}
for count in [1, 1, 1, 1, 2, 2, 3, 3, 4, 4]:
    refs = source.made.options(num_returns=count).remote(nbytes, count)
    refs = refs if count > 1 else [refs]
    ray.wait(refs, num_returns=count, fetch_local=False)
    began = time.perf_counter()
    ray.get(refs)
    rates.setdefault(count, []).append(round(8 * nbytes / (time.perf_counter() - began) / 1e6))
    del refs
print("RATES", rates)
"""


def pulls(source: str) -> None:
    """Rates with the buffers that are there and with larger ones; the first pull of all goes over a cold connection."""
    for name, settings in (("as Linux comes", {}), ("tuned", TUNED)):
        with regions(settings=settings) as lab:
            done = lab.run("us", sys.executable, "-c", PULL, lab.head, source, str(100 * 10**6))
            found = [line for line in done.stdout.splitlines() if line.startswith("RATES")]
            print(
                f"{source} to us, {name}: {found[0][6:] if found else done.stderr[-2000:]} Mbit/s by slices", flush=True
            )


@contextlib.contextmanager
def own_processors() -> Iterator[Path | None]:
    """Control groups for this process and the ranks of each region; None where there are none to be had."""
    group, own = CGROUPS / "wan", str(os.getpid())
    try:
        for path in (group, group / "rest", *(group / region for region in REGIONS)):
            path.mkdir(exist_ok=True)
        (group / "cpu.shares").write_text("262144")
        for region in REGIONS:
            (group / region / "cpu.cfs_period_us").write_text("10000")
            (group / region / "cpu.cfs_quota_us").write_text(str(int(10000 * PROCESSORS)))
        (group / "rest" / "cgroup.procs").write_text(own)
    except OSError as error:
        print(f"no control groups: {error}; islands compete for processors", flush=True)
        yield None
        return
    try:
        yield group
    finally:
        (CGROUPS / "cgroup.procs").write_text(own)
        for path in (*(group / region for region in REGIONS), group / "rest", group):
            with contextlib.suppress(OSError):
                path.rmdir()


def hold_back(group: Path) -> None:
    """Holds the rank of each region to its part of a processor."""
    for region in REGIONS:
        pids = subprocess.run(["ip", "netns", "pids", f"wan-{region}"], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Rank"):
                    (group / region / "cgroup.procs").write_text(pid)


class Sampler:
    """What the links had carried at each moment."""

    def __init__(self, lab: Regions) -> None:
        self._lab, self._over = lab, threading.Event()
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            self.samples.append((time.time(), self._lab.carried()))
            self._over.wait(0.1)

    def between(self, begin: float, end: float) -> int:
        """Bytes on all links from one moment to another."""
        inside = [sum(carried.values()) for at, carried in self.samples if begin <= at <= end]
        return inside[-1] - inside[0] if inside else 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(lab: Regions, name: str, rounds: int, more: list[str], group: Path | None) -> dict[str, Any]:
    """One run by the command, in the region of the head."""
    root = lab.folder / "runs"
    command = [
        sys.executable, "-m", "ray_diloco.cli", "train", "--quiet", f"ray.address={lab.head}", *COMMON, *VARIANTS[name],
        f"run.rounds={rounds}", f"run.name={name}", f"run.root={root}", *more,
    ]  # fmt: skip
    began = time.time()
    tape = Tape(root / name)
    with Sampler(lab) as sampler, ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(lab.run, "us", *command)
        with contextlib.suppress(AssertionError):
            tape.wait(seen("round_opened"), lambda: not ended.done())
            if group is not None:
                hold_back(group)
        done = ended.result()
    if done.returncode:
        raise SystemExit(f"{name} failed with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return figures(root / name, sampler, began)


def figures(folder: Path, sampler: Sampler, began: float) -> dict[str, Any]:
    """What a run left, beside what the links carried."""
    events, lines = lines_of(folder / "events.jsonl"), lines_of(folder / "metrics.jsonl")
    commits = [e for e in events if e["event"] == "round_committed"]
    opened = [e for e in events if e["event"] == "round_opened"]
    # The first round goes over cold connections and begins with what islands join with.
    first, last = commits[min(2, len(commits) // 2)], commits[-1]
    rounds = last["round"] - first["round"]
    islands = [line for line in lines if line["kind"] == "island" and first["round"] < line["round"] <= last["round"]]
    summary = json.loads((folder / "summary.json").read_text())
    payload = sum(line["bytes_up"] + line["bytes_down"] for line in islands if line["island"] not in ("us", "us-0"))
    seconds = last["t"] - first["t"]
    # From the midst of a round's steps to that of a later one: what belongs to a round travels around its commit.
    times, count = [c["t"] for c in commits], len(commits) - 1 - commits.index(first)
    wire = sampler.between(*(0.6 * times[k] + 0.4 * times[k + 1] for k in (-count - 1, -2)))
    payload *= (count - 1) / count
    mean = {
        key: round(sum(line[key] for line in islands) / len(islands), 3)
        for key in ("train_s", "send_s", "wait_s", "adopt_s", "wall_s")
    }
    return {
        "start_s": round(opened[0]["t"] - began, 1),
        "round_s": round(seconds / rounds, 3),
        "utilisation": round(summary["utilisation"], 4),
        "utilisation_later": round(sum(i["train_s"] for i in islands) / sum(i["wall_s"] for i in islands), 4),
        "whole": round(sum(i["train_s"] for i in islands) / len({i["island"] for i in islands}) / seconds, 4),
        "tokens_per_s": round((last["tokens"] - first["tokens"]) / seconds),
        "mean_of_a_round": mean,
        "payload_per_round": round(payload / (count - 1)),
        "wire_per_round": round(wire / (count - 1)),
        "allowed_per_round": round(0.01 * payload / (count - 1)) + SLACK,
        "more_per_round": round((wire - payload) / (count - 1)),
        "more_per_s": round((wire - payload) / (count - 1) / (seconds / rounds)),
        "network_of_summary": summary["bytes_network"],
        "network_by_router": sampler.between(
            events[0]["t"], next((e["t"] for e in reversed(events) if e["event"] == "network_counted"), last["t"])
        ),
        "summary_bytes": [summary["bytes_up"], summary["bytes_down"]],
        "step_s": round(sum(i["train_s"] for i in islands) / sum(i["steps"] for i in islands), 4),
    }


def plan(name: str, spec: dict[str, Any], step_s: float, anchor: str, more: list[str]) -> dict[str, Any]:
    """What the planner says of a run with the anchor in a region."""
    given = [f"plan.step_seconds={step_s}", f"plan.anchor={anchor}-0"]
    for far in (region for region in REGIONS if region != anchor):
        named = (spec["links"].get(f"{a}-{b}") for a, b in ((anchor, far), (far, anchor)))
        link = {**spec["default"], **next(filter(None, named), {})}
        site = f"plan.islands.{far}-0"
        given += [f"{site}.up_mbit={link['mbps']}", f"{site}.down_mbit={link['mbps']}"]
        given += [f"{site}.rtt_ms={2 * link['latency_ms']}"]
    command = [sys.executable, "-m", "ray_diloco.cli", "plan", "--json", *COMMON, *VARIANTS[name], *given, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:] or done.stdout[-500:]}
    times = json.loads(done.stdout)["plan"]["times"]
    return {key: times[key] for key in ("round_s", "train_s", "exposed_s", "utilisation")}


def idle(lab: Regions, seconds: float = 60.0) -> dict[str, float]:
    """Bytes a second that a cluster sends which does nothing; a machine reports once in that time (jobs/join.sh)."""
    with Sampler(lab) as sampler:
        threading.Event().wait(seconds)
    (begin, _), (end, _) = sampler.samples[0], sampler.samples[-1]
    return {"idle_bytes_per_s": round(sampler.between(begin, end) / (end - begin))}


def measure(arguments: argparse.Namespace, group: Path | None, lab_file: Path) -> None:
    """One run of each method on one cluster."""
    with regions(lab_file) as lab:
        print(json.dumps(idle(lab)), flush=True)
        for name in arguments.variants:
            rounds = arguments.steps if name == "sync_dp" else arguments.rounds
            found = train(lab, name, rounds, arguments.set, group)
            print(name, json.dumps(found, indent=1), f"load {os.getloadavg()[0]:.1f}", flush=True)
            if keep := os.environ.get("KEEP"):
                shutil.copytree(lab.folder / "runs" / name, Path(keep) / name, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pulls", "train", "plan"])
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of a step, for the plan")
    parser.add_argument("--anchor", default="us", choices=REGIONS, help="region of the anchor, for the plan")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="rounds of sync_dp, in which every step is one")
    parser.add_argument("--mbit", type=float, default=0.0, help="of every link, each way; 0: as the lab has them")
    parser.add_argument("--from", dest="source", default="eu")
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the runs")
    arguments = parser.parse_args()
    spec = yaml.safe_load(LAB.read_text())
    for link in (spec["default"], *spec["links"].values()) if arguments.mbit else ():
        link["mbps"] = arguments.mbit
    if arguments.what == "plan":
        for name in arguments.variants:
            print(name, plan(name, spec, arguments.step_s, arguments.anchor, arguments.set))
        return
    # What was started is ended also where somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if reason := lacking():
        raise SystemExit(reason)
    if arguments.what == "pulls":
        pulls(arguments.source)
        return
    with own_processors() as group, tempfile.NamedTemporaryFile("w", suffix=".yaml") as lab_file:
        yaml.safe_dump(spec, lab_file)
        lab_file.flush()
        measure(arguments, group, Path(lab_file.name))


if __name__ == "__main__":
    main()
