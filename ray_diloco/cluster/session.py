"""A Ray to run on: one of our own for a local run, or the cluster that `ray.address` or the environment names.

A local Ray takes ports from the kernel, starts without a dashboard, lives as long as the command and is ended by it.
It listens at the machine's own address, whatever it is told, and lets nobody in without a token (`credentials.py`).
Its workers run at normal priority (`RAY_worker_niceness`; Ray's default slows them on a busy machine).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray._private import services

from ray_diloco.cluster.credentials import credentials
from ray_diloco.cluster.local_ray import LOCAL_RAY
from ray_diloco.config.schema import Config
from ray_diloco.errors import ClusterError

NAMESPACE = "ray_diloco"
# Seconds for a connection to the head of a cluster.
PROBE_S = 10.0


@contextmanager
def ray_session(config: Config, cpus: float) -> Iterator[None]:
    """Joins or starts a Ray for the length of the block.

    Args:
      config: `ray.*` is used.
      cpus: what the islands need; a local Ray claims at least this and the machine's CPUs.

    Raises:
      ClusterError: RD-201, the cluster cannot be reached; RD-202, a local Ray does not start.
      SecurityError: RD-601 to RD-603, the cluster does not take the credentials of this process.
    """
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        yield
    elif address:
        with joined(address):
            yield
    else:
        with credentials(None), _ended(lambda: _start(config, cpus)):
            yield


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Joins the Ray at an address for the length of the block; what this process has joined already stays.

    Raises:
      ClusterError: RD-201, nothing answers there.
      SecurityError: RD-601 to RD-603, it does not take the credentials of this process.
    """
    if address is None or ray.is_initialized():
        yield
        return
    if address == "auto":
        address = _nearest()
    _probe(address)
    with credentials(address, PROBE_S), _ended(lambda: _join(address)):
        yield


@contextmanager
def _ended(begin: Callable[[], None]) -> Iterator[None]:
    """Begins a session with Ray, and ends it after the block."""
    try:
        with _signal_handlers_kept():
            begin()
        yield
    finally:
        with _signal_handlers_kept():
            ray.shutdown()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undoes what Ray does to SIGTERM when it starts and ends: it would end the process on the spot, with code 15.

    Raises:
      KeyboardInterrupt: SIGTERM came while Ray had it in hand.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as left:
        if left.code != signal.SIGTERM:
            raise
        raise KeyboardInterrupt from None
    finally:
        for number, handler in handlers.items():
            # None: a handler that was not set from Python, and cannot be set again from there.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Begins a process group for each process that Ray starts in the block.

    `timeout`, schedulers and service managers send SIGTERM to the whole group of a command.  Ray's processes would end
    with it, under the hands of the command that wants to stop at a commit.
    """
    name = "ConsolePopen"
    popen = getattr(services, name)
    setattr(services, name, functools.partial(popen, process_group=0))
    try:
        yield
    finally:
        setattr(services, name, popen)


def _nearest() -> str:
    """The cluster of RAY_ADDRESS, else that of this machine, as Ray finds it; `auto` where it finds none."""
    with contextlib.suppress(ConnectionError, ValueError):
        return services.canonicalize_bootstrap_address("auto") or "auto"
    return "auto"


def _join(address: str) -> None:
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from error


def _probe(address: str) -> None:
    """Sees that something listens at `host:port`; Ray itself goes on trying for many minutes."""
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            201,
            f"{address!r} is the address of a cluster's dashboard, which takes jobs only",
            "use jobs/train.sh, jobs/status.sh and their like, or give the address of the head itself (HOST:6379)",
        )
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> ClusterError:
    return ClusterError(
        201,
        f"no Ray cluster answers at {address!r}: {error}",
        "see that `ray status --address …` works from this machine, or leave ray.address out to run locally",
    )


def _start(config: Config, cpus: float) -> None:
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    try:
        with _in_groups_of_their_own():
            ray.init(
                address="local",
                num_cpus=config.ray.num_cpus or max(os.cpu_count() or 1, math.ceil(cpus)),
                namespace=NAMESPACE,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=config.ray.temp_dir,
            )
    # Ray raises a plain Exception where a machine is so busy that its processes do not come up in time.
    except Exception as error:
        raise ClusterError(
            202,
            f"a local Ray could not be started: {error}",
            "see the end of the message; often /tmp or /dev/shm is full, ray.temp_dir is too long a path, or the"
            " machine so busy that Ray's own processes need more than the 15 s that it waits for them",
        ) from error
