"""What the network interfaces of a run's machines counted: packets as they went, with all that is no payload.

Payloads are what the algorithm sends; a bill is of what left a machine: headers, what was sent again, Ray's own calls,
and whatever else that machine sends.  Each rank says with its heartbeats what its machine's interface has counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import ray

from ray_diloco.inner.environment import interface_towards


@dataclass(frozen=True)
class Counted:
    """Bytes that an interface has sent and received since its machine was started."""

    sent: int
    received: int


class Interface:
    """The interface of this machine from which `host` is reached, or that has this address itself."""

    def __init__(self, host: str) -> None:
        name = interface_towards(host)
        # What stays on a machine crosses no network.
        self._name = None if name is None or name.startswith("lo") else name

    def counted(self) -> Counted | None:
        """What it has counted; None where there is no such interface."""
        if self._name is None:
            return None
        found = psutil.net_io_counters(pernic=True, nowrap=False).get(self._name)
        return None if found is None else Counted(found.bytes_sent, found.bytes_recv)


def own_address() -> str:
    """Address of this machine, as Ray and the other machines know it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


class Traffic:
    """What the machines of a run have counted since they were first heard."""

    def __init__(self) -> None:
        self._first: dict[str, Counted] = {}
        self._last: dict[str, Counted] = {}

    def heard(self, machine: str, counted: Counted | None) -> None:
        """Notes what a machine says; several ranks of one machine say the same."""
        if counted is not None:
            self._first.setdefault(machine, counted)
            self._last[machine] = counted

    @property
    def machines(self) -> int:
        """How many were heard."""
        return len(self._first)

    @property
    def total(self) -> Counted:
        """Of all machines together: what one of them sent, another has received."""
        pairs = [(self._first[machine], last) for machine, last in self._last.items()]
        return Counted(sum(b.sent - a.sent for a, b in pairs), sum(b.received - a.received for a, b in pairs))
