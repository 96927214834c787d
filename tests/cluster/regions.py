"""A Ray cluster of three regions on one machine, over the links of ../shared/wanlab; for a test and for benchmarks.

Each region is a network namespace with a raylet of its own; the head is in the first.  What runs in a namespace was
started here, and all of it is ended with the lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WANLAB = ROOT.parent / "shared" / "wanlab"
LAB = WANLAB / "three-regions.yaml"
CONTROL = "/tmp/wanlab.sock"
PORT, DASHBOARD = 6399, 8265
START_S = 120.0
RAY = str(Path(sys.executable).parent / "ray")
# The router goes before everything else, and raylets until they are up: one whose agents take 15 s to start gives up.
EARLY = ("nice", "-n", "-10")
# As jobs/join.sh has them.
PORTS = {
    "node-manager-port": 20000,
    "object-manager-port": 20001,
    "runtime-env-agent-port": 20002,
    "dashboard-agent-grpc-port": 20003,
    "dashboard-agent-listen-port": 20004,
    "metrics-export-port": 20005,
    "min-worker-port": 20100,
    "max-worker-port": 20999,
}

# See docs/benchmarks.md: room for what is on its way, and no slow start after every pause.
TUNED = {
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 65536 67108864",
    "net.ipv4.tcp_slow_start_after_idle": "0",
}


def lacking() -> str:
    """Why no lab can be started here; empty if one can."""
    if not (WANLAB / "wanlab.py").is_file():
        return f"there is no {WANLAB}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "network namespaces need iproute2 and /dev/net/tun"
    if os.path.exists(CONTROL):
        return "another lab is up on this machine"
    try:
        subprocess.run(["ip", "netns", "add", "wan-try"], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", "wan-try"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made: {getattr(error, 'stderr', error)!r}"
    return ""


class Regions:
    """A lab that is up.

    Attributes:
      addresses: of the regions; the head is in the first.
      folder: for what it leaves on disk while it is up.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self.folder, self._settings = folder, settings
        self._environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY": RAY,
            "GCS_PORT": str(PORT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "10",
            # As in cluster.yaml and jobs/join.sh.
            "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
            "REPORTER_UPDATE_INTERVAL_MS": "60000",
            **environment,
        }
        self._environment.pop("RAY_ADDRESS", None)
        self.addresses: dict[str, str] = {}
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def head(self) -> str:
        """Address of the cluster."""
        return f"{next(iter(self.addresses.values()))}:{PORT}"

    def up(self, lab: Path) -> None:
        """Starts the router and sets the namespaces' networks up."""
        router = subprocess.Popen(
            [*EARLY, sys.executable, str(WANLAB / "wanlab.py"), "up", str(lab)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _early(router.pid)
        self._processes.append(router)
        assert router.stdout is not None
        self.addresses = json.loads(router.stdout.readline())
        for region in self.addresses:
            for name, value in self._settings.items():
                subprocess.run([*_inside(region), "sysctl", "-qw", f"{name}={value}"], check=True)

    def start(self, *, dashboard: bool, cpus: int = 1, store_mb: int = 512) -> None:
        """Starts Ray in each region."""
        common = [f"--num-cpus={cpus}", f"--object-store-memory={store_mb * 10**6}"]
        (first, address), *others = self.addresses.items()
        served = [f"--dashboard-host={address}", f"--dashboard-port={DASHBOARD}"] if dashboard else []
        self._process(first, [
            str(ROOT / "jobs" / "with_tls.sh"), RAY, "start", "--head", "--block", f"--port={PORT}",
            f"--node-ip-address={address}", *common, *served,
            f"--include-dashboard={dashboard}", f"--labels=ray.io/availability-region={first}",
            f"--temp-dir={self.folder}/{first}", "--disable-usage-stats", *(f"--{k}={v}" for k, v in PORTS.items()),
        ])  # fmt: skip
        # Whoever asks before the head's own node is there gives up.
        _await(lambda: self._started(first), "the head did not start")
        for region, _ in others:
            # Nodes that start at the same time would take the same name for a socket in the same folder.
            own = [region, *common, f"--temp-dir={self.folder}/{region}"]
            self._process(region, [str(ROOT / "jobs" / "join.sh"), address, *own])
        _await(lambda: all(map(self._started, self.addresses)), "not all regions have joined")
        for process in self._processes[1:]:
            _early(process.pid, 0)
        if dashboard:
            _await(lambda: self._listens(first, address, DASHBOARD), "the dashboard does not listen")

    def _process(self, region: str, command: Sequence[str]) -> None:
        with (self.folder / f"{region}.log").open("w") as log:
            process = subprocess.Popen(
                [*EARLY, *_inside(region), *command],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        _early(process.pid)
        self._processes.append(process)

    def popen(self, region: str, *command: str, **more: Any) -> subprocess.Popen[str]:
        """A process in a region."""
        environment = {**self._environment, **more.pop("env", {})}
        return subprocess.Popen([*_inside(region), *command], env=environment, text=True, cwd=ROOT, **more)

    def run(self, region: str, *command: str, timeout_s: float = 600, **more: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command in a region to its end."""
        environment = {**self._environment, **more.pop("env", {})}
        return subprocess.run(
            [*_inside(region), *command],
            env=environment,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            cwd=ROOT,
            **more,
        )

    def say(self, *words: str) -> dict[str, Any]:
        """`cut`, `heal`, `isolate`, `rejoin` or `stats`: what each link has carried."""
        own = f"{self.folder}/asks-{threading.get_ident()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:
            asks.bind(own)
            asks.settimeout(10)
            asks.sendto(json.dumps(words).encode(), CONTROL)
            found: dict[str, Any] = json.loads(asks.recv(65536))
        os.unlink(own)
        return found

    def carried(self) -> dict[str, int]:
        """Bytes that each direction of each link has carried, headers of TCP and IP included."""
        return {link: state["bytes"] for link, state in self.say("stats").items()}

    def down(self) -> None:
        """Ends whatever runs in the regions, then the router."""
        router, *others = self._processes
        for process in others:
            process.terminate()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 5
            while (left := self._left()) and time.monotonic() < end:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, sign)
                threading.Event().wait(0.1)
        for process in others:
            process.wait(10)
        router.terminate()
        router.wait(10)

    def _left(self) -> list[int]:
        found = [
            subprocess.run(["ip", "netns", "pids", f"wan-{r}"], capture_output=True, text=True) for r in self.addresses
        ]
        return [int(pid) for one in found for pid in one.stdout.split()]

    def _listens(self, region: str, address: str, port: int) -> bool:
        code = f"import socket; socket.create_connection(({address!r}, {port}), 2).close()"
        return self.run(region, sys.executable, "-c", code).returncode == 0

    def _started(self, region: str) -> bool:
        text = (self.folder / f"{region}.log").read_text()
        assert "Exception" not in text, text[-2000:]
        return "Ray runtime started" in text


@contextlib.contextmanager
def regions(
    lab: Path = LAB,
    settings: Mapping[str, str] = TUNED,
    environment: Mapping[str, str] | None = None,
    *,
    ray: bool = True,
    **more: Any,
) -> Iterator[Regions]:
    """A lab for the length of the block; with `ray`, a cluster in it."""
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        found = Regions(Path(folder), settings, environment or {})
        try:
            found.up(lab)
            if ray:
                found.start(**{"dashboard": False, **more})
            yield found
        finally:
            found.down()


def _inside(region: str) -> list[str]:
    return ["ip", "netns", "exec", f"wan-{region}"]


def _early(pid: int, nice: int = -10) -> None:
    """Lets a session go before others where the kernel shares out time by session."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def _await(wanted: Any, otherwise: str) -> None:
    end, tick = time.monotonic() + START_S, threading.Event()
    while not wanted():
        assert time.monotonic() < end, f"{otherwise} within {START_S:g} s"
        tick.wait(0.2)
