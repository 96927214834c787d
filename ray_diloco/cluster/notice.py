"""A machine that is about to go says so with SIGTERM to its processes; a rank hears it and its island leaves in time.

Ray runs actors below a main thread that executes no Python while it waits, so a Python signal handler could be late by
minutes.  The interpreter's wake-up descriptor is written to at once, by the signal itself, and a thread reads it.
"""

from __future__ import annotations

import signal
import socket
import threading


class Notice:
    """Listens for SIGTERM in this process, which then no longer ends it.

    Attributes:
      given: SIGTERM has come.
    """

    def __init__(self) -> None:
        self.given = False
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may listen: an actor that Ray runs elsewhere ends at SIGTERM, as it would without us.
            return
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True, name="notice").start()

    def _listen(self) -> None:
        while number := self._reader.recv(1):
            self.given = self.given or number[0] == signal.SIGTERM
