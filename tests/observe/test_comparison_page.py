import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from observe_fake_run import fake_run

from ray_diloco.observe.comparison import gather
from ray_diloco.observe.comparison_page import charts, has_marks, markdown, plain, standalone, write_page, write_results


@pytest.fixture
def results(tmp_path):
    for seed, name in enumerate(["first", "second"]):
        fake_run(tmp_path / "duo" / name, rounds=10, islands=2, seed=seed)
    fake_run(tmp_path / "duo/third", rounds=4, islands=2, status="failed")
    orderings = [{"claim": "a | b", "better": "first", "worse": "second", "source": "<us>", "within": 0.5}]
    orderings.append({"claim": "nobody knows", "better": "first", "worse": "third"})
    variants = {"first": ["inner.H=1"], "second": [], "third": ["algorithm=eager", "inner.H=3"]}
    return gather(tmp_path / "duo", variants, orderings, command="ray-diloco compare duo", common=["inner.lr=0.1"])


def cells(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def texts(svg):
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_table_has_a_row_for_each_variant(results):
    page = markdown(results)
    first = cells(page, "first")
    assert first[1] == f"{results.variants[0].loss:.3f}"
    assert first[2] == "973k", "19 contributions of 51 200 tokens"
    assert first[3] == first[4] == "91.2 MB", "19 of 4 800 064 bytes"
    assert first[-2:] == ["10", "`inner.H=1`"]
    assert cells(page, "third")[1] == "failed"
    assert cells(page, "third")[-1] == "`algorithm=eager` `inner.H=3`"


def test_the_page_says_what_makes_it_again_and_which_claims_hold(results):
    page = markdown(results)
    assert "\n    ray-diloco compare duo\n" in page
    assert "Measured 2026-09-21" in page
    assert "All variants: `inner.lr=0.1`." in page
    low, high = results.variants[0].loss, results.variants[1].loss
    numbers = f"first {low:.3f}, second {high:.3f}, allowed 0.5 above"
    assert f"| a \\| b | &lt;us> | {numbers} | yes |" in page
    assert "| nobody knows |  | first" in page and page.endswith("third – | – |\n\nAll variants: `inner.lr=0.1`.\n")
    assert "- `third` failed: no islands left" in page


def test_a_console_gets_aligned_columns_and_the_claims_in_words(results):
    lines = plain(results).splitlines()
    assert lines[0].startswith("variant  held-out loss")
    assert len({len(line) for line in lines[:4]}) == 1
    assert any(line.startswith("holds: a | b (first ") for line in lines)
    assert any(line.startswith("not measured: nobody knows") for line in lines)


def test_charts_are_files_that_stand_alone_and_show_what_has_finished(results):
    drawn = charts(results)
    assert list(drawn) == ["loss_over_tokens", "loss_over_bytes"]
    for chart in drawn.values():
        svg = standalone(chart)
        words = texts(svg)
        assert {"first", "second"} <= set(words) and "third" not in words
        assert "--c1:" in svg and ".line {" in svg, "it brings its colours along"


def test_charts_leave_out_the_steep_beginning(results):
    shown = [int(round) for round in re.findall(r"first, tokens (\d+)k", charts(results)["loss_over_tokens"])]
    assert min(shown) >= 0.25 * 973
    assert max(shown) == 973


def test_runs_that_send_nothing_have_no_chart_of_bytes(results):
    silent = [
        replace(each, points=tuple(replace(point, bytes=0) for point in each.points)) for each in results.variants
    ]
    assert list(charts(replace(results, variants=tuple(silent)))) == ["loss_over_tokens"]
    assert charts(replace(results, variants=())) == {}


def test_all_results_are_written_beside_the_runs(results, tmp_path):
    write_results(tmp_path / "duo", results)
    folder = tmp_path / "duo"
    content = json.loads((folder / "compare.json").read_text())
    assert [each["name"] for each in content["variants"]] == ["first", "second", "third"]
    assert content["orderings"][0]["holds"] is True
    assert "![loss over bytes](loss_over_bytes.svg)" in (folder / "compare.md").read_text()
    page = (folder / "compare.html").read_text()
    assert page.count("<svg ") == 2
    assert "&lt;us&gt;" in page and "<us>" not in page
    assert 'href="first/report.html"' in page
    assert (folder / "loss_over_tokens.svg").read_text().startswith("<svg ")


def test_a_page_is_written_between_its_marks_only_and_again_the_same(results, tmp_path):
    page = tmp_path / "docs/page.md"
    page.parent.mkdir()
    page.write_text("a\n<!-- comparison: duo -->\nwhat was before\n<!-- end of comparison -->\nb \\1\n")
    assert has_marks(page.read_text(), "duo") and not has_marks(page.read_text(), "trio")
    write_page(page, results)
    text = page.read_text()
    assert text.startswith("a\n<!-- comparison: duo -->\n") and text.endswith("<!-- end of comparison -->\nb \\1\n")
    assert "what was before" not in text
    for target in re.findall(r"\]\((figures/\S+\.svg)\)", text):
        assert (page.parent / target).is_file()
    assert len(re.findall(r"\]\(figures/", text)) == 2
    write_page(page, results)
    assert page.read_text() == text
