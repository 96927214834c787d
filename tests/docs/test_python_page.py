"""`docs/python.md` does what it says: its example runs as it stands, and the ways to call `train` ask for one run."""

import re
import runpy

import pytest
from docs_pages import code_block, commands, page, rows, section
from safetensors.numpy import load_file

import ray_diloco
from ray_diloco import api
from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.config.schema import ModelConfig
from ray_diloco.data.blocks import prepare
from ray_diloco.errors import DilocoError
from ray_diloco.inner.builder import build_from_path

PAGE = "docs/python.md"
SUMMARY = {"status": "finished", "rounds": 4, "final_eval_loss": 1.0, "unigram_entropy": 2.0}


def test_the_whole_example_runs_and_prints_what_the_page_shows(cluster, workshop, capsys):
    runpy.run_path(str(workshop / "sums.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    shown = re.search(r"It prints\n\n((?:    .*\n)+)", page(PAGE)).group(1)
    assert [without_digits(line) for line in printed] == [without_digits(line) for line in shown.splitlines()]

    summary = ray_diloco.train("runs/sums/config.yaml")
    assert summary["status"] == "finished"
    assert summary["final_eval_loss"] < summary["unigram_entropy"]
    weights = load_file(summary.export / "model.safetensors")
    assert {name: list(w.shape) for name, w in weights.items()} == {
        "embed.weight": [14, 32],
        "hidden.weight": [128, 192],
        "hidden.bias": [128],
        "head.weight": [14, 128],
        "head.bias": [14],
    }
    assert ray_diloco.evaluate("sums")["loss"] == summary["final_eval_loss"]
    assert (summary.report.exists(), summary.checkpoints.is_dir()) == (True, True)


def without_digits(line):
    return re.sub(r"\d+(\.\d+)?", "0", line.strip())


def test_every_way_to_call_train_asks_for_the_same_run(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(api, "run", lambda composed, quiet: asked.append((composed.config, quiet)) or SUMMARY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text("model: tiny\ninner: {H: 50}\n")
    exec(code_block(PAGE, "experiment.yaml"), {})
    configs = [config for config, _ in asked]
    assert len(configs) == 5
    assert all(config == configs[0] for config in configs)
    assert (configs[0].run.name, configs[0].inner.H) == ("a", 50)
    assert {quiet for _, quiet in asked} == {True}


def test_a_transformers_model_fits_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "page_model.py").write_text(code_block(PAGE, "GPT2LMHeadModel"))
    monkeypatch.syspath_prepend(tmp_path)
    built = build_from_path(ModelConfig(builder="page_model:build"), vocab_size=300, sequence_length=32)
    assert built.get_input_embeddings().num_embeddings == 300


@pytest.mark.parametrize("key", ["model", "data", "tokenizer"])
def test_what_is_wrong_with_a_builder_has_the_number_that_the_page_says(key, tmp_path, monkeypatch):
    (tmp_path / "wrong_parts.py").write_text("broken = lambda *_: 1 / 0\nnothing = lambda *_: 7\nnumber = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.txt").write_text("text " * 100)
    column = 1 + ["model", "data", "tokenizer"].index(key)
    said = {row[0]: row[column] for row in rows(section(PAGE, "## Parts of your own"))}
    assert len(said) == 5
    for what, path in {
        "not of the form `package.module:function`": "wrong_parts",
        "cannot be imported": "no_such_module:build",
        "no function": "wrong_parts:number",
        "it fails": "wrong_parts:broken",
        "it returns something else": "wrong_parts:nothing",
    }.items():
        with pytest.raises(DilocoError) as raised:
            settings = {"data": {"source": "text", "path": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache")}}
            settings.setdefault(key, {})["builder"] = path
            config = compose((), settings=settings).config
            check(config)
            if key == "model":
                build_from_path(config.model, 258, 32)
            prepare(config.data, config.tokenizer)
        assert str(raised.value.number) in said[what], what


def test_the_command_below_the_example_asks_for_the_same_run(workshop, monkeypatch):
    asked = []
    (workshop / "runs/sums/export").mkdir(parents=True)
    monkeypatch.setattr(api, "run", lambda composed, quiet: asked.append(composed.config) or SUMMARY)
    runpy.run_path(str(workshop / "sums.py"), run_name="__main__")
    (arguments,) = [words[2:] for words in commands(PAGE)]
    assert asked == [compose(arguments).config]


def test_the_example_starts_no_run_in_a_rank_that_imports_it(workshop):
    assert "result" not in runpy.run_path(str(workshop / "sums.py"), run_name="sums")
