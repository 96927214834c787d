"""`docs/architecture.md` names modules, functions and tables that exist."""

import importlib
import re

from docs_pages import ROOT, names, page, rows, section

from ray_diloco.cluster.trace import TraceActor
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.rounds import ports
from ray_diloco.rounds.loop import Run
from ray_diloco.rounds.position import Position
from ray_diloco.rounds.voyage import Voyage

PAGE = "docs/architecture.md"


def modules(text):
    return set(re.findall(r"\b[a-z_]+(?:/[a-z_]+)*\.py\b", text))


def test_every_module_that_the_page_names_exists():
    found = modules(page(PAGE))
    assert len(found) > 40
    missing = [path for path in found if not (ROOT / "ray_diloco" / path).exists() and not (ROOT / path).exists()]
    assert missing == []


def test_the_page_leads_to_every_folder_of_the_package():
    folders = {path.parent.name for path in (ROOT / "ray_diloco").glob("*/__init__.py")}
    assert folders - {path.split("/")[0] for path in modules(page(PAGE))} == {"provenance"}


def test_every_table_that_a_change_needs_is_where_the_page_says():
    table = section(PAGE, "## Where to change what")
    said = re.findall(r"`([A-Z]+)` (?:\(|in )`([a-z/]+)\.py`", table)
    assert len(said) == 8
    for name, module in said:
        assert isinstance(getattr(importlib.import_module(f"ray_diloco.{module.replace('/', '.')}"), name), dict)


def test_the_words_of_the_loop_are_those_of_the_ports():
    calls = {
        name for row in rows(section(PAGE, "## The loop")) for name in names(row[1]) if "." in name and "/" not in name
    }
    assert calls == {"Island.train", "Island.emit", "Anchor.prepare", "Island.adopt"}
    for call in calls:
        owner, method = call.split(".")
        assert callable(getattr({"Run": Run}.get(owner) or getattr(ports, owner), method))
    assert all(callable(each) for each in (Run._slot, Voyage.sail, Position.credit, Position.resume, TraceActor.remote))


def test_the_chunks_have_the_size_that_the_page_says():
    assert f"chunks of {CHUNK // 1024}k elements" in page(PAGE)
