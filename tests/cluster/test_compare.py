"""`ray-diloco compare` on a real Ray: two variants at equal tokens, their results, and the command a second time."""

import json

import pytest
from cluster_runs import HERE, manifest

from ray_diloco.cli import main

PAIR = HERE / "pair.yaml"


@pytest.fixture
def arguments(quick, warm):
    settings = [f"{key}={value}" for key, value in quick.common.items()]
    with warm.runs():
        yield ["compare", "--config", str(PAIR), "--quiet", *settings]


def test_two_variants_are_trained_and_laid_side_by_side_and_are_not_trained_again(quick, arguments, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- comparison: pair -->\n<!-- end of comparison -->\nafter\n")
    assert main([*arguments, "--write-docs", str(page)]) == 0
    folder = quick.folder("pair")
    results = json.loads((folder / "compare.json").read_text())
    often, coded = results["variants"]
    assert [often["name"], coded["name"]] == ["often", "coded"]
    assert often["tokens"] == coded["tokens"] == 8 * 2 * 2 * 2 * 32
    assert often["loss"] == often["points"][-1]["loss"]
    assert often["bytes_up"] > 8 * coded["bytes_up"], "twice the rounds, and four bits instead of 32"
    assert 0 < coded["exposed_s"] < coded["wall_s"]
    assert results["orderings"][0]["holds"] is True
    assert "| `often` |" in page.read_text() and page.read_text().endswith("after\n")
    assert (folder / "loss_over_bytes.svg").is_file() and (tmp_path / "figures/pair_loss_over_bytes.svg").is_file()

    commits = [manifest(folder / name) for name in ("often", "coded")]
    assert main(arguments) == 0
    assert [manifest(folder / name) for name in ("often", "coded")] == commits
    assert json.loads((folder / "compare.json").read_text())["variants"] == results["variants"]


def test_a_run_that_was_made_with_other_settings_is_not_taken_for_a_variant(quick, arguments, capsys):
    assert main(arguments) == 0
    assert main([*arguments, "inner.lr=0.02"]) == 2
    assert "RD-151: " in (said := capsys.readouterr().err)
    assert "was made with other settings: inner.lr\n" in said
