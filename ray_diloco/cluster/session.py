"""A Ray to run on: one of our own for a local run, or the cluster that `ray.address` or the environment names.

A local Ray takes ports from the kernel, starts without a dashboard, lives as long as the command and is ended by it.
Its workers run at normal priority (`RAY_worker_niceness`; Ray's default slows them on a busy machine).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

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
    """
    if ray.is_initialized():
        yield
        return
    address = config.ray.address or os.environ.get("RAY_ADDRESS")
    with _signal_handlers_kept():
        if address:
            _join(address)
        else:
            _start(config, cpus)
    try:
        yield
    finally:
        with _signal_handlers_kept():
            ray.shutdown()


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Joins the Ray at an address for the length of the block; what this process has joined already stays.

    Raises:
      ClusterError: RD-201, nothing answers there.
    """
    if address is None or ray.is_initialized():
        yield
        return
    # As a local Ray is started; a cluster that asks for a token says so in its environment.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with _signal_handlers_kept():
        _join(address)
    try:
        yield
    finally:
        with _signal_handlers_kept():
            ray.shutdown()


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undoes what Ray does to SIGTERM when it starts and ends: it would end the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None: a handler that was not set from Python, and cannot be set again from there.
            if handler is not None:
                signal.signal(number, handler)


def _join(address: str) -> None:
    _probe(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from error


def _probe(address: str) -> None:
    """Sees that something listens at `host:port`; Ray itself goes on trying for many minutes."""
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
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # The driver keeps the tape; Ray's usage statistics and its per-process metrics exporter only cost start-up time.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address="local",
            num_cpus=config.ray.num_cpus or max(os.cpu_count() or 1, math.ceil(cpus)),
            namespace=NAMESPACE,
            include_dashboard=False,
            # Ray still listens at the machine's own address: a local run belongs on a network that one trusts.
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
            "see the end of the message; often /tmp or /dev/shm is full, or ray.temp_dir is too long a path",
        ) from error
