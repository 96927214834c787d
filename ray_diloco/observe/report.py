"""What a person looks at after the run: `report.html`, one file that needs nothing from outside.

It is derived from `metrics.jsonl`, `events.jsonl`, `summary.json` and `config.yaml` alone, so it can be made again at
any time, also of a run that goes on or that died.  Everything that came from outside the program is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ray_diloco.observe.charts import Series, colour, line_chart, stacked_bars, timeline
from ray_diloco.observe.events import level_of
from ray_diloco.observe.lines import replace_text
from ray_diloco.observe.narration import narrate
from ray_diloco.observe.report_data import (
    Records,
    is_notable,
    lanes_of,
    load_records,
    mean_norm,
    move_x,
    per_island,
    phase_shares,
    time_bars,
)
from ray_diloco.observe.report_style import STYLE
from ray_diloco.observe.summary import active_seconds, mean_loss
from ray_diloco.observe.units import show_bytes, show_count, show_number, show_percent, show_seconds

PHASE_NAMES = ("train", "send", "wait", "adopt")
MOST_LANES = 24
MOST_EVENTS = 300


def write_report(directory: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Raises:
      CheckpointError: RD-581 or RD-583, a file of the run is broken; RD-582, the disk refuses.
    """
    path = directory / "report.html"
    replace_text(path, render(load_records(directory)))
    return path


def render(records: Records) -> str:
    """The whole page."""
    run = escape(str(records.figures["run"]))
    body = "".join(
        section(records)
        for section in (_head, _loss, _time, _exchange, _islands, _happenings, _sample, _configuration, _foot)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{run} · ray_diloco</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


# Sections, from top to bottom.


def _head(records: Records) -> str:
    figures = records.figures
    status = escape(str(figures["status"]))
    up, down = figures["bytes_up"], figures["bytes_down"]
    tiles = [
        ("held-out loss, nats per token", show_number(figures["final_eval_loss"])),
        ("held-out perplexity", show_number(figures["final_eval_ppl"])),
        ("train loss of the last round", show_number(figures["final_train_loss"])),
        ("rounds committed", str(figures["rounds"])),
        ("tokens committed", show_count(figures["tokens_committed"])),
        ("inner steps", show_count(figures["steps"])),
        (f"sent: {show_bytes(up)} up, {show_bytes(down)} down", show_bytes(up + down)),
        ("wall time", show_seconds(figures["wall_s"])),
        ("of rounds spent training", show_percent(figures["utilisation"])),
        ("parameters", show_count(figures.get("parameters"))),
    ]
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)
    return (
        f'<header><div class="title"><h1>{escape(str(figures["run"]))}</h1>'
        f'<span class="pill {status}">{status}</span></div>'
        f'<p class="lead">{escape(verdict(figures))}</p></header><div class="tiles">{shown}</div>'
    )


def verdict(figures: dict[str, Any]) -> str:
    """How the run ended and what the anchor has learnt, in two or three sentences."""
    rounds = f"{figures['rounds']} round{'' if figures['rounds'] == 1 else 's'}"
    reason = f": {figures['reason']}" if figures.get("reason") else ""
    ends = {
        "finished": f"Finished: {rounds} committed.",
        "stopped": f"Stopped with {rounds} committed{reason}. The same command goes on from there.",
        "failed": f"Failed with {rounds} committed{reason}. The same command goes on from there.",
    }
    words = [ends.get(figures["status"], f"It has not ended; {rounds} committed so far.")]
    loss, entropy = figures["final_eval_loss"], figures.get("unigram_entropy")
    if loss is None:
        words.append("The anchor has not been evaluated.")
    elif entropy is None:
        words.append(f"The anchor's held-out loss is {show_number(loss)} nats per token.")
    else:
        below = loss < entropy
        words.append(
            f"The anchor's held-out loss of {show_number(loss)} nats per token is {show_number(abs(entropy - loss))} "
            f"{'below' if below else 'above'} the unigram entropy of the text ({show_number(entropy)}): it has "
            f"{'learnt more than' if below else 'not yet learnt more than'} how frequent each token is."
        )
    return " ".join(words)


def _loss(records: Records) -> str:
    def chart(x_name: str, x: Callable[[int], float | None], show_x: Callable[[float], str]) -> str:
        series = per_island(records, "loss", mean_loss)
        held_out = Series("held-out, anchor", [(line["round"], line["loss"]) for line in records.evaluations], "ink")
        placed = [move_x(each, x) for each in [*series, held_out]]
        entropy = records.figures.get("unigram_entropy")
        levels = [] if entropy is None else [(entropy, f"unigram entropy {show_number(entropy)}")]
        return _legend(placed) + line_chart(placed, x_name, "loss, nats per token", levels=levels, show_x=show_x)

    by_round = chart("round", float, "{:g}".format)
    by_tokens = chart("tokens committed", records.tokens.get, show_count)
    return (
        '<h2>Loss</h2><div class="card tabs wide">'
        '<input type="radio" name="loss" id="by-round" checked><label for="by-round">by round</label>'
        '<input type="radio" name="loss" id="by-tokens"><label for="by-tokens">by tokens</label>'
        f'<div class="scroll">{by_round}</div><div class="scroll">{by_tokens}</div></div>'
    )


