"""`docs/running.md` against the code: events, metrics, summary, states, exit codes, and the replay of a trace."""

import ast
import dataclasses
import json
import re
from pathlib import Path

from docs_pages import ROOT, code_block, names, rows, section

import ray_diloco
from ray_diloco import errors
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.observe.events import EVENTS
from ray_diloco.observe.metrics import CommitMetrics, EvalMetrics, IslandMetrics
from ray_diloco.observe.summary import Summary
from ray_diloco.rounds.members import TRANSITIONS, State

PAGE = "docs/running.md"
METRICS = {kind.kind: kind for kind in (IslandMetrics, CommitMetrics, EvalMetrics)}


def written_events(said):
    """Kind → fields of every event that the code writes, from its calls.

    A call that hands over a mapping (`**fields`) does not say which; what the page says is taken for those.
    """
    found = {}
    for path in (ROOT / "ray_diloco").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                kind = getattr(node.args[0], "value", None)
                if node.func.attr in ("event", "append") and isinstance(kind, str) and kind in EVENTS:
                    names_of = {keyword.arg for keyword in node.keywords}
                    fields = names_of - {None} | said[kind] if None in names_of else names_of
                    assert found.setdefault(kind, fields) == fields, f"{kind} has two forms"
    return found


def said_events():
    table = rows(section(PAGE, "### events.jsonl"))
    return {names(kind)[0]: set(names(fields)) for kind, fields, _ in table}


def fields_of(kind):
    return {field.name for field in dataclasses.fields(kind)}


def excerpts(heading):
    (block,) = re.findall(r"^```json\n(.*?)^```$", section(PAGE, heading), re.MULTILINE | re.DOTALL)
    return [json.loads(line) for line in block.splitlines()]


def test_the_page_has_every_event_that_is_written_with_its_fields():
    said = said_events()
    assert said == written_events(said)


def test_the_events_that_the_page_shows_have_these_fields():
    said, shown = said_events(), excerpts("### events.jsonl")
    assert len(shown) > 4
    for event in shown:
        assert event.keys() == {"t", "seq", "event"} | said[event["event"]]


def test_the_page_has_every_field_of_metrics():
    said = {kind: set() for kind in METRICS}
    for kind, cell, _ in rows(section(PAGE, "### metrics.jsonl")):
        assert said[kind].isdisjoint(names(cell)), "a field stands in one row"
        said[kind] |= set(names(cell))
    assert said == {kind: fields_of(metrics) - {"round"} for kind, metrics in METRICS.items()}


def test_the_metrics_that_the_page_shows_have_these_fields():
    shown = excerpts("### metrics.jsonl")
    assert [line["kind"] for line in shown] == list(METRICS)
    for line in shown:
        assert line.keys() == {"kind", "t"} | fields_of(METRICS[line["kind"]])


def test_the_page_has_every_key_of_the_summary():
    table = rows(section(PAGE, "### summary.json"))
    assert sorted(name for cell, _ in table for name in names(cell)) == sorted(fields_of(Summary))


def test_the_table_of_states_is_that_of_the_code():
    table = [row for row in rows(section(PAGE, "## When something dies")) if row[0].strip("`") in list(State)]
    said = {names(cell)[0]: set(names(to)) for cell, _, to in table}
    gone = {State.LOST, State.LEFT, State.QUARANTINED}
    begun = [state for state in State if state not in {State.VACANT, State.DONE, *gone}]
    assert all(gone <= TRANSITIONS[state].keys() for state in begun)
    assert said == {str(a): {str(b) for b in TRANSITIONS[a].keys() - (gone if a in begun else set())} for a in State}


def test_the_page_has_the_exit_codes_of_the_command():
    said = {int(code) for code, _ in rows(section(PAGE, "## How it ends"))}
    assert said == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_the_page_names_the_files_of_a_run_directory():
    table = rows(section(PAGE, "## The run directory").split("\n### ")[0])
    said = {names(cell)[0].split("/")[0] for cell, _ in table}
    directory = RunDirectory(Path("runs"), "any")
    kept = ("config", "events", "metrics", "checkpoints", "summary", "report", "export", "address", "lock_file")
    assert said == {getattr(directory, name).name for name in kept} | {"trace", "wandb", "points"}


def test_a_trace_replays_by_the_lines_of_the_page(cluster, workshop, capsys):
    result = ray_diloco.train(
        model={"builder": "sums:model", "config": {"width": 16}},
        data={"builder": "sums:documents", "sequence_length": 32, "heldout_blocks": 4},
        tokenizer={"builder": "sums:tokenizer"},
        inner={"H": 3, "lr": 0.01},
        trace={"contributions": True},
        export={"enabled": False},
        run={"name": "first", "rounds": 3},
    )
    assert result["rounds"] == 3
    capsys.readouterr()
    exec(code_block(PAGE, "round.json"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [folder for folder, _ in printed] == ["round-000001", "round-000002", "round-000003"]
    assert all(0 <= float(difference) < 1e-6 for _, difference in printed)

    # The lines notice what is wrong: with another momentum they do not arrive at the anchors.
    for path in workshop.glob("runs/first/trace/*/round.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"momentum": 0.8}))
    exec(code_block(PAGE, "round.json"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 1e-4
