"""Real ranks: `worlds[n]` holds the records of an island of n ranks, by rank (inner_scenarios.py makes them).

`little_worlds` is the same of little_ranks.py.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ray_diloco.inner.environment import rank_environment

SCENARIOS = Path(__file__).with_name("inner_scenarios.py")
LITTLE_RANKS = SCENARIOS.with_name("little_ranks.py")
DEADLINE_S = 240


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    base = tmp_path_factory.mktemp("worlds")
    return {world: run_world(world, base / f"world-{world}") for world in (2, 1)}


@pytest.fixture(scope="session")
def little_worlds(tmp_path_factory):
    base = tmp_path_factory.mktemp("little")
    return {world: run_world(world, base / f"world-{world}", LITTLE_RANKS) for world in (2, 1)}


def run_world(world, folder, script=SCENARIOS):
    folder.mkdir()
    processes = [start(script, rank, world, folder) for rank in range(world)]
    try:
        if world > 1:
            port = processes[0].stdout.readline()
            for process in processes[1:]:
                process.stdin.write(port)
                process.stdin.flush()
        for rank, process in enumerate(processes):
            error = process.communicate(timeout=DEADLINE_S)[1]
            assert process.returncode == 0, f"rank {rank} of {world}:\n{error[-4000:]}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads((folder / f"rank-{rank}.pkl").read_bytes()) for rank in range(world)]


def start(script, rank, world, folder):
    root = script.parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(script), str(rank), str(world), str(folder)],
        env=os.environ | rank_environment(rank, world) | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
