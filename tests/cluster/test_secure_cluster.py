"""A cluster that speaks TLS and asks for a token: who is let in, with the certificates of jobs/certificates.sh."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from ray_diloco.cluster.credentials import credentials
from ray_diloco.errors import SecurityError

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SMALL = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
SMALL += ["--min-worker-port=0", "--max-worker-port=0"]
DEADLINE_S = 240


def certificates(folder, *words):
    script = [str(ROOT / "jobs/certificates.sh"), *words]
    subprocess.run(script, env=os.environ | {"TLS": str(folder)}, check=True, capture_output=True, timeout=60)


def node_of(folder):
    """The variables of a machine with a certificate of the authority in a folder."""
    certificates(folder, "ca")
    # Ray takes an address of the machine for that of the loopback.
    own = [each.address for card in psutil.net_if_addrs().values() for each in card if each.family == socket.AF_INET]
    certificates(folder, "node", "127.0.0.1", *own)
    files = {"CA_CERT": "ca.crt", "SERVER_CERT": "node.crt", "SERVER_KEY": "node.key"}
    named = {f"RAY_TLS_{name}": str(folder / "nodes/127.0.0.1" / file) for name, file in files.items()}
    return named | {"RAY_USE_TLS": "1", "RAY_AUTH_MODE": "token"}


def begun(arguments, settings, output):
    with output.open("w") as file:
        return subprocess.Popen(
            [*RAY, "start", *arguments, *SMALL], env=os.environ | settings, stdout=file, stderr=subprocess.STDOUT
        )


def said(process, output, pattern):
    tick = threading.Event()
    while not (found := re.search(pattern, output.read_text())):
        assert process.poll() is None, output.read_text()
        tick.wait(0.05)
    return found


def test_a_cluster_lets_in_who_has_certificate_and_token_and_nobody_else(tmp_path, monkeypatch):
    ours, foreign = node_of(tmp_path / "ours"), node_of(tmp_path / "foreign")
    processes, temp = [], tempfile.mkdtemp(prefix="rd-", dir="/tmp")

    def node(name, settings, *arguments):
        processes.append(begun(arguments, settings, tmp_path / name))
        return processes[-1]

    try:
        # Nobody uses Ray Client here, and it takes no port from the kernel.
        with socket.create_server(("127.0.0.1", 0)) as server:
            unused = f"--ray-client-server-port={server.getsockname()[1]}"
        head = ["--head", "--port=0", f"--temp-dir={temp}", "--include-dashboard=false", unused]
        process = node("head", ours, *head)
        address = said(process, tmp_path / "head", r"--address='([\d.]+:\d+)'")[1]
        # Ray goes on trying for a minute or two.
        node("stranger", {"RAY_AUTH_TOKEN": "0" * 64} | ours, f"--address={address}")
        node("plain", {"RAY_AUTH_MODE": "token"}, f"--address={address}")
        member = node("member", ours, f"--address={address}")
        said(member, tmp_path / "member", "Ray runtime started")

        for name, number, settings in (
            ("without TLS", 602, {"RAY_USE_TLS": "0"}),
            ("with a certificate of another authority", 602, foreign),
            ("with another token", 601, ours | {"RAY_AUTH_TOKEN": "0" * 64}),
            ("without a token", 601, ours | {"RAY_AUTH_MODE": "disabled"}),
        ):
            with monkeypatch.context() as patch:
                for key, value in settings.items():
                    patch.setenv(key, value)
                with pytest.raises(SecurityError) as error, credentials(address):
                    pass
            assert error.value.number == number, name

        look = (
            "import ray; from ray_diloco.cluster.session import joined\n"
            f"with joined({address!r}):\n"
            "    print(len(ray.nodes()), ray.get(ray.remote(lambda x: x + 1).remote(ray.put(1))))\n"
        )
        client = [sys.executable, "-c", look]
        done = subprocess.run(client, env=os.environ | ours, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stdout) == (0, "2 2\n"), done.stderr
        assert not [name for name in ("stranger", "plain") if "Ray runtime started" in (tmp_path / name).read_text()]
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(DEADLINE_S)
        shutil.rmtree(temp, ignore_errors=True)
