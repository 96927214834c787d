"""Plans and tables as text for people; everything has a form for scripts as well (`--json`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ray_diloco.observe.units import MISSING, show_bytes, show_count, show_number, show_percent, show_seconds

if TYPE_CHECKING:
    from ray_diloco.planning.estimate import Plan, Spend, Times
    from ray_diloco.planning.published import Cell
    from ray_diloco.planning.search import Option
    from ray_diloco.planning.timing import Link

# Options that are shown.
_SHOWN = 8


def show_plan(plan: Plan, found: Sequence[Option] = ()) -> str:
    """The whole plan."""
    lines = [
        f"{plan.model}, {show_count(plan.parameters)} parameters, {len(plan.islands)} islands, {plan.algorithm}: "
        f"H {plan.H}, delay {plan.delay}, {plan.fragments} fragment(s), {plan.codec[0]} up, {plan.codec[1]} down"
    ]
    lines += [f"  {name:<12} {value}" for name, value in _rows(plan)]
    if found:
        lines += ["", *_option_lines(found)]
    return "\n".join(lines)


def show_tables(cells: Sequence[Cell], spans: Sequence[tuple[str, float, float]]) -> str:
    """The published tables, each cell beside the formula's."""
    lines = ["Gbit/s that a utilisation needs (Streaming DiLoCo, 2501.18512): formula on the paper's grid / published"]
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.model, cell.method), []).append(cell)
    head = "".join(f"{show_percent(cell.utilisation):>14}" for cell in next(iter(rows.values())))
    lines.append(f"  {'':<20}{head}")
    for (model, method), row in rows.items():
        values = "".join(f"{f'{show_number(c.grid, 3)} / {show_number(c.published, 3)}':>14}" for c in row)
        lines.append(f"  {model:<5}{method:<15}{values}")
    lines += ["", "Utilisation of INTELLECT-1 (2412.01152), 100 steps in 38 minutes: formula / published"]
    lines += [f"  {span:<10} {ours:.1f} % / {published:.1f} %" for span, ours, published in spans]
    return "\n".join(lines)


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    up, down = max(plan.bytes_up.values()), plan.bytes_down
    yield "a round", f"{show_bytes(up)} up and {show_bytes(down)} down for each island"
    yield (
        "the run",
        f"{show_bytes(plan.run_bytes_up)} up and {show_bytes(plan.run_bytes_down)} down in {plan.rounds} rounds",
    )
    yield "to join", f"{show_bytes(plan.start_bytes)}"
    for name in plan.islands:
        yield f"link {name}", _link(*plan.links[name])
    yield from _time_rows(plan.times)
    m = plan.memory
    yield (
        "memory",
        f"rank {show_bytes(m.model + m.exchange)} ({show_bytes(m.exchange)} of it for the exchange) and activations, "
        f"anchor {show_bytes(m.shard)} in each of {plan.shards}, object store {show_bytes(m.store)}, "
        f"driver {show_bytes(m.driver)}",
    )
    for spend in plan.spend:
        if (text := _spend(spend)) is not None:
            yield f"in {spend.region}", text
    yield "H in loss", f"{_part(plan.loss.H)}: {plan.loss.H_source}"
    yield "codec", f"{_part(plan.loss.codec)}: {plan.loss.codec_source}"


def _time_rows(times: Times | None) -> Iterator[tuple[str, str]]:
    if times is None:
        yield "time", "not known: set plan.step_seconds, the seconds of an inner step of an island"
        return
    steps = sorted(set(times.step_s.values()))
    span = " to ".join(show_seconds(s) for s in (steps[:1] + steps[-1:] if len(steps) > 1 else steps))
    yield "a step", f"{span} ({times.step_source})"
    yield (
        "round time",
        f"{show_seconds(times.round_s)}: {show_seconds(times.train_s)} of steps, "
        f"{show_seconds(times.exposed_s)} of exchange exposed",
    )
    yield "islands train", f"{show_percent(times.utilisation)} of the time; the run takes {show_seconds(times.run_s)}"
    yield "tokens", f"{show_count(times.tokens_per_day)} a day"
    peak = f"{show_number(times.peak_mbit)} Mbit/s" if times.peak_mbit else "as fast as the link"
    yield (
        "bandwidth",
        f"{show_number(times.goal_mbit)} Mbit/s each way for 95% of the time; at the peak {peak}; "
        f"{show_number(times.average_mbit)} Mbit/s on average for all islands",
    )


def _option_lines(found: Sequence[Option]) -> Iterator[str]:
    yield "within the budget of loss (plan.quality), the best of those tried; losses as published:"
    yield f"  {'H':>4} {'codec':<6}{'fragments':>10}{'delay':>6}{'trains':>8}{'loss':>8}{'up':>10}  source"
    for option in found[:_SHOWN]:
        yield (
            f"  {option.H:>4} {option.codec:<6}{option.fragments:>10}{option.delay:>6}"
            f"{show_percent(option.utilisation):>8}{_part(option.loss):>8}{show_bytes(option.bytes_up):>10}"
            f"  {option.source}"
        )


def _link(link: Link, source: str) -> str:
    if source == "beside":
        return "beside the anchor: no limit"
    if source == "none":
        return "no limit known: give plan.up_mbit, or let the doctor measure"
    up, down = (show_number(rate * 8 / 1e6) if rate else "unlimited" for rate in (link.up, link.down))
    return f"{up} Mbit/s up, {down} down, {show_seconds(link.rtt_s)} there and back ({source})"


def _spend(spend: Spend) -> str | None:
    parts = [
        f"{show_number(spend.dollars)} dollars" if spend.dollars is not None else None,
        f"{show_number(spend.kwh)} kWh" if spend.kwh is not None else None,
        f"{show_number(spend.kg_co2)} kg CO2" if spend.kg_co2 is not None else None,
    ]
    known = [part for part in parts if part]
    return f"{', '.join(known)} for {spend.islands} island(s)" if known else None


def _part(cost: float | None) -> str:
    return MISSING if cost is None else f"{100 * cost:+.1f}%"
