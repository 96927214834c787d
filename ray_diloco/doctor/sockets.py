"""What a link carries, measured with plain TCP: time there and back, and the rate of one and of several streams.

A listener answers whoever connects, in threads that end with it.  A rate is counted where the bytes arrive and in the
last third of the time alone, as a connection over a long way is still growing before.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from ray_diloco.doctor.network import Reach

CONNECT_S = 5.0
_ECHO, _SINK = b"E", b"S"
_PINGS = 11
_CHUNK = 1 << 18
_RATE = struct.Struct("<d")
_DURATION = struct.Struct("<d")
# Part of a measurement that is left out at its beginning.
_GROWING = 2 / 3
_SLICES = 5


class Listener:
    """Answers probes on a port of its own until it is closed.

    Args:
      host: address to listen at; empty: all.
      patience_s: seconds that a silent connection is kept.
    """

    def __init__(self, host: str = "", patience_s: float = 60.0) -> None:
        self._socket = socket.create_server((host, 0))
        self._patience_s = patience_s
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        # Wakes the thread that waits in accept, which closing alone would not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(self._patience_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind = connection.recv(1)
            if kind == _ECHO:
                while byte := connection.recv(1):
                    connection.sendall(byte)
            elif kind == _SINK:
                (duration_s,) = _DURATION.unpack(_exactly(connection, _DURATION.size))
                connection.sendall(_RATE.pack(_count(connection, duration_s)))


def try_to_reach(source: str, target: str, address: str, port: int) -> Reach:
    """Connects once and hears one byte back."""
    try:
        with _connected(address, port, _ECHO) as connection:
            connection.sendall(b"x")
            _exactly(connection, 1)
    except OSError as error:
        return Reach(source, target, address, port, error.strerror or str(error) or type(error).__name__)
    return Reach(source, target, address, port)


def round_trip_s(address: str, port: int) -> float:
    """Median seconds of a byte there and back.  Raises OSError."""
    with _connected(address, port, _ECHO) as connection:
        seconds = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b"x")
            _exactly(connection, 1)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def rate_mbit(address: str, port: int, streams: int, duration_s: float) -> float:
    """Mbit/s that arrive over so many connections at once.  Raises OSError."""
    with ThreadPoolExecutor(streams) as pool:
        rates = pool.map(lambda _: _send(address, port, duration_s), range(streams))
        return sum(rates) * 8 / 1e6


def _send(address: str, port: int, duration_s: float) -> float:
    """Sends for a while; bytes per second as the other side counted them."""
    chunk = bytes(_CHUNK)
    with _connected(address, port, _SINK) as connection:
        connection.settimeout(CONNECT_S + 10 * duration_s)
        connection.sendall(_DURATION.pack(duration_s))
        began = time.perf_counter()
        while time.perf_counter() - began < duration_s:
            connection.sendall(chunk)
        connection.shutdown(socket.SHUT_WR)
        (rate,) = _RATE.unpack(_exactly(connection, _RATE.size))
        return float(rate)


def _count(connection: socket.socket, duration_s: float) -> float:
    """Bytes per second of what arrives, from two thirds of the time on until the sender's time is over.

    It is the median of some slices of that time: what waited behind a lost packet arrives all at once.
    """
    buffer = bytearray(_CHUNK)
    slices, length_s = [0] * _SLICES, (1 - _GROWING) * duration_s / _SLICES
    began = time.perf_counter()
    while got := connection.recv_into(buffer):
        at = (time.perf_counter() - began - _GROWING * duration_s) / length_s
        if 0 <= at < _SLICES:
            slices[int(at)] += got
    # Where little came, and that in few pieces, its average is all there is to say.
    return (statistics.median(slices) or statistics.mean(slices)) / length_s


def _connected(address: str, port: int, kind: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(kind)
    return connection


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        part = connection.recv(nbytes - len(found))
        if not part:
            raise ConnectionResetError("the other side ended the connection")
        found += part
    return found
