"""A round of torchft's DiLoCo, as a peer of ours; for machines where torchft (or torchft-nightly) is installed."""

from __future__ import annotations

import importlib.util
import time
from datetime import timedelta
from typing import Any

import torch

INSTALLED = importlib.util.find_spec("torchft") is not None
TIMEOUT = timedelta(seconds=60)


def lighthouse(replicas: int) -> tuple[Any, str]:
    """The server that torchft's replicas meet at, and its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=replicas, join_timeout_ms=1000)
    return server, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"


class TorchftPeer:
    """One replica; its inner step is adding a constant."""

    def __init__(self, numel: int, rank: int, world: int, step: float) -> None:
        torch.set_num_threads(1)
        self.numel, self.rank, self.world, self.step = numel, rank, world, step

    def join(self, address: str) -> None:
        from torch.distributed import TCPStore
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.model = torch.nn.Module()
        self.model.theta = torch.nn.Parameter(torch.zeros(self.numel))
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.model.load_state_dict,
            state_dict=self.model.state_dict,
            min_replica_size=self.world,
            use_async_quorum=False,
            timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=address,
            replica_id=f"replica-{self.rank}",
            hostname="127.0.0.1",
        )
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(self.manager, [self.model], self.inner, outer, sync_every=1)
        self.diloco.__enter__()

    @torch.no_grad()
    def round(self) -> tuple[float, float, float]:
        """The parameters, and the times when training and the round ended."""
        self.model.theta.sub_(self.step)
        began = time.perf_counter()
        with torch.enable_grad():
            # Without gradients the inner step does nothing; DiLoCo's hook behind it synchronises.
            self.inner.step()
        return float(self.model.theta[0]), began, time.perf_counter()
