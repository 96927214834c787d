"""Addresses, ports, links and clocks: pure functions of what nodes say and of what was measured between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_diloco.doctor.facts import Facts, Tcp
from ray_diloco.doctor.record import Check, Status, passed
from ray_diloco.observe.units import show_bytes, show_number, show_seconds

# Clocks that differ by more make logs of several nodes hard to read, and certificates fail.
_CLOCK_WARN_S, _CLOCK_FAIL_S = 1.0, 60.0
# A link is worth tuning where one stream gets less than this part of several.
_ONE_STREAM = 0.7
# A window is the bottleneck where one stream comes as near as this to what it allows.
_NEAR_LIMIT = 0.5


@dataclass(frozen=True)
class Reach:
    """Whether one node reached another; `error` is empty if it did."""

    source: str
    target: str
    address: str
    port: int
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """A link one way: seconds there and back, Mbit/s of one and of several streams."""

    source: str
    target: str
    rtt_s: float
    one_mbit: float
    several_mbit: float
    streams: int


def check_addresses(facts: Facts, alone: bool = False) -> list[Check]:
    """The address as the OS, Ray and gloo each think of it.

    Args:
      facts: of the node.
      alone: whether the run stays on this machine, where the loopback will do.
    """
    a = facts.addresses
    gloo = a.gloo or a.host
    said = (
        f"OS {a.route or 'none'}, Ray {a.ray or 'not running'}, gloo {gloo or 'none'}, own name {a.host or 'unknown'}"
    )
    if alone:
        return [passed("addresses", facts.node, said)]
    checks = []

    def say(status: Status, what: str, mend: str) -> None:
        checks.append(Check("addresses", facts.node, status, f"{what} ({said})", mend))

    if not a.route:
        say("fail", "no route to other machines", "ip route; a private network that is up")
    if a.ray.startswith("127."):
        say("fail", "other nodes cannot reach Ray here", f"ray start --node-ip-address {a.route or 'ADDRESS'}")
    elif a.ray and a.route and a.ray != a.route:
        # Right where a private network is meant, wrong where Ray took the first interface it found.
        mend = "nothing, if that is the private network; else ray start --node-ip-address"
        say("warn", "Ray uses another address than the route", mend)
    if a.gloo_interface and not a.gloo:
        mend = f"export GLOO_SOCKET_IFNAME={a.interface or 'INTERFACE'}"
        say("fail", f"GLOO_SOCKET_IFNAME={a.gloo_interface} has no address", mend)
    elif a.gloo and a.ray and a.gloo != a.ray:
        mend = "unset GLOO_SOCKET_IFNAME: ranks find it themselves"
        say("warn", f"GLOO_SOCKET_IFNAME={a.gloo_interface} has another address than Ray", mend)
    return checks or [passed("addresses", facts.node, said)]


def check_reach(tried: Sequence[Reach]) -> list[Check]:
    """Ports both ways between all pairs; one line for all where all is well."""
    checks = []
    for reach in tried:
        if reach.error:
            said = f"{reach.source} cannot reach {reach.address}:{reach.port}: {reach.error}"
            mend = f"open the ports that jobs/join.sh names between them; try: nc -vz {reach.address} {reach.port}"
            checks.append(Check("ports", f"{reach.source} to {reach.target}", "fail", said, mend))
    if any(reach.source != reach.target for reach in tried):
        return checks or [passed("ports", "", f"{len(tried)} connection(s), every pair of nodes both ways")]
    return checks or [passed("ports", "", "a port of this machine answers")]


def check_clocks(nodes: Sequence[tuple[str, float]]) -> list[Check]:
    """Clocks, as seconds ahead of the one who asks, travel time taken off."""
    checks = []
    for node, ahead_s in nodes:
        if abs(ahead_s) < _CLOCK_WARN_S:
            continue
        said = f"{abs(ahead_s):.1f} s {'ahead' if ahead_s > 0 else 'behind'}"
        status: Status = "fail" if abs(ahead_s) >= _CLOCK_FAIL_S else "warn"
        checks.append(Check("clocks", node, status, said, "timedatectl set-ntp true"))
    most = max((abs(ahead) for _, ahead in nodes), default=0.0)
    return checks or [passed("clocks", "", f"{len(nodes)} node(s) differ by at most {show_seconds(most)}")]


def window_bytes(tcp: Tcp) -> int:
    """Most bytes that one connection has on its way; 0: not known.

    Linux uses half of a receive buffer for its own books, so its window is at most the other half
    (tcp_adv_win_scale=1); a send buffer holds what was not acknowledged.
    """
    return min((b for b in (tcp.receive_bytes // 2, tcp.send_bytes) if b), default=0)


def window_limit_mbit(tcp: Tcp, rtt_s: float) -> float:
    """What one connection can carry at most: its window in each time there and back, in Mbit/s."""
    window = window_bytes(tcp)
    return window * 8 / rtt_s / 1e6 if window and rtt_s else math.inf


def check_link(link: Measured, tcp: Tcp) -> Check:
    """One direction of a link, and what holds one stream back."""
    where = f"{link.source} to {link.target}"
    limit = window_limit_mbit(tcp, link.rtt_s)
    said = (
        f"{show_seconds(link.rtt_s)} there and back, {show_number(link.one_mbit)} Mbit/s in one stream, "
        f"{show_number(link.several_mbit)} in {link.streams}"
    )
    if link.one_mbit >= _ONE_STREAM * link.several_mbit:
        return passed("link", where, said)
    if link.one_mbit >= _NEAR_LIMIT * limit:
        said += (
            f"; a connection has at most {show_bytes(window_bytes(tcp))} on its way, "
            f"which is {show_number(limit)} Mbit/s at this distance"
        )
        return Check("link", where, "warn", said, _larger_buffers(tcp, link))
    mend = "several connections fill it"
    if tcp.congestion != "bbr":
        mend += "; for one: sysctl -w net.ipv4.tcp_congestion_control=bbr"
    return Check("link", where, "warn", f"{said}; losses or slow start hold one stream back", mend)


def _larger_buffers(tcp: Tcp, link: Measured) -> str:
    """The buffers that let one connection carry what several do, of those that are too small."""
    on_its_way = math.ceil(link.several_mbit * 1e6 / 8 * link.rtt_s)
    settings = []
    if tcp.send_bytes < on_its_way:
        settings.append(f'net.ipv4.tcp_wmem="4096 16384 {on_its_way}"')
    if tcp.receive_bytes < 2 * on_its_way:
        settings.append(f'net.ipv4.tcp_rmem="4096 131072 {2 * on_its_way}"')
    return f"sysctl -w {' '.join(settings)}" if settings else "several connections fill it"
