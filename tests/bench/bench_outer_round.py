"""One outer round among islands on this machine: pseudo-gradient → merge → Nesterov → parameters back everywhere.

Ours is the product's own path (rank actors, anchor shards, object store) without inner training; the peer is the same
in torch: gloo all-reduce of `B − θ` among as many processes, then torch.optim.SGD(nesterov) in each; where torchft is
installed, its DiLoCo is the third.  `--bare` adds the least that a round takes in Ray (`bare_peer.py`).  A round lasts
from when the last island has trained until the last one has its new parameters, by their own clocks, which on one
machine are one.  All run in one process tree, interleaved, one thread per process; medians of `--rounds`.

    python tests/bench/bench_outer_round.py --parameters 100 --islands 2 4
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from typing import Any

import numpy as np
import psutil
import ray
import torch
from bare_peer import BarePeer
from torchft_peer import INSTALLED, TorchftPeer, lighthouse

from ray_diloco.blocks import channels_of, shard_count
from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.anchor_settings import AnchorSettings
from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.credentials import credentials
from ray_diloco.cluster.exchanges import Exchanges
from ray_diloco.cluster.island import FleetSettings, RayIsland
from ray_diloco.cluster.local_ray import LOCAL_RAY
from ray_diloco.cluster.misfortune import NO_FAULTS
from ray_diloco.cluster.rank import THREADS, Rank
from ray_diloco.config.compose import compose
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.inner.environment import rank_environment
from ray_diloco.outer.exchange import Slice
from ray_diloco.outer.layout import Layout, layout_of
from ray_diloco.rounds.ports import SHARED, Lease, Movement, Offer, Report, Step, Work

STEP = 1e-3
# How long training lasts at least: the call to emit, which a run makes with the one to train, waits behind it then.
TRAINING_S = 0.02


def model_layout(millions: float) -> Layout:
    """Tensors of a Llama-like model of about so many million parameters: an embedding of a fifth, square matrices."""
    total = int(millions * 1e6)
    width = 1024 if millions >= 20 else 128
    rows = max(1, total // 5 // width)
    shapes = [("embed", (rows, width))]
    left = total - rows * width
    k = 0
    while left > 0:
        height = min(width, max(1, left // width))
        shapes.append((f"layer.{k}", (height, width)))
        left -= height * width
        k += 1
    return layout_of(shapes)


class _Inner:
    """What `Rank` needs of an inner rank: parameters in one flat buffer."""

    def __init__(self, layout: Layout, rank: int) -> None:
        from types import SimpleNamespace

        self.layout, self.mix, self.correction, self.rate_sum = layout, None, None, 0.0
        self.settings = SimpleNamespace(inner=SimpleNamespace(mix=0.0, correction="none"), island="")
        self.theta = torch.zeros(layout.numel)
        self.slices = (Slice(layout.whole[0], self.theta),)
        self.emits = layout.whole

    def commit_writes(self) -> None:
        pass


class BenchRank(Rank):
    """A rank whose training is adding a constant."""

    def __init__(self, layout: Layout, island: str, channels: tuple) -> None:
        from types import SimpleNamespace

        torch.set_num_threads(1)
        settings = SimpleNamespace(island=island)
        job = SimpleNamespace(settings=settings, folders=(), faults=NO_FAULTS, incarnation=0, orphan_s=0.0)
        super().__init__(job, 0)
        self._inner = _Inner(layout, 0)
        self._exchanges = Exchanges(self._inner, channels)

    def _train(self, *segment: Any) -> Report:
        self._inner.theta.sub_(STEP)
        busy_until = time.perf_counter() + TRAINING_S
        while time.perf_counter() < busy_until:
            pass
        self._trained = time.perf_counter()
        return Report(1, 1, 0.0, TRAINING_S)

    def adopt(self, *arguments: Any) -> None:
        super().adopt(*arguments)
        self._adopted = time.perf_counter()

    def parameter(self) -> float:
        """Of which all are equal."""
        return float(self._inner.theta[0])

    def times(self) -> tuple[float, float]:
        """When training and the adoption ended."""
        return self._trained, self._adopted


class GlooPeer:
    """The same round with torch alone."""

    def __init__(self, numel: int, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.rank, self.world, self.numel = rank, world, numel

    def open(self) -> int:
        from datetime import timedelta

        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(60))
        return self.store.port

    def join(self, port: int) -> None:
        import torch.distributed as dist

        store = self.store if self.rank == 0 else dist.TCPStore("127.0.0.1", port, None, is_master=False)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self.theta = torch.zeros(self.numel)
        self.anchor = torch.nn.Parameter(torch.zeros(self.numel))
        self.anchor.grad = torch.zeros(self.numel)
        self.optimizer = torch.optim.SGD([self.anchor], lr=0.7, momentum=0.9, nesterov=True)

    def round(self) -> tuple[float, float, float]:
        """The parameters, and the times when training and the round ended."""
        import torch.distributed as dist

        self.theta.sub_(STEP)
        began = time.perf_counter()
        torch.sub(self.anchor.data, self.theta, out=self.anchor.grad)
        dist.all_reduce(self.anchor.grad)
        self.anchor.grad.div_(self.world)
        self.optimizer.step()
        self.theta.copy_(self.anchor.data)
        return float(self.theta[0]), began, time.perf_counter()


# Ours and the peers have what a rank of a run has: one thread, large buffers in huge pages.
AS_A_RANK = {"num_cpus": 0, "runtime_env": {"env_vars": rank_environment(0, 1)}}
BenchActor = actor(BenchRank, concurrency_groups=THREADS, **AS_A_RANK)
GlooActor = actor(GlooPeer, **AS_A_RANK)
TorchftActor = actor(TorchftPeer, **AS_A_RANK)


async def _nothing(island: str) -> None:
    return None


def private_bytes() -> int:
    """Memory that only anchor shards and this process (the driver's part) have."""
    shards = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Shard")]
    return sum(p.memory_full_info().uss for p in [*shards, psutil.Process()])


async def ours(
    layout: Layout,
    islands: int,
    codec: str,
    rounds: int,
    others: list[list],
    shards: int,
    bare: BarePeer | None = None,
) -> list[list[float]]:
    """Interleaved rounds of ours and the peers; seconds of each."""
    names = [f"i{k}" for k in range(islands)]
    choices = [f"islands.count={islands}", f"codec.up.kind={codec}", f"codec.down.kind={codec}", "run.rounds=100"]
    channels = channels_of(compose(choices).config)
    anchor = RayAnchor(AnchorSettings(channels, (SHARED,), shards, islands, False, "", deadline_s=300.0))
    await anchor.start(layout, [ray.get_runtime_context().get_node_id()], None, "")
    settings = FleetSettings("", None, False, DeadlinesConfig(), lambda: None, _nothing)
    ranks = [BenchActor.remote(layout, name, channels) for name in names]
    fleet = [RayIsland(name, 0, [rank], None, settings) for name, rank in zip(names, ranks, strict=True)]
    for island, rank in zip(fleet, ranks, strict=True):
        island._shards = anchor.parts
        ray.get(rank.connect.remote(anchor.parts, anchor.cuts))
    await anchor.found(await fleet[0].found())
    first = await anchor.current(names[0])
    await asyncio.gather(*(island.join(first) for island in fleet))
    taken: list[list[float]] = [[] for _ in (ours, *others, *([bare] if bare else []))]
    for k in range(rounds + 1):
        work = Work(k, k, 1, Lease(k, "", ()), emits=((0, k, k + 1),))
        await asyncio.gather(*(island.train(work) for island in fleet))
        emissions = await asyncio.gather(*(island.emit(0, k, k + 1) for island in fleet))
        offers = [
            (Offer(name, 0, 0, k + 1, k, 1, 1, 0.0, emission), 1 / islands)
            for name, emission in zip(names, emissions, strict=True)
        ]
        step = Step(f"{k + 1}.0:", 0, k + 1, k, (Movement(SHARED, tuple(offers)),))
        prepared = await anchor.prepare(step)
        swap = asyncio.ensure_future(anchor.commit(step.key))
        del emissions, offers, step
        update = prepared.updates[SHARED]
        await asyncio.gather(*(island.adopt([update], {0: True}) for island in fleet))
        await asyncio.gather(*(island.settled() for island in fleet))
        await swap
        begins, ends = zip(*ray.get([rank.times.remote() for rank in ranks]), strict=True)
        taken[0].append(max(ends) - max(begins))
        for keeper in anchor._keepers:
            # As a durable commit of each round does, the default; or the store holds all contributions ever made.
            keeper._told.clear()
        if bare is not None:
            values, took = await bare.round()
            assert len(set(values)) == 1
            taken[-1].append(took)
        for seconds, peers in zip(taken[1:], others, strict=False):
            values, begins, ends = zip(*ray.get([peer.round.remote() for peer in peers]), strict=True)
            seconds.append(max(ends) - max(begins))
            assert len(set(values)) == 1
            if codec == "fp32":
                theta = ray.get(ranks[0].parameter.remote())
                np.testing.assert_allclose(theta, values[0], rtol=1e-5)
    print(f"  anchor shards and driver: {private_bytes() / layout.numel:.1f} private bytes per parameter", flush=True)
    for rank in [*ranks, *anchor._actors]:
        ray.kill(rank)
    return [seconds[1:] for seconds in taken]


def spread(seconds: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f}–{max(seconds):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=100, help="millions")
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--shards", type=int, default=0, help="as many as a run has, if 0")
    parser.add_argument("--bare", action="store_true", help="beside the least that a round takes in Ray")
    arguments = parser.parse_args()
    os.environ |= LOCAL_RAY | {"OMP_NUM_THREADS": "1"}
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
        object_store_memory=8 << 30,
    )  # fmt: skip
    layout = model_layout(arguments.parameters)
    for islands in arguments.islands:
        peers = {"gloo + outer step": [GlooActor.remote(layout.numel, k, islands) for k in range(islands)]}
        gloo = peers["gloo + outer step"]
        port = ray.get(gloo[0].open.remote())
        ray.get([peer.join.remote(port) for peer in gloo])
        if INSTALLED:
            server, address = lighthouse(islands)
            peers["torchft"] = [TorchftActor.remote(layout.numel, k, islands, STEP) for k in range(islands)]
            ray.get([peer.join.remote(address) for peer in peers["torchft"]])
        shards, others = shard_count((SHARED,), arguments.shards, islands, layout.numel), list(peers.values())
        bare = BarePeer(layout.numel, islands, TRAINING_S, STEP) if arguments.bare else None
        mine, *theirs = asyncio.run(ours(layout, islands, arguments.codec, arguments.rounds, others, shards, bare))
        for peer in (peer for group in others for peer in group):
            ray.kill(peer)
        if INSTALLED:
            server.shutdown()
        if bare is not None:
            bare.end()
        what = f"{layout.numel / 1e6:.1f} M parameters, {islands} islands, {shards} shards, {arguments.codec}"
        print(f"{what}: ours {spread(mine)}")
        for name, seconds in zip([*peers, *(["bare Ray"] if bare else [])], theirs, strict=True):
            ratio = statistics.median(mine) / statistics.median(seconds)
            print(f"  {name} {spread(seconds)}: ratio {ratio:.2f}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    with credentials(None):
        main()
