"""The tables of algorithms in the pages are those that the files make."""

from pathlib import Path

import pytest

from ray_diloco.config.table import DEFAULT, algorithm_names, blocks_table, sources_table, with_tables

ROOT = Path(__file__).resolve().parents[2]


def cells(algorithm: str, table: list[str]) -> list[str]:
    (line,) = [line for line in table if line.startswith(f"| `{algorithm}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("page, mark", [("README.md", "blocks"), ("docs/algorithms.md", "sources")])
def test_a_page_has_the_table_that_the_files_make(page: str, mark: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert f"<!-- algorithms: {mark} -->" in text
    assert with_tables(text) == text, f"write it anew: python -m ray_diloco.config.table {page}"


def test_the_tables_have_every_algorithm() -> None:
    assert len(algorithm_names()) >= 32
    blocks, sources = blocks_table(), sources_table()
    for name in algorithm_names():
        assert len(cells(name, blocks)) == 10
        assert len(cells(name, sources)) == 2


def test_a_row_says_what_a_method_has_and_a_dash_what_it_shares_with_the_defaults() -> None:
    table = blocks_table()
    assert cells("diloco", table) == ["AdamW", "500", *[DEFAULT] * 6, "nesterov 0.7, 0.9", DEFAULT]
    assert cells("streaming", table) == [
        "AdamW", "100, τ 1", "3 blocks, strided, in turn", "e3m0", DEFAULT, "uniform", DEFAULT, DEFAULT,
        "nesterov 0.4, 0.9", "mix, 0.5",
    ]  # fmt: skip
    assert cells("sparseloco", table)[3] == "topk 128 in 2bit, feedback 0.95"
    assert cells("noloco", table)[4] == "pairs, own anchors"
    assert cells("decoupled", table)[5] == "≥ 1, grace 0.5 s, carry, tokens2 per step"


def test_a_channel_has_a_row_below_its_method() -> None:
    table = blocks_table()
    at = next(k for k, line in enumerate(table) if line.startswith("| `sparta_diloco` |"))
    assert table[at + 1].startswith("| + sparta |  | 1 | random 0.005 |")


def test_a_source_has_a_link() -> None:
    assert cells("diloco", sources_table())[1].startswith("DiLoCo, [2311.08105](https://arxiv.org/abs/2311.08105)")


def test_only_what_stands_between_marks_is_written() -> None:
    page = "a\n<!-- algorithms: sources -->\nold\n<!-- end of algorithms -->\nb\n"
    lines = with_tables(page).splitlines()
    assert (lines[0], lines[-1]) == ("a", "b")
    assert "old" not in lines
    assert lines[2] == "| `algorithm=` | what it changes | source |"
