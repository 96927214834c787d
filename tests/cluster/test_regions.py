"""Two regions and the link between them, which is cut while they train; real sockets, real TCP.

The laboratory is ../shared/wanlab beside this repository; it needs root and network namespaces.
"""

import json
import signal
import sys

import pytest
from cluster_runs import MICRO, Tape, events, lines, manifest, seen, write_corpus
from regions import ROOT, lacking, regions

# A machine without root or the laboratory has no network to cut; the simulator cuts links everywhere.
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(lacking()), reason=lacking() or "none")]

LAB = {"regions": ["us", "eu"], "default": {"latency_ms": 10, "mbps": 1000}}
# As cluster.yaml has them, but for the last: a node that Ray has found dead ends, and the laboratory starts none again.
NOTICED = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "30",
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The folder of a run whose regions could not reach one another for a while, and how its command ended."""
    root = tmp_path_factory.mktemp("regions")
    (root / "lab.yaml").write_text(json.dumps(LAB))
    folder = root / "runs" / "cut"
    settings = {
        "run.root": root / "runs",
        "run.name": "cut",
        "run.rounds": 100_000,
        "data.path": write_corpus(root / "corpus.txt", 4000),
        "data.cache": root / "cache",
        "islands.regions": "{us: 1, eu: 1}",
        "inner.H": 16,
        "evaluate.every": 0,
        "evaluate.blocks": 1,
        "trace.contributions": False,
        "deadlines.heartbeat_s": 10,
        "deadlines.losses": 1000,
        "deadlines.placement_s": 120,
    }
    with regions(root / "lab.yaml", environment=NOTICED | {"PYTHONPATH": f"{ROOT}:{MICRO.parent}"}) as lab:
        command = [sys.executable, "-m", "ray_diloco.cli", "train", "--quiet", "--config", str(MICRO)]
        chosen = [f"{key}={value}" for key, value in settings.items()]
        run = lab.popen("us", *command, f"ray.address={lab.head}", *chosen)
        tape, alive = Tape(folder), lambda: run.poll() is None
        tape.wait(seen("round_committed", 2, islands=["eu-0", "us-0"]), alive)
        lab.say("cut", "us", "eu")
        tape.wait(seen("island_lost", island="eu-0"), alive)
        tape.wait(seen("round_committed", 2, islands=["us-0"]), alive)
        lab.say("heal", "us", "eu")
        back = Tape(folder)
        back.wait(seen("round_committed", 2, islands=["eu-0", "us-0"]), alive)
        run.send_signal(signal.SIGINT)
        yield folder, run.wait(60)


def test_the_run_goes_on_without_the_region_that_is_cut_off_and_with_it_again(cut):
    folder, status = cut
    assert status == 130 and json.loads((folder / "summary.json").read_text())["status"] == "stopped"
    told = [event for event in events(folder) if event.get("island") == "eu-0"]
    kinds = [event["event"] for event in told]
    assert kinds.index("island_lost") < len(kinds) - 1 - kinds[::-1].index("island_joined")
    lost = next(event for event in told if event["event"] == "island_lost")
    assert lost["how"] in ("frozen", "died", "failed") and "eu-0" in lost["reason"]
    assert not [event for event in events(folder, "island_lost") if event["island"] == "us-0"]
    assert not events(folder, "anchor_shard_lost"), "the anchor lives in the driver's region"


def test_every_block_is_credited_once_though_a_region_went_on_by_itself(cut):
    folder, _ = cut
    (ledger,) = manifest(folder)["ledger"].values()
    ((start, stop),) = ledger["credited"]
    contributed = [len(event["islands"]) for event in events(folder, "round_committed")]
    assert (start, stop) == (0, 16 * 2 * sum(contributed))
    commits = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert [line["version"] for line in commits] == list(range(1, len(contributed) + 1))
    assert json.loads((folder / "summary.json").read_text())["tokens_committed"] == 32 * stop
