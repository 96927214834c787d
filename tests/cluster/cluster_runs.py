"""Real runs for the tests of this folder: started in this process or by the command, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import load_file

import ray_diloco
from ray_diloco.config.compose import compose

HERE = Path(__file__).parent
MICRO = HERE / "micro.yaml"
DEADLINE_S = 480
LLAMA = {
    "name": "llama",
    "builder": None,
    "architecture": "llama",
    "config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
}


def write_corpus(path, blocks, seed=0):
    """Sums in words and figures, of `blocks` blocks of 32 bytes and a rest."""
    draw, text = random.Random(seed), ""
    while len(text) < 32 * blocks + 5:
        a, b = draw.randrange(50), draw.randrange(50)
        text += f"{a} plus {b} is {a + b}\n"
    path.write_text(text[: 32 * blocks + 5])
    return path


class Place:
    """A folder with a corpus, a cache and runs."""

    def __init__(self, root, blocks=80):
        self.root = root
        self.corpus = write_corpus(root / "corpus.txt", blocks)
        self.common = {
            "run.root": str(root / "runs"),
            "data.path": str(self.corpus),
            "data.cache": str(root / "cache"),
        }

    def settings(self, name, settings):
        return self.common | {"run.name": name} | settings

    def train(self, name, settings=()):
        return ray_diloco.train(MICRO, **self.settings(name, dict(settings)))

    def config(self, settings=()):
        return compose((), str(MICRO), settings=self.settings("any", dict(settings))).config

    def folder(self, name):
        return self.root / "runs" / name

    def command(self, name, settings=(), **more):
        """The process of `ray-diloco train`, in a group of its own."""
        arguments = [f"{key}={value}" for key, value in self.settings(name, dict(settings)).items()]
        return command("train", "--config", str(MICRO), *arguments, **more)


def command(*arguments, cwd=None, paths=(HERE,), settings=()):
    """The process of `ray-diloco`; `settings` are variables of its environment, None for those that it is not given."""
    folders = [str(HERE.parents[1]), *map(str, paths)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "100"}
    environment |= {"RAY_ADDRESS": None} | dict(settings)
    environment = {name: value for name, value in environment.items() if value is not None}
    return subprocess.Popen(
        [sys.executable, "-m", "ray_diloco.cli", *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process):
    """Exit code and output of a command."""
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, output


def lines(path):
    """Whole lines of a JSON log; a run may be writing it."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def events(folder, kind=None):
    found = lines(folder / "events.jsonl")
    return found if kind is None else [event for event in found if event["event"] == kind]


class Tape:
    """The events of a run from now on."""

    def __init__(self, folder):
        self._folder, self._before = folder, len(events(folder))

    def read(self):
        return events(self._folder)[self._before :]

    def wait(self, wanted, alive=lambda: True):
        """Returns the events as soon as `wanted(events)` is true; fails after the deadline or when the run is over."""
        end = time.monotonic() + DEADLINE_S
        tick = threading.Event()
        finished = seen("run_finished")
        before = finished(self.read())
        while not wanted(tape := self.read()):
            going = alive() and finished(tape) == before
            assert going, f"the run ended before, with {[event['event'] for event in self.read()]}"
            assert time.monotonic() < end, f"it did not happen in {DEADLINE_S} s"
            tick.wait(0.01)
        return tape


def seen(kind, count=1, **fields):
    """Whether events of a kind, with these fields, have been seen so often."""
    wanted = {"event": kind, **fields}.items()
    return lambda tape: sum(wanted <= event.items() for event in tape if event["event"] == kind) >= count


def durable(count=1):
    """Whether so many trained rounds have become durable."""
    return lambda tape: sum(event["event"] == "checkpoint_written" and event["round"] > 0 for event in tape) >= count


@contextlib.contextmanager
def when(folder, wanted, act):
    """Calls `act` in a thread as soon as `wanted` is true of the events from now on, while the block runs."""
    tape, over, failures = Tape(folder), threading.Event(), []

    def wait():
        try:
            tape.wait(wanted, lambda: not over.is_set())
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE_S)
    # Not in place of what the block itself raised.
    if failures:
        raise failures[0]


def manifest(folder, round_=None):
    found = sorted((folder / "checkpoints").glob("round-*/manifest.json"))
    if round_ is not None:
        found = [path for path in found if path.parent.name == f"round-{round_:06d}"]
    return json.loads(found[-1].read_text())


def anchor(folder, round_):
    return load_file(folder / f"trace/round-{round_:06d}/anchor.safetensors")


def contribution(folder, round_, island):
    return load_file(folder / f"trace/round-{round_:06d}/island-{island}.safetensors")


def traced_rounds(folder):
    return sorted(int(path.name.removeprefix("round-")) for path in (folder / "trace").glob("round-*"))


def digest(folder, tensors):
    """SHA-256 over fp32 tensors in the order of the manifest's layout."""
    sha = hashlib.sha256()
    for name, shape in manifest(folder)["layout"]:
        assert tensors[name].dtype == np.float32 and list(tensors[name].shape) == shape
        sha.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha.hexdigest()


def distance(a, b):
    """Largest difference of two sets of tensors."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name].astype(np.float64) - b[name]).max()) for name in a)


def equal(a, b):
    """Whether two sets of tensors have the same bits."""
    return a.keys() == b.keys() and all(np.array_equal(a[n].view(np.uint32), b[n].view(np.uint32)) for n in a)


def actor_processes(kind):
    """Living processes of the actors of a class: `Rank`, `Shard`, `Driver`; Ray writes it into their titles."""
    found = []
    # Of this process' own Ray alone: somebody else's run on this machine is not ours to end.
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ray::{kind}" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def rank_processes(world):
    """Processes of the ranks of islands with so many ranks, by rank."""
    found = {}
    for process in actor_processes("Rank"):
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get("WORLD_SIZE") == str(world):
                found[int(variables["RANK"])] = process
    return found


def replayed(folder):
    """Anchors by round that the contributions of the trace give, in float64 from round 0 on."""
    a = {name: tensor.astype(np.float64) for name, tensor in anchor(folder, 0).items()}
    u = {name: np.zeros_like(tensor) for name, tensor in a.items()}
    anchors = [a]
    for r in traced_rounds(folder)[1:]:
        about = json.loads((folder / f"trace/round-{r:06d}/round.json").read_text())
        eta, mu = about["outer_lr"], about["momentum"]
        parts = {island: contribution(folder, r, island) for island in about["weights"]}
        delta = {n: sum(w * parts[i][n].astype(np.float64) for i, w in about["weights"].items()) for n in a}
        u = {n: mu * u[n] + delta[n] for n in a}
        a = {n: a[n] - eta * (delta[n] + mu * u[n]) for n in a}
        anchors.append(a)
    return anchors
