"""The process group of an island, and what DeepSpeed must be told before it is asked for one.

Rank 0 opens the store on a port that the kernel picks and publishes it: a port picked first and bound later can be
taken by someone else in between.  Every group has a time-out, also those that DeepSpeed makes by itself, since a frozen
peer would hold the others for 30 minutes.  Source: ../shared/ray-and-deepspeed.md Part 2 §5.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from ray_diloco.errors import MeetingError
from ray_diloco.inner.environment import rendezvous_environment


def open_store(host: str, timeout_s: float) -> TCPStore:
    """Opens the island's store in rank 0's process; its `port` is what the other ranks need."""
    return TCPStore(host, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(
    rank: int,
    world: int,
    host: str,
    port: int,
    timeout_s: float,
    *,
    backend: str = "gloo",
    store: Store | None = None,
) -> None:
    """Joins the island's process group, once per process.

    Args:
      rank: position in the island, from 0.
      world: ranks of the island; one rank needs neither store nor port.
      host: address of rank 0.
      port: port of its store.
      timeout_s: seconds that ranks wait for one another, here and in every collective.
      backend: `gloo` or `nccl`.
      store: the store that this process opened (rank 0).

    Raises:
      MeetingError: RD-740, not all ranks came in time.
    """
    timeout = timedelta(seconds=timeout_s)
    variables = rendezvous_environment(host, port)
    chosen = {"GLOO_SOCKET_IFNAME"} & os.environ.keys()
    os.environ.update({name: value for name, value in variables.items() if name not in chosen})
    try:
        if store is None:
            store = HashStore() if world == 1 else TCPStore(host, port, None, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except RuntimeError as error:
        raise MeetingError(
            740,
            f"rank {rank} of {world} could not join its island at {host}:{port} within {timeout_s:g} s: {error}",
            "see whether the other ranks started, and whether this address is reachable from all of them",
        ) from error
    _introduce_deepspeed(backend)


def leave() -> None:
    """Leaves the process group; a new one, of any size, can be joined afterwards."""
    if dist.is_initialized():
        import deepspeed.comm

        deepspeed.comm.destroy_process_group()


def limit_waits(timeout_s: float) -> None:
    """Gives every process group of this process the time-out `timeout_s` (seconds)."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def _introduce_deepspeed(backend: str) -> None:
    # For a process that was not started with `rank_environment`.
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if backend == "gloo" else "cuda")
    import deepspeed.ops

    if backend == "gloo":
        # Without this a shared-memory op is compiled for 45 s and then not used.
        deepspeed.ops.__compatible_ops__ = {}
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)
