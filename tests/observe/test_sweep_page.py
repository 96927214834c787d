"""The results of a sweep and its page, from run directories that a test fakes."""

import xml.etree.ElementTree as ET

import pytest
from observe_fake_run import fake_run

from ray_diloco.observe.fields import Cell, Strand, goodness, heat_map, parallel
from ray_diloco.observe.sweep import Known, counts, gather_sweep
from ray_diloco.observe.sweep_page import cells, html, markdown, pair_of, plain, write_sweep

KEYS = ("inner.H", "outer.lr")


@pytest.fixture
def results(tmp_path):
    known = []
    for label, parameters, status, rounds in (
        ("H20-lr0.5", {"inner.H": 20, "outer.lr": 0.5}, "finished", 4),
        ("H20-lr1", {"inner.H": 20, "outer.lr": 1.0}, "halted", 2),
        ("H50-lr0.5", {"inner.H": 50, "outer.lr": 0.5}, "finished", 8),
        ("H50-lr1", {"inner.H": 50, "outer.lr": 1.0}, "refused", 0),
    ):
        run = f"s-{label}"
        if rounds:
            fake_run(tmp_path / run, rounds, 2, status="finished" if status == "finished" else "stopped")
        reason = {"halted": "others were ahead", "refused": "RD-115: <bf16>"}.get(status)
        known.append(Known(label, run, parameters, status, reason))
    words = {"command": "ray-diloco tune", "common": ("model=tiny",), "chosen": "All combinations", "planned": 5}
    return gather_sweep(tmp_path, known, keys=KEYS, **words)


def test_the_best_is_the_lowest_of_those_that_finished(results):
    finished = [trial for trial in results.trials if trial.status == "finished"]
    assert [trial.status for trial in results.trials] == ["finished", "finished", "halted", "refused"]
    assert results.best == min(finished, key=lambda trial: trial.loss).label == results.trials[0].label
    assert results.trials[2].loss is not None, "the newest loss of a halted trial is shown"
    assert counts(results) == "2 finished, 1 halted, 1 refused, 1 not begun"


def test_the_tables_say_what_became_of_each_trial(results):
    text = plain(results)
    assert text.splitlines()[0].split()[:3] == ["trial", "H", "lr"]
    assert "3 halted: others were ahead" in text
    assert "| 4 | 50 | 1 | refused |" in markdown(results)


def test_the_page_is_whole_and_escapes_what_came_from_outside(results, tmp_path):
    write_sweep(tmp_path, results)
    page = (tmp_path / "sweep.html").read_text()
    assert page == html(results)
    assert "RD-115: &lt;bf16&gt;" in page and "<bf16>" not in page
    assert f'<a href="s-{results.best}/report.html">1</a>' in page
    for chart in page.split("<svg")[1:]:
        ET.fromstring("<svg" + chart.split("</svg>")[0] + "</svg>")
    assert page.count("<svg") == 3


def test_a_place_of_the_heat_map_is_the_best_of_its_trials(results):
    found = cells(results, *KEYS)
    assert found[20, 0.5].value is not None and found[20, 1.0].value is None
    assert found[20, 1.0].words == "halted"
    assert pair_of(("outer.momentum", "outer.lr", "inner.H")) == ("inner.H", "outer.lr")
    assert pair_of(("a",)) is None


def test_the_lowest_of_a_heat_map_is_framed_and_strongest():
    drawn = heat_map({(1, 1): Cell(2.0, "", ""), (2, 1): Cell(1.0, "", "")}, "x", "y")
    rects = list(ET.fromstring(drawn).iter("rect"))
    assert [each.get("class") for each in rects] == ["heat", "best"]
    assert "fill-opacity:0.90" in rects[1].get("style") and "fill-opacity:0.06" in rects[0].get("style")


def test_an_outlier_does_not_hide_the_others():
    losses = [1.0, 1.1, 1.2, 50.0]
    shades = [goodness(loss, losses) for loss in losses]
    assert shades == sorted(shades, reverse=True)
    assert shades[0] == 1 and shades[1] - shades[2] > 0.1 and shades[3] == 0


def test_axes_of_words_and_of_numbers_bear_all_trials():
    strands = [
        Strand(f"{k}", {"algorithm": "ab"[k % 2], "outer.lr": 10.0**-k, "flag": bool(k % 2)}, 1.0 + k)
        for k in range(12)
    ]
    drawn = ET.fromstring(parallel(strands, ("algorithm", "outer.lr", "flag")))
    lines = list(drawn.iter("path"))
    assert len(lines) == 12
    assert lines[-1].get("style").startswith("stroke:var(--good)"), "the best lies on top"
