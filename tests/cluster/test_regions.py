"""Two regions and the link between them: it is cut while they train, and a run comes over it as a job.

Real sockets, real TCP.  The laboratory is ../shared/wanlab beside this repository; it needs root and network
namespaces.
"""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from cluster_runs import MICRO, Tape, events, lines, manifest, seen, write_corpus
from regions import DASHBOARD, PORT, RAY, ROOT, lacking, regions

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
        status = run.wait(60)
    # One laboratory at a time.
    return folder, status


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


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """Two regions that speak TLS and ask for a token, with a dashboard."""
    root = tmp_path_factory.mktemp("sealed")
    (root / "lab.yaml").write_text(json.dumps(LAB))
    (root / "token").write_text("0123456789abcdef" * 4)
    for words in (["ca"], ["node", "10.77.1.1", "10.77.2.1", "127.0.0.1"]):
        made = [str(ROOT / "jobs/certificates.sh"), *words]
        subprocess.run(made, env=os.environ | {"TLS": str(root / "tls")}, check=True, capture_output=True)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(root / "token"),
        "TLS": str(root / "tls/nodes/10.77.1.1"),
        # A job runs in the code that it brings.
        "PYTHONPATH": "",
        "RAY_worker_niceness": "0",
    }
    with regions(root / "lab.yaml", environment=environment, dashboard=True) as lab:
        yield lab, root


@pytest.mark.parametrize(
    "credentials, number", [({"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "f" * 64}, 601), ({"TLS": "/nowhere"}, 602)]
)
def test_a_machine_without_the_clusters_credentials_is_told_so_before_it_joins(sealed, credentials, number):
    lab, _ = sealed
    head = next(iter(lab.addresses.values()))
    join = [str(ROOT / "jobs/join.sh"), head, "eu"]
    done = lab.run("eu", *join, env=credentials | {"RAY": RAY, "GCS_PORT": str(PORT), "BASE_PORT": "21000"})
    assert (done.returncode, f"join.sh: RD-{number}" in done.stderr) == (2, True), done.stderr


def test_a_run_that_comes_as_a_job_is_stopped_and_goes_on_from_its_commit(sealed):
    lab, root = sealed
    settings = {
        "run.name": "far",
        "model": "tiny",
        "model.config.hidden_size": 40,
        "model.config.num_hidden_layers": 1,
        "data": "text",
        "data.path": write_corpus(root / "corpus.txt", 4000),
        "data.cache": root / "cache",
        "data.sequence_length": 32,
        "islands.regions": "{eu: 1}",
        "inner.H": 4,
        "inner.micro_batch": 2,
        "evaluate.every": 0,
        "evaluate.blocks": 1,
        "export.enabled": "false",
    }
    chosen = [f"{key}={value}" for key, value in settings.items()]
    dashboard = f"http://{next(iter(lab.addresses.values()))}:{DASHBOARD}"
    user, folder = {"RAY_ADDRESS": dashboard, "RUNS": str(root / "runs")}, root / "runs" / "far"

    def job(name, *words):
        done = lab.run("eu", str(ROOT / "jobs" / name), *words, env=user)
        return done.returncode, done.stdout

    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = lab.popen("eu", str(ROOT / "jobs/train.sh"), *chosen, "run.rounds=100000", env=user, **both)
    Tape(folder).wait(seen("round_committed", 2, islands=["eu-0"]), lambda: run.poll() is None)
    code, said = job("status.sh", "far")
    assert code == 0 and re.search(r"of 100000, .*\n  eu-0 .* in eu\n$", said), said
    assert job("stop.sh", "far")[0] == 0
    output, _ = run.communicate(timeout=60)
    # Ray calls a job failed that leaves with 130.
    assert run.returncode == 1 and "the same command goes on from here" in output, output
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["status"] == "stopped" and manifest(folder)["round"] == stopped["rounds"]
    code, said = job("train.sh", *chosen, f"run.rounds={stopped['rounds'] + 2}")
    assert code == 0 and f"far finished: {stopped['rounds'] + 2} rounds" in said, said
    (resumed,) = events(folder, "run_resumed")
    assert resumed["round"] == stopped["rounds"]
    (ledger,) = manifest(folder)["ledger"].values()
    assert ledger["credited"] == [[0, 4 * 2 * (stopped["rounds"] + 2)]]
