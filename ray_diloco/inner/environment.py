"""The environment of a rank, set before torch is imported in its process.

Thread counts, the allocator and DeepSpeed's choice of accelerator are read once, at import; a Ray actor gets these
as its `runtime_env`.  Source: measurements on CPU (spinning threads made steps 10 times longer, page faults of large
temporaries up to 1.6 times); DeepSpeed falls back to MPI discovery when one of the five rendezvous variables is
missing.  `LOCAL_SIZE` must stay unset: with it DeepSpeed compiles an op for 45 s that is not used here.
"""

from __future__ import annotations

import socket
from typing import Any

import psutil

# Keep large temporaries in the heap between steps: no page faults for each of them; buffers of rounds in huge pages.
_MALLOC = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def rank_environment(rank: int, world: int, *, threads: int = 1, accelerator: str = "cpu") -> dict[str, str]:
    """Variables of one rank's process.

    Args:
      rank: position in the island, from 0.
      world: ranks of the island.
      threads: CPU threads of this rank.
      accelerator: `cpu` or `cuda`.
    """
    return {
        "DS_ACCELERATOR": accelerator,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        # Ray shows a rank its own accelerators only, so it is always the first of those that it sees.
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",
        **_MALLOC,
    }


def rendezvous_environment(host: str, port: int) -> dict[str, str]:
    """Variables that are known only when rank 0 has opened its store; gloo reads them when a group is made.

    gloo otherwise takes the interface that the machine's own name resolves to, which may not lead to the other ranks.
    """
    environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    interface = interface_towards(host)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    return environment


def interface_towards(host: str) -> str | None:
    """Name of the network interface of this machine from which `host` is reached; None if there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only looks up the route.
            probe.connect((host, 9))
        except OSError:
            return None
        own: str = probe.getsockname()[0]
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    return next((name for name, found in interfaces.items() if any(a.address == own for a in found)), None)
