"""Faults of the configuration's plan in real processes, at the points that the simulator has too (`rounds/faults.py`).

Each process is given the faults of its own target and looks them up at the points that it passes, never by the clock.
A mark in the run directory makes each strike once, whoever is started again after it; `exit` and `freeze` do to the
process what `kill -9` and SIGSTOP do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.names import whole_folder
from ray_diloco.rounds.faults import (
    CORRUPT_PAYLOAD,
    DRIVER_EXIT,
    DROP_LINK,
    EXIT,
    FREEZE,
    NAN_DELTA,
    SLOW_LINK,
    STALE_EPOCH,
    Fault,
    FaultPlan,
)

# Exit code of a process that a fault ended.
STRUCK = 23


@dataclass(frozen=True)
class Misfortunes:
    """The faults of one target, to be sent to its process; `marks` is the folder of what has struck."""

    target: str = ""
    faults: tuple[Fault, ...] = ()
    marks: str = ""

    def of(self, target: str) -> Misfortunes:
        """Those of one target of all."""
        return Misfortunes(target, tuple(fault for fault in self.faults if fault.target == target), self.marks)


NO_FAULTS = Misfortunes()


class Misfortune:
    """What goes wrong in this process.

    Args:
      told: the faults of its target.
      incarnation, rank: which of the target's processes it is.

    Attributes:
      damage: what is wrong with the contribution that is encoded next: a kind of fault, or nothing.
    """

    def __init__(self, told: Misfortunes, incarnation: int = 0, rank: int = 0) -> None:
        self.damage = ""
        self._told, self._incarnation, self._rank = told, incarnation, rank
        self._plan = FaultPlan(told.faults)
        self._cut_until = self._slow_until = 0.0
        self._bytes_per_s = 0.0
        self._waiting: Fault | None = None

    def pass_(self, round_: int, phase: str) -> bool:
        """Passes a point; True if something struck that whoever calls has to act on."""
        if not self._plan:
            return False
        fault = self._find(round_, phase)
        return fault is not None and self._strike(fault)

    def wait_at(self, round_: int, phase: str) -> None:
        """Passes a point at which nobody calls: what is there strikes when the next call begins."""
        if self._plan:
            self._waiting = self._find(round_, phase) or self._waiting

    def called(self) -> None:
        """Begins a call."""
        fault, self._waiting = self._waiting, None
        if fault is not None:
            self._strike(fault)

    def transfer(self, nbytes: int) -> None:
        """Lets bytes travel: at once, unless the link is cut or slow."""
        now, never = time.monotonic(), threading.Event()
        if now < self._cut_until:
            never.wait(min(self._cut_until - now, threading.TIMEOUT_MAX))
        if now < self._slow_until:
            never.wait(nbytes / self._bytes_per_s)

    def spoil(self) -> str:
        """What is wrong with what is encoded now."""
        damage, self.damage = self.damage, ""
        return damage

    def _find(self, round_: int, phase: str) -> Fault | None:
        fault = self._plan.at(self._told.target, round_, phase, self._incarnation, self._rank)
        return fault if fault is not None and self._first_time(fault) else None

    def _first_time(self, fault: Fault) -> bool:
        mark = Path(self._told.marks) / str(fault).replace(" ", "_")
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError:
            # Another machine, without the run directory: its processes are told of each fault once.
            return True
        return True

    def _strike(self, fault: Fault) -> bool:
        until = time.monotonic() + (fault.seconds or threading.TIMEOUT_MAX)
        if fault.kind in (EXIT, DRIVER_EXIT):
            os._exit(STRUCK)
        elif fault.kind == FREEZE:
            freeze(os.getpid(), fault.seconds)
        elif fault.kind == DROP_LINK:
            self._cut_until = until
        elif fault.kind == SLOW_LINK:
            self._slow_until, self._bytes_per_s = until, fault.bytes_per_s
        elif fault.kind in (CORRUPT_PAYLOAD, NAN_DELTA, STALE_EPOCH):
            self.damage = fault.kind
        else:
            return True
        return False


def freeze(pid: int, seconds: float) -> None:
    """Stops a process; after `seconds`, if that is not 0, somebody else lets it go on."""
    if seconds:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}"], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


def rot(url: str, manifest: Manifest) -> None:
    """Damages a commit that looks well: a byte in the midst of its first file, on a disk."""
    path = Path(url.removeprefix("file://")) / whole_folder(manifest.round) / manifest.files[0].name
    with open(path, "r+b") as file:
        file.seek(manifest.files[0].bytes - 1)
        last = file.read(1)
        file.seek(manifest.files[0].bytes - 1)
        file.write(bytes([last[0] ^ 1]))


def spoiled(payload: np.ndarray, damage: str) -> np.ndarray:
    """A payload with what a fault does to it: a bit that is another one, or values that are no numbers."""
    if damage == CORRUPT_PAYLOAD and payload.nbytes:
        payload = payload.copy()
        payload[-1] ^= 1
    if damage == NAN_DELTA and payload.nbytes:
        import torch

        from ray_diloco.outer.chunks import CHUNK
        from ray_diloco.outer.codec import Fp32
        from ray_diloco.outer.payload import Writer, open_payload

        header = open_payload(payload).header
        writer = Writer(Fp32(), header.ranges, header.meta)
        for start in range(0, writer.numel, CHUNK):
            writer.put(start, torch.full((min(CHUNK, writer.numel - start),), float("nan")))
        return writer.seal(header.meta)
    return payload
