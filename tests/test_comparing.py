"""How variants are run, without a Ray: runs are those that a test fakes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_diloco import api, comparing
from ray_diloco.cli import main
from ray_diloco.config.comparison import read_comparison
from ray_diloco.config.show import config_yaml
from ray_diloco.errors import ConfigError, DataError

sys.path.insert(0, str(Path(__file__).parent / "observe"))
from observe_fake_run import fake_run

TRIO = "common: {run.rounds: 4}\nvariants: {one: {inner.H: 1}, two: {inner.H: 2}, three: {inner.H: 3}}\n"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Names of the variants that were run, each as a fake run of four rounds; `faults` has what befalls which."""
    monkeypatch.chdir(tmp_path)
    Path("trio.yaml").write_text(TRIO)
    begun, faults = [], {}

    def run(composed, quiet=False):
        config = composed.config
        begun.append(config.run.name)
        fault = faults.get(config.run.name, "finished")
        if isinstance(fault, BaseException):
            raise fault
        folder = fake_run(Path(config.run.root, config.run.name), config.run.rounds, 2, status=fault)
        (folder / "config.yaml").write_text(config_yaml(composed))
        return {"status": fault}

    monkeypatch.setattr(api, "run", run)
    # The Ray of other tests may be up in this process.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray_diloco.cluster.session._start", lambda config, cpus: begun.append(f"ray with {cpus:g}"))
    return SimpleNamespace(begun=begun, faults=faults)


def test_variants_run_in_order_on_one_ray_and_are_not_run_again(runs, capsys):
    assert main(["compare", "--config", "trio.yaml"]) == 0
    assert runs.begun == ["ray with 2", "one", "two", "three"]
    printed = capsys.readouterr().out
    assert "[2/3] two: inner.H=2" in printed
    assert printed.endswith("\nruns/trio/compare.html\n")
    assert main(["compare", "--config", "trio.yaml", "--quiet"]) == 0
    assert len(runs.begun) == 4
    assert capsys.readouterr().out == ""


def test_a_variant_that_fails_is_reported_and_the_others_go_on(runs, capsys):
    runs.faults |= {"one": DataError(302, "no file matches", "correct the path"), "two": ZeroDivisionError("x")}
    assert main(["compare", "--config", "trio.yaml"]) == 1
    assert runs.begun[1:] == ["one", "two", "three"]
    printed = capsys.readouterr()
    assert "one failed: RD-302: no file matches\n  mend: correct the path" in printed.err
    assert "Traceback" in printed.err, "a defect is shown whole"
    assert "one failed: no file matches\n" in printed.out
    assert "two failed: ZeroDivisionError: x\n" in printed.out
    runs.faults.clear()
    assert main(["compare", "--config", "trio.yaml", "--quiet"]) == 0
    assert runs.begun[5:] == ["one", "two"]


def test_a_signal_ends_the_comparison_and_the_same_command_goes_on(runs):
    runs.faults["two"] = "stopped"
    assert main(["compare", "--config", "trio.yaml", "--quiet"]) == 130
    assert runs.begun[1:] == ["one", "two"]
    runs.faults.clear()
    assert main(["compare", "--config", "trio.yaml", "--quiet"]) == 0
    assert runs.begun[4:] == ["two", "three"]


def test_a_run_with_other_settings_or_more_rounds_is_not_taken_for_a_variant(runs):
    assert main(["compare", "--config", "trio.yaml", "--quiet"]) == 0
    before = list(runs.begun)
    for arguments, key in (
        (["inner.lr=0.5"], "inner.lr"),
        (["run.rounds=3"], "run.rounds"),
        (["run.seed=1"], "run.seed"),
    ):
        comparison = read_comparison(None, arguments, "trio.yaml")
        with pytest.raises(ConfigError, match=f"RD-151: .* other settings: {key}\n"):
            comparing.compare(comparison, ["x"], quiet=True)
    assert runs.begun == before
    assert main(["compare", "--config", "trio.yaml", "--quiet", "observe.quiet=true", "run.rounds=5"]) == 0
    assert runs.begun[-3:] == ["one", "two", "three"], "a longer run goes on"


def test_a_page_without_a_place_is_refused_before_anything_runs(runs, capsys):
    Path("page.md").write_text("<!-- comparison: other -->\n<!-- end of comparison -->\n")
    assert main(["compare", "--config", "trio.yaml", "--write-docs", "page.md"]) == 2
    assert capsys.readouterr().err.startswith("RD-152: page.md has no place for the comparison 'trio'")
    assert runs.begun == []
    Path("page.md").write_text("<!-- comparison: trio -->\n<!-- end of comparison -->\n")
    assert main(["compare", "--quiet", "--config", "trio.yaml", "--write-docs", "page.md", "inner.lr=0.1"]) == 0
    text = Path("page.md").read_text()
    assert "\n    ray-diloco compare --config trio.yaml inner.lr=0.1\n" in text
    assert "| `three` |" in text
