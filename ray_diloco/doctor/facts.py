"""What a machine is: versions, room, compilers, accelerators, addresses, TCP settings, its clock.

Gathered by one call in a fraction of a second, and plain enough to travel from a node to whoever compares nodes.
Versions come from package metadata; only torch is imported, and only where accelerators are asked for.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ray_diloco.inner.environment import interface_towards

# A place that a route leads to; nothing is sent there (RFC 5737).
_ELSEWHERE = "192.0.2.1"
_SHM = Path("/dev/shm")
_COMPILERS = ("g++", "gcc", "clang++", "nvcc", "ninja")


@dataclass(frozen=True)
class Addresses:
    """The address of a machine as each thinks of it; empty where it has none.

    Attributes:
      route: of the interface from which other machines are reached.
      host: that its own name resolves to, which gloo takes unless told otherwise.
      ray: of its Ray node.
      gloo_interface: GLOO_SOCKET_IFNAME, and the address of that interface.
      interface: name of the interface of `route`.
    """

    route: str = ""
    host: str = ""
    ray: str = ""
    gloo_interface: str = ""
    gloo: str = ""
    interface: str = ""


@dataclass(frozen=True)
class Tcp:
    """Most bytes in flight that the kernel lets one connection have, each way; 0: not known."""

    receive_bytes: int = 0
    send_bytes: int = 0
    congestion: str = ""


@dataclass(frozen=True)
class Facts:
    """A machine.

    Attributes:
      node: its name here.
      region: of its Ray node; empty without one.
      python: version; packages: versions by name, None where one is not installed.
      compilers: paths by name, of those that are there.
      cpus, memory_free: processors and bytes.
      disk_free: bytes by path; None where the path cannot be looked at.
      shm_free: bytes of /dev/shm; None where there is none.
      gpus: names that torch sees; None: nobody asked.
      clock: unix seconds when the facts were gathered.
    """

    node: str
    region: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    compilers: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 0
    memory_free: int = 0
    disk_free: Mapping[str, int | None] = field(default_factory=dict)
    shm_free: int | None = None
    gpus: tuple[str, ...] | None = None
    addresses: Addresses = Addresses()
    tcp: Tcp = Tcp()
    clock: float = 0.0


def gather(
    node: str,
    packages: Iterable[str],
    paths: Iterable[str],
    *,
    gpus: bool = False,
    region: str = "",
    ray: str = "",
    towards: str = _ELSEWHERE,
) -> Facts:
    """The facts of this machine.

    Args:
      node: what to call it.
      packages: whose versions are wanted.
      paths: where room is needed; the nearest folder that exists is looked at.
      gpus: ask torch for accelerators.
      region, ray: region and address of the Ray node of this process.
      towards: address of another machine, to which the route is looked up.
    """
    return Facts(
        node,
        region,
        platform.python_version(),
        {name: _version(name) for name in packages},
        {name: found for name in _COMPILERS if (found := shutil.which(name))},
        _usable_cpus(),
        int(psutil.virtual_memory().available),
        {path: _free(Path(path)) for path in paths},
        _free(_SHM) if _SHM.is_dir() else None,
        _gpus() if gpus else None,
        _addresses(ray, towards),
        _tcp(),
        time.time(),
    )


def _addresses(ray: str, towards: str) -> Addresses:
    route = _own_address(towards)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    of: dict[str, list[Any]] = psutil.net_if_addrs()
    gloo = next((a.address for a in of.get(interface, ()) if a.family == socket.AF_INET), "")
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        host = ""
    return Addresses(route, host, ray, interface, gloo, interface_towards(route) or "" if route else "")


def _own_address(towards: str) -> str:
    """The address that packets to a place would have; empty without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _tcp() -> Tcp:
    sysctl = Path("/proc/sys/net/ipv4")
    return Tcp(_last(sysctl / "tcp_rmem"), _last(sysctl / "tcp_wmem"), _text(sysctl / "tcp_congestion_control"))


def _last(path: Path) -> int:
    words = _text(path).split()
    return int(words[-1]) if words and words[-1].isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _free(path: Path) -> int | None:
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def _gpus() -> tuple[str, ...]:
    import torch

    return tuple(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
