"""The scripts in jobs/ and cluster.yaml: what they hand to Ray, read from a stand-in for the `ray` command."""

import json
import os
import re
import socket
import stat
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def ray(tmp_path: Path) -> Path:
    """A `ray` command that writes down its arguments and the settings in its environment."""
    command = tmp_path / "ray"
    command.write_text(
        f"#!/usr/bin/env bash\nprintf '%s\\0' \"$@\" >{tmp_path}/arguments\nenv | grep ^RAY_ >{tmp_path}/environment\n"
    )
    command.chmod(0o755)
    return command


class Open(BaseHTTPRequestHandler):
    """Answers like the dashboard of a cluster that lets everybody in."""

    code = 200

    def do_GET(self) -> None:
        self.send_response(self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Closed(Open):
    """One that asks for a token."""

    code = 401


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def dashboard() -> Iterator[str]:
    with answering(Open) as address:
        yield address


@pytest.fixture
def closed_dashboard() -> Iterator[str]:
    with answering(Closed) as address:
        yield address


def run(script: str, *arguments: str, ray: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [str(ROOT / "jobs" / script), *arguments],
        env={**plain, "RAY": str(ray), "HOME": str(ray.parent), **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )


def handed_over(ray: Path) -> list[str]:
    return (ray.parent / "arguments").read_text().split("\0")[:-1]


def options(arguments: list[str]) -> dict[str, str]:
    """`--name value` and `--name=value` alike."""
    return dict(re.findall(r"--([\w-]+)[ =]([^\s-]\S*)", " ".join(arguments)))


def write_token(ray: Path) -> None:
    (ray.parent / ".ray").mkdir()
    (ray.parent / ".ray" / "auth_token").write_text("secret")


def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


def test_a_run_is_submitted_with_its_arguments_untouched(ray: Path, dashboard: str) -> None:
    done = run("train.sh", "run.name=a b", "islands.names=[eu,us]", ray=ray, RAY_ADDRESS=dashboard)
    assert done.returncode == 0, done.stderr
    arguments = handed_over(ray)
    assert arguments[:4] == ["job", "submit", "--address", dashboard]
    command = ["ray-diloco", "train", "ray.address=auto", "run.root=~/ray_diloco/runs"]
    assert arguments[arguments.index("--") + 1 :] == [*command, "run.name=a b", "islands.names=[eu,us]"]
    name = arguments[arguments.index("--submission-id") + 1]
    assert re.fullmatch(r"a-b-[-0-9]+", name) and f"jobs/job.sh logs -f {name}\n" in done.stdout
    assert "RAY_AUTH_MODE=token" not in (ray.parent / "environment").read_text()


def test_a_sweep_is_submitted_like_a_run(ray: Path, dashboard: str) -> None:
    done = run("sweep.sh", "sweep=outer", "sweep.trials=9", ray=ray, RAY_ADDRESS=dashboard, FOLLOW="no")
    assert done.returncode == 0, done.stderr
    arguments = handed_over(ray)
    assert "--no-wait" in arguments
    command = ["ray-diloco", "tune", "ray.address=auto", "run.root=~/ray_diloco/runs", "sweep=outer", "sweep.trials=9"]
    assert arguments[arguments.index("--") + 1 :] == command


def test_the_upload_is_small_and_its_size_is_said(ray: Path, dashboard: str, tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    done = run("train.sh", ray=ray, RAY_ADDRESS=dashboard)
    kib = re.search(r"uploading at most (\d+) KiB", done.stdout)
    assert kib is not None and 50 < int(kib[1]) < 5_000
    arguments = handed_over(ray)
    excluded = json.loads(arguments[arguments.index("--runtime-env-json") + 1])["excludes"]
    # What Ray makes of that.
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=excluded)
    names = set(zipfile.ZipFile(package).namelist())
    assert {"ray_diloco/cli.py", "conf/config.yaml", "pyproject.toml"} <= names
    assert {name.split("/")[0] for name in names} & {".git", ".venv", "runs", "tests", "docs", "wandb"} == set()
    assert package.stat().st_size < 1024 * int(kib[1])


def test_a_submission_can_return_at_once(ray: Path, dashboard: str) -> None:
    run("train.sh", ray=ray, RAY_ADDRESS=dashboard, FOLLOW="no", RUNS="/data/runs", PASS="MINE", MINE="a 'b'")
    runtime = handed_over(ray)[handed_over(ray).index("--runtime-env-json") + 1]
    assert json.loads(runtime)["env_vars"] == {"MINE": "a 'b'"}
    assert "--no-wait" in handed_over(ray) and "run.root=/data/runs" in handed_over(ray)


def test_a_cluster_that_asks_for_a_token_is_shown_it(ray: Path, closed_dashboard: str) -> None:
    done = run("train.sh", ray=ray, RAY_ADDRESS=closed_dashboard)
    assert done.returncode == 2
    assert "the cluster asks for its token" in done.stderr and not (ray.parent / "arguments").exists()
    write_token(ray)
    assert run("train.sh", ray=ray, RAY_ADDRESS=closed_dashboard).returncode == 0
    assert "RAY_AUTH_MODE=token" in (ray.parent / "environment").read_text().splitlines()


# A run that has ended has left its tape in the folder of all runs.
@pytest.mark.parametrize(
    "name, more", [("status", ["--root", "~/ray_diloco/runs"]), ("stop", []), ("scale", []), ("drain", [])]
)
def test_a_run_is_spoken_to_through_the_dashboard(ray: Path, dashboard: str, name: str, more: list[str]) -> None:
    done = run(f"{name}.sh", "far", "eu=2", ray=ray, RAY_ADDRESS=dashboard)
    assert done.returncode == 0, done.stderr
    arguments = handed_over(ray)
    assert arguments[arguments.index("--") + 1 :] == ["ray-diloco", name, *more, "far", "eu=2"]
    assert arguments[arguments.index("--working-dir") + 1] == "."
    done = run(f"{name}.sh", ray=ray, RAY_ADDRESS=dashboard)
    assert (done.returncode, "the run's name is missing" in done.stderr) == (2, True)


def test_what_a_run_answers_is_printed_once_and_without_the_words_of_ray(ray: Path, dashboard: str) -> None:
    answer = "RD-205: no run named 'far' is under way\n  mend: see that it runs\n"
    at = "2026-11-30 13:47:07,188\t"
    # As Ray 2.60 prints the log of a job that fails.
    said = [f"{at}INFO cli.py:351 -- Tailing logs\n", "Running entrypoint for job raysubmit_1: ray-diloco\n", answer]
    said += [
        f"{at}ERR cli.py:75 -- Job 'raysubmit_1' failed\n",
        f"{at}INFO cli.py:89 -- Status message: Job entrypoint ",
    ]
    said += ["command failed with exit code 4, last available logs (truncated to 20,000 chars):\n", answer]
    (ray.parent / "said").write_text("".join(said))
    ray.write_text(f"#!/usr/bin/env bash\ncat {ray.parent}/said\nexit 1\n")
    done = run("status.sh", "far", ray=ray, RAY_ADDRESS=dashboard)
    assert (done.returncode, done.stdout) == (1, answer)


def test_the_job_itself_is_asked_with_the_token_of_the_cluster(ray: Path, closed_dashboard: str) -> None:
    write_token(ray)
    done = run("job.sh", "logs", "-f", "far-1", ray=ray, RAY_ADDRESS=closed_dashboard)
    assert done.returncode == 0, done.stderr
    assert handed_over(ray) == ["job", "logs", "--address", closed_dashboard, "-f", "far-1"]
    assert "RAY_AUTH_MODE=token" in (ray.parent / "environment").read_text().splitlines()
    assert run("job.sh", ray=ray, RAY_ADDRESS=closed_dashboard).returncode == 2


def test_a_cluster_that_does_not_answer_is_named(ray: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = f"http://127.0.0.1:{server.getsockname()[1]}"
    done = run("train.sh", ray=ray, RAY_ADDRESS=free)
    assert done.returncode == 2
    assert f"nobody answers at RAY_ADDRESS={free}" in done.stderr


def test_a_machine_joins_with_its_region_its_own_address_and_fixed_ports(ray: Path) -> None:
    write_token(ray)
    done = run("join.sh", "127.0.0.1", "eu-west", "--num-gpus", "2", ray=ray)
    assert done.returncode == 0, done.stderr
    given = options(handed_over(ray))
    expected = {
        "address": "127.0.0.1:6379",
        "node-ip-address": "127.0.0.1",
        "labels": "ray.io/availability-region=eu-west",
        "num-gpus": "2",
    }
    assert {name: given[name] for name in expected} == expected
    assert "RAY_AUTH_MODE=token" in (ray.parent / "environment").read_text().splitlines()


def test_a_machine_without_a_region_takes_its_labels_file(ray: Path, tmp_path: Path) -> None:
    write_token(ray)
    labels = tmp_path / "labels.yaml"
    labels.write_text("ray.io/availability-region: eu-west\n")
    run("join.sh", "127.0.0.1", ray=ray, LABELS=str(labels))
    assert options(handed_over(ray))["labels-file"] == str(labels)


def test_a_machine_with_a_certificate_speaks_tls(ray: Path) -> None:
    write_token(ray)
    tls = ray.parent / ".ray" / "tls"
    made = [run("certificates.sh", *words, ray=ray) for words in (["ca"], ["node", "192.0.2.7", "far.example"])]
    assert [done.returncode for done in made] == [0, 0], made
    files = tls / "nodes" / "192.0.2.7"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.iterdir()} == dict.fromkeys(
        ["ca.crt", "node.crt", "node.key"], 0o600
    )
    checked = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_ip", "192.0.2.7", "-verify_hostname", "far.example"]
    subprocess.run([*checked, "node.crt"], cwd=files, check=True, capture_output=True, timeout=60)
    run("join.sh", "127.0.0.1", "eu", ray=ray)
    assert "RAY_USE_TLS" not in (ray.parent / "environment").read_text(), "the authority's own machine has none"
    run("join.sh", "127.0.0.1", "eu", ray=ray, TLS=str(files))
    settings = (ray.parent / "environment").read_text().splitlines()
    assert {"RAY_USE_TLS=1", f"RAY_TLS_SERVER_KEY={files}/node.key", f"RAY_TLS_CA_CERT={files}/ca.crt"} <= set(settings)
    again = run("certificates.sh", "ca", ray=ray)
    assert (again.returncode, "there is an authority" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    "arguments, settings, word",
    [
        ([], {}, "head's address is missing"),
        (["127.0.0.1"], {"LABELS": "/nowhere/labels.yaml"}, "no labels in /nowhere/labels.yaml"),
        (["127.0.0.1", "eu"], {}, "no cluster token"),
        (["no.such.host.invalid", "eu"], {"RAY_AUTH_MODE": "disabled"}, "no route to no.such.host.invalid"),
    ],
)
def test_joining_says_what_is_missing(ray: Path, arguments: list[str], settings: dict[str, str], word: str) -> None:
    done = run("join.sh", *arguments, ray=ray, **settings)
    assert done.returncode == 2
    assert word in done.stderr
    assert not (ray.parent / "arguments").exists()


def test_the_cluster_file_passes_rays_own_check() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(cluster())
    validate_config(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_cluster_file_mounts_what_exists() -> None:
    local = [path for path in cluster()["file_mounts"].values() if not path.startswith("~")]
    assert local and all((ROOT / path).exists() for path in local)


def test_head_and_joining_machines_use_the_same_ports_outside_those_that_ray_deals_out(ray: Path) -> None:
    write_token(ray)
    run("join.sh", "127.0.0.1", "eu", ray=ray)
    worker, head = options(handed_over(ray)), options(cluster()["head_start_ray_commands"])
    shared = {name for name in worker if name.endswith("-port")}
    assert len(shared) == 8
    assert {name: head[name] for name in shared} == {name: worker[name] for name in shared}
    ports = [int(value) for name, value in head.items() if name.endswith("port")]
    assert len(set(ports)) == len(ports) == 11
    assert not [port for port in ports if 10002 <= port <= 19999]
    assert worker["address"].endswith(f":{head['port']}")


def test_the_kubernetes_cluster_lets_in_who_has_the_token_and_holds_together() -> None:
    ray_cluster, *others = yaml.safe_load_all((ROOT / "jobs/kuberay.yaml").read_text())
    assert (ray_cluster["apiVersion"], ray_cluster["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [ray_cluster["spec"]["headGroupSpec"], *ray_cluster["spec"]["workerGroupSpecs"]]
    claims = {other["metadata"]["name"] for other in others if other["kind"] == "PersistentVolumeClaim"}
    used = set()
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        env = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
        assert env["RAY_AUTH_MODE"] == "token" and "secretKeyRef" in env["RAY_AUTH_TOKEN"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        used |= {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert used == claims
    assert all(
        "RAY_NODE_REGION" in {e["name"] for e in g["template"]["spec"]["containers"][0]["env"]} for g in groups[1:]
    )
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == ray_cluster["spec"]["rayVersion"]
    policy = next(other for other in others if other["kind"] == "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"]["ray.io/cluster"] == ray_cluster["metadata"]["name"]


def test_the_cluster_file_stops_no_ray_but_its_own() -> None:
    commands = cluster()["head_start_ray_commands"] + cluster()["worker_start_ray_commands"]
    assert not [command for command in commands if "ray stop" in command]
    assert sum("RAY_AUTH_MODE=token" in command for command in cluster()["head_start_ray_commands"]) == 1


def test_the_first_run_hands_its_settings_to_train(tmp_path: Path, ray: Path) -> None:
    script = [str(ROOT / "jobs/quickstart_cpu.sh"), "run.rounds=3"]
    done = subprocess.run(script, cwd=tmp_path, env=os.environ | {"RAY_DILOCO": str(ray)}, timeout=60)
    handed = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert done.returncode == 0 and handed == ["train", "experiment=demo", "run.rounds=3"]
    lacking = subprocess.run(
        script, env=os.environ | {"RAY_DILOCO": "no-such-command"}, capture_output=True, text=True, timeout=60
    )
    assert lacking.returncode == 2 and "make venv" in lacking.stderr
