"""Ranks and anchor shards whose processes serve one run after the other, for tests of many short runs.

Nine tenths of such a run are the start of its processes: torch, DeepSpeed and transformers are imported again in each.
Here everything is the product's own, Ray actors included, but that a process which a run has done with is taken by the
next one, and that the driver lives in the process of the test.
"""

import asyncio
import gc
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from cluster_runs import Place

from ray_diloco.cluster import command, fleet, keepers, shard
from ray_diloco.cluster.calls import actor
from ray_diloco.cluster.driver import Driver, Job
from ray_diloco.cluster.fence import fenced
from ray_diloco.cluster.imports import own_folders
from ray_diloco.cluster.rank import THREADS, Rank
from ray_diloco.cluster.shard import Shard
from ray_diloco.cluster.storage import shared_storage, take_back
from ray_diloco.config.show import config_yaml
from ray_diloco.inner.environment import rank_environment


class WarmRank(fenced(Rank)):
    """A rank that becomes one of the next run."""

    def __init__(self):
        self._inner = None

    def renew(self, job, rank):
        if self._inner is not None:
            self._inner.close()
        self._epoch = 0
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.settings.world)}
        super().__init__(replace(job, orphan_s=0.0), rank)


class WarmShard(Shard):
    def renew(self):
        super().__init__()


class Pool:
    """Stands for an actor class: `options(…).remote(…)` gives a process that is free, or a new one."""

    def __init__(self, cls, options):
        self._cls, self._options = actor(cls, **options), options
        self.all, self.free = [], []

    def options(self, **options):
        return self

    def remote(self, *arguments):
        if not self.free:
            folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
            environment = {"env_vars": rank_environment(0, 1) | {"PYTHONPATH": folders}}
            self.all.append(self._cls.options(num_cpus=0, runtime_env=environment).remote())
            self.free.append(self.all[-1])
        handle = self.free.pop()
        handle.renew.remote(*arguments)
        return handle


class Warm:
    """The processes; `runs` is where runs use them."""

    def __init__(self):
        self._ranks = Pool(WarmRank, {"concurrency_groups": THREADS})
        self._shards = Pool(WarmShard, {"concurrency_groups": shard.THREADS})

    @contextmanager
    def runs(self):
        kill = ray.kill

        def give_back(handle, **options):
            for pool in (self._ranks, self._shards):
                if any(handle is known for known in pool.all):
                    pool.free.append(handle)
                    return
            kill(handle, **options)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(fleet, "RankActor", self._ranks)
            patched.setattr(keepers, "ShardActor", self._shards)
            patched.setattr(ray, "kill", give_back)
            patched.setattr(command, "drive", _drive)
            yield
        # The driver was in this process: what it held of the cluster goes with it.
        gc.collect()
        for pool in (self._ranks, self._shards):
            pool.free = list(pool.all)

    def end(self):
        for handle in (*self._ranks.all, *self._shards.all):
            ray.kill(handle)


class QuickPlace(Place):
    """A place where `train` uses such processes."""

    def __init__(self, root, processes):
        super().__init__(root)
        self._processes = processes

    def train(self, name, settings=()):
        with self._processes.runs():
            return super().train(name, settings)


def _drive(composed, corpora, heldout, display, stop):
    config = composed.config
    storage = shared_storage(str(Path(config.run.root, config.run.name)))
    try:
        return asyncio.run(Driver(Job(config, config_yaml(composed), corpora, heldout, storage, own_folders())).run())
    finally:
        take_back(storage)