def _time(records: Records) -> str:
    if not records.islands:
        return ""
    shown = {name: time_bars(lines) for name, lines in records.islands.items()}
    shares = {name: phase_shares(lines) for name, lines in records.islands.items()}
    if len(shown) > 6:
        least = sorted(shares, key=lambda name: shares[name][0])[:3]
        every = [line for lines in records.by_round.values() for line in lines]
        shares = {"mean of all islands": phase_shares(every)} | {name: shares[name] for name in least}
        shown = {"mean of all islands": time_bars(every)} | {name: shown[name] for name in least}
    cards = "".join(
        f'<div class="card"><h3>{escape(name)}</h3>{_phase_legend(shares[name])}'
        + stacked_bars(bars, PHASE_NAMES, "round", "seconds", show_y=show_seconds)
        + "</div>"
        for name, bars in shown.items()
    )
    return f'<h2>Where the time of each round went</h2><div class="pair">{cards}</div>'


def _exchange(records: Records) -> str:
    if not records.commits:
        return ""
    norms = per_island(records, "pseudo_gradient_norm", mean_norm)
    norms.append(
        Series("movement of the anchor", [(line["round"], line["update_norm"]) for line in records.commits], "ink")
    )
    traffic = [
        Series("up", [(line["round"], line["bytes_up"]) for line in records.commits], 0),
        Series("down", [(line["round"], line["bytes_down"]) for line in records.commits], 1, dashed=True),
    ]

    size: dict[str, Any] = {"width": 520, "height": 260, "from_zero": True}
    norm_chart = line_chart(norms, "round", "L2 norm", **size)
    byte_chart = line_chart(traffic, "round", "bytes per round", show_y=show_bytes, show_tick=show_bytes, **size)
    return (
        '<h2>What was exchanged</h2><div class="pair">'
        f'<div class="card"><h3>Norm of the pseudo-gradients</h3>{_legend(norms)}{norm_chart}</div>'
        f'<div class="card"><h3>Bytes, all islands together</h3>{_legend(traffic)}{byte_chart}</div></div>'
    )


def _islands(records: Records) -> str:
    rows = []
    for island in records.figures["islands"]:
        lines = records.islands.get(island["name"], [])
        train_s = sum(line["train_s"] for line in lines)
        speed = island["tokens"] / train_s if train_s else None
        rows.append(
            [
                island["name"],
                island["region"] or "–",
                str(island["rounds_contributed"]),
                show_count(island["steps"]),
                show_count(island["tokens"]),
                show_count(speed),
                show_percent(phase_shares(lines)[0]) if lines else "–",
                str(island["restarts"]),
            ]
        )
    names = ["island", "region", "rounds", "steps", "tokens", "tokens/s", "training", "restarts"]
    return f'<h2>Islands</h2><div class="card scroll">{table(names, rows, numbers=range(2, 8))}</div>'


def _happenings(records: Records) -> str:
    seconds = active_seconds(records.events)
    told = [
        (at, event["event"], text)
        for at, event in zip(seconds, records.events, strict=True)
        if is_notable(event["event"]) and (text := narrate(event))
    ]
    if not told:
        return ""
    lanes = lanes_of(records.events, seconds)
    more = f'<p class="soft">and {len(lanes) - MOST_LANES} more islands</p>' if len(lanes) > MOST_LANES else ""
    half = MOST_EVENTS // 2
    cut = told if len(told) <= MOST_EVENTS else told[:half] + told[-half:]
    rows = "".join(
        f'<tr><td class="t">{show_seconds(at)}</td><td class="{level_of(kind)}">{escape(text)}</td></tr>'
        for at, kind, text in cut
    )
    left_out = (
        "" if cut is told else f'<p class="soft">the {len(told) - len(cut)} in the middle are in events.jsonl</p>'
    )
    return (
        f'<h2>What happened</h2><div class="card scroll wide">{timeline(lanes[:MOST_LANES], seconds[-1])}{more}</div>'
        f"<details{' open' if len(cut) <= 20 else ''}><summary>{len(told)} events</summary>"
        f'<div class="scroll"><table>{rows}</table></div>{left_out}</details>'
    )


def _sample(records: Records) -> str:
    text = records.figures.get("sample")
    return (
        f'<h2>What the anchor writes</h2><div class="card"><pre class="text">{escape(text)}</pre></div>' if text else ""
    )


def _configuration(records: Records) -> str:
    parts = ["<h2>Configuration</h2>" if records.config or records.figures.get("environment") else ""]
    if records.config:
        parts.append(
            f"<details><summary>config.yaml, every value</summary><pre>{escape(records.config)}</pre></details>"
        )
    environment = records.figures.get("environment") or {}
    if environment:
        rows = [[str(name), str(value)] for name, value in environment.items()]
        parts.append(f"<details><summary>Environment</summary><div>{table([], rows)}</div></details>")
    return "".join(parts)


def _foot(records: Records) -> str:
    digest, version = records.figures.get("anchor_digest"), records.figures.get("version")
    words = [f"ray_diloco {version}" if version else "ray_diloco"]
    if digest:
        words.append(f"anchor SHA-256 {digest}")
    return f"<footer>{escape(' · '.join(words))}</footer>"


# What the sections share.


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        f'<span><i style="background:{colour(each.colour)}"></i>{escape(each.name)}</span>' for each in series
    )
    return f'<div class="legend">{items}</div>'


def _phase_legend(share: Sequence[float]) -> str:
    items = "".join(
        f'<span><i class="box" style="background:var(--p{k})"></i>{name} {show_percent(part)}</span>'
        for k, (name, part) in enumerate(zip(PHASE_NAMES, share, strict=True))
    )
    return f'<div class="legend">{items}</div>'


def table(names: Sequence[str], rows: Sequence[Sequence[str]], numbers: range = range(0)) -> str:
    """A table; the columns `numbers` are set to the right."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="n"' if k in numbers else "" for k in range(len(cells))]
        inside = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{inside}</tr>"

    head = row("th", names) if names else ""
    return f"<table>{head}{''.join(row('td', cells) for cells in rows)}</table>"
