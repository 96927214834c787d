"""What the network interfaces of a run's machines counted: packets as they went, with all that is no payload.

Payloads are what the algorithm sends; a bill is of what machines sent: headers, what was sent again, Ray's own calls,
and whatever else goes out there.  Each rank says with its heartbeats what the interface has counted over which its
machine and the others of the cluster speak.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import ray

from ray_diloco.inner.environment import interface_towards


@dataclass(frozen=True)
class Counted:
    """Bytes that the interface of a machine has sent and received since it was made; `machine` is its address."""

    machine: str
    sent: int
    received: int


class Interface:
    """The interface of this machine that has an address, IPv4; none if that is the loopback's."""

    def __init__(self, address: str) -> None:
        self._address = address
        try:
            name = interface_towards(address)
        except OSError:
            name = None
        # An address may have a name of its own, as eth0:1; packets are counted for eth0.
        name = name.partition(":")[0] if name else ""
        # What stays on a machine crosses no network.
        self._name = "" if name == "lo" else name

    def counted(self) -> Counted | None:
        """What it has counted; None where there is no such interface, or nothing can be read of it now."""
        if not self._name:
            return None
        try:
            found = psutil.net_io_counters(pernic=True, nowrap=False).get(self._name)
        except OSError:
            return None
        return None if found is None else Counted(self._address, found.bytes_sent, found.bytes_recv)


def own_address() -> str:
    """Address of this machine, as Ray and the other machines know it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class Traffic:
    """What the machines of a run have counted since they were first heard.

    Attributes:
      sent, received: bytes of all machines together; what one of them sent, another has received.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._last: dict[str, Counted] = {}

    def hear(self, counted: Counted | None) -> None:
        """Notes what a machine says; several ranks of one machine say the same."""
        if counted is None:
            return
        last = self._last.get(counted.machine, counted)
        # An interface that was made anew, as a tunnel is when it starts again, counts from nothing.
        self.sent += counted.sent - last.sent if counted.sent >= last.sent else counted.sent
        self.received += counted.received - last.received if counted.received >= last.received else counted.received
        self._last[counted.machine] = counted

    @property
    def machines(self) -> int:
        """How many were heard."""
        return len(self._last)
