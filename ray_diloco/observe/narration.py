"""Events in words: one line of plain text per event, the same in every log and display.

A sentence is a template over the event's fields; what stands in square brackets is left out when one of its fields is
missing, so an event with fewer fields still reads well.  Units come from the names of fields (`_s`, `bytes`, `tokens`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ray_diloco.observe.units import MISSING, show_bytes, show_count, show_number, show_seconds

# kind → sentence; None: too frequent to be told.
SENTENCES: dict[str, str | None] = {
    "run_started": "run {run} starts[: {islands} for {rounds} rounds]",
    "run_resumed": "run {run} goes on from round {round}[ of {rounds}][, {tokens} tokens committed]",
    "run_expected": "expected of a round: {bytes_up} up, {bytes_down} down[, {round_s}, of which {train_s} steps]",
    "log_repaired": "a torn line[ of {bytes}] was cut from the end of {file}",
    "metrics_truncated": "{lines} lines of metrics after round {round} dropped; those rounds are done again",
    "island_launching": "island {island} starts[ again, incarnation {incarnation}]",
    "island_reattached": "island {island} taken over from the driver before; its inner state is {inner}",
    "island_joined": "island {island} joined[ in {region}][ as incarnation {incarnation}]",
    "island_lost": "island {island} lost[: {reason}]",
    "stacks_dumped": "where the ranks of island {island} stood is in events.jsonl",
    "anchor_shard_lost": "anchor shard {shard} lost[: {reason}]",
    "anchor_shard_replaced": "anchor shard {shard} has a successor[ after {recovery_s}]",
    "island_unplaced": "no room for island {island}[: {reason}]; it comes when there is some",
    "drain_requested": "island {island} is asked to leave[: {reason}]",
    "island_left": "island {island} left[: {reason}]",
    "island_quarantined": "island {island} is in quarantine[ until round {until}][: {reason}]",
    "scale_requested": "wanted are now {islands}",
    "islands_awaited": "waiting for islands: {have} of {need} are here[; missing: {islands}]",
    "islands_enough": "{have} islands are here, the run goes on[ after {waited_s}]",
    "island_strayed": "island {island} has strayed: loss {loss}[ where {usual} is usual]; it goes back to the anchor",
    "round_laid_out": None,
    "round_opened": None,
    "contribution_rejected": "contribution of island {island} to round {round} refused[ (RD-{number})][: {reason}]",
    "round_closed": "[round {round} closed without {absent}]",
    "fragment_committed": None,
    "round_committed": (
        "round {round}[/{rounds}] committed[ · loss {loss}][ · {islands}][ · {tokens} tokens]"
        "[ · up {bytes_up}][ · down {bytes_down}]"
    ),
    "round_aborted": "round {round} given up: no contribution could be merged",
    "checkpoint_written": None,
    "checkpoint_postponed": None,
    "checkpoint_failed": "checkpoint of round {round} failed[: {reason}]; the run goes on",
    "storage_awaited": "waiting for the storage: {behind} rounds are not durable[, the last that is is {durable}]",
    "storage_back": "round {durable} is durable, the run goes on[ after {waited_s}]",
    "inner_state_restored": "island {island} took up its inner optimiser state[ of round {round}]",
    "inner_state_reset": "inner optimiser state of island {island} begins anew[: {reason}]",
    "progress_taken_up": "island {island} goes on with step {done} of {steps} of its segment",
    "progress_ignored": "the progress of island {island} is not taken up[: {reason}]",
    "network_counted": "the network of {machines} machines carried {bytes_sent}, with all that is no payload",
    "evaluation": "held-out[ after round {round}]: loss {loss}[ · perplexity {ppl}][ · {blocks} blocks]",
    "stop_requested": "stop requested[ after round {round}]",
    "run_finished": "finished[: {rounds} rounds][, {tokens} tokens][ in {wall_s}]",
    "run_stopped": "stopped[ after round {round}][ of {rounds}][: {reason}]; the same command goes on from here",
    "run_failed": "failed[ after round {round}][: {reason}]",
    "warning": "warning: {text}",
}


def narrate(event: Mapping[str, Any]) -> str | None:
    """One line of text for `event`, or None if its kind is not told."""
    kind = event["event"]
    sentence = SENTENCES.get(kind, kind.replace("_", " "))
    return _fill(sentence, event) or None if sentence else None


def _fill(sentence: str, fields: Mapping[str, Any]) -> str:
    def optional(match: re.Match[str]) -> str:
        part = match.group(1)
        return part if all(_told(name, fields.get(name)) for name in re.findall(r"{(\w+)}", part)) else ""

    template = re.sub(r"\[([^\]]*)\]", optional, sentence)
    return re.sub(r"{(\w+)}", lambda match: _show(match.group(1), fields.get(match.group(1))), template)


def _told(name: str, value: Any) -> bool:
    """Whether a field says something: it is there, and the first incarnation of an island is the usual one."""
    return value not in (None, [], ()) and not (name == "incarnation" and value == 0)


def _show(name: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, list | tuple):
        names = [str(item) for item in value]
        return ", ".join(names if len(names) <= 8 else [*names[:6], f"… ({len(names)} in all)"])
    if isinstance(value, bool | str):
        return " ".join(str(value).split())
    if name.endswith("_s"):
        return show_seconds(value)
    if name.startswith("bytes"):
        return show_bytes(value)
    if name == "tokens":
        return show_count(value)
    return show_number(value) if isinstance(value, float) else str(value)
