"""The environment of a rank, set before torch is imported in its process.

Thread counts, the allocator and DeepSpeed's choice of accelerator are read once, at import; a Ray actor gets these
as its `runtime_env`.  Source: measurements on CPU (spinning threads made steps 10 times longer, page faults of large
temporaries up to 1.6 times); DeepSpeed falls back to MPI discovery when one of the five rendezvous variables is
missing.  `LOCAL_SIZE` must stay unset: with it DeepSpeed compiles an op for 45 s that is not used here.
"""

from __future__ import annotations

import ipaddress

# Keep large temporaries in the heap between steps: no page faults for each of them.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(8 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


def rank_environment(
    rank: int, world: int, *, threads: int = 1, host: str = "127.0.0.1", accelerator: str = "cpu"
) -> dict[str, str]:
    """Variables of one rank's process.

    Args:
      rank: position in the island, from 0.
      world: ranks of the island.
      threads: CPU threads of this rank.
      host: address of rank 0; a loopback address keeps gloo off every other interface.
      accelerator: `cpu` or `cuda`.
    """
    environment = {
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
    if is_loopback(host):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def rendezvous_environment(host: str, port: int) -> dict[str, str]:
    """Variables that are known only when rank 0 has opened its store."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
