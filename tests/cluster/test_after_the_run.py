"""The command from a user's folder: a package of their own, relative paths, and what can be done after the run."""

import json
import shutil
import stat
import sys
import threading

import numpy as np
import pytest
import torch
from cluster_runs import HERE, anchor, command, ended, manifest
from safetensors.numpy import load_file

from ray_diloco.cli import main
from ray_diloco.cluster.credentials import credentials
from ray_diloco.data.blocks import prepare
from ray_diloco.errors import SecurityError

pytestmark = pytest.mark.cluster


@pytest.fixture
def home(tmp_path):
    """A folder with a package of a user's own in it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").touch()
    shutil.copy(HERE / "cluster_builders.py", tmp_path / "mine/parts.py")
    return tmp_path


def announced(folder, process):
    """Where the Ray of a run that begins answers."""
    tick = threading.Event()
    path = folder / ".address"
    while not (path.exists() and path.read_text()):
        assert process.poll() is None, process.communicate()
        tick.wait(0.01)
    return path.read_text()


def test_builders_in_the_current_folder_and_relative_paths_work_in_a_run(home, cluster, monkeypatch, capsys):
    own = [
        "model.builder=mine.parts:mixer",
        "data.builder=mine.parts:documents",
        "tokenizer.builder=mine.parts:letters",
    ]
    sizes = ["data.sequence_length=32", "data.heldout_blocks=8", "inner.H=2", "inner.micro_batch=2", "run.rounds=2"]
    # As a user's own: no token, and none asked for.
    plain = {"HOME": str(home), "RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None}
    process = command("train", *own, *sizes, "data.cache=cache", "islands.count=2", cwd=home, paths=(), settings=plain)
    address = announced(home / "runs/run", process)
    # The Ray of a run that one starts without a thought is closed to everybody else.
    with pytest.raises(SecurityError, match="RD-601"), credentials(address):
        pass
    assert stat.S_IMODE((home / ".ray/auth_token").stat().st_mode) == 0o600
    code, output = ended(process)
    assert code == 0, output
    summary = json.loads((home / "runs/run/summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 2)
    weights = load_file(home / "runs/run/export/model.safetensors")
    assert {name: list(weights[name].shape) for name, _ in manifest(home / "runs/run")["layout"]} == dict(
        manifest(home / "runs/run")["layout"]
    )
    assert weights["embed.weight"].shape == (39, 32), "the vocabulary is that of the tokenizer"

    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["evaluate", "run"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(summary["final_eval_loss"], abs=1e-6)
    assert main(["generate", "run", "7 and 8"]) != 0
    assert "RD-" in capsys.readouterr().err


def test_a_finished_run_is_evaluated_continued_and_loaded_by_name(quick, llama):
    assert llama["export"] == "export" and llama["sample"].startswith("3 plus 4 is ")

    code, output = ended(command("evaluate", "llama", "--root", str(quick.root / "runs")))
    assert code == 0, output
    measured = json.loads(output)
    assert measured["round"] == 6 and measured["blocks"] == 8
    assert measured["loss"] == pytest.approx(llama["final_eval_loss"], abs=1e-6)

    code, output = ended(command("generate", str(llama.folder), "1 plus", "--tokens", "5"))
    assert code == 0 and output.startswith("1 plus"), output

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(llama.export)
    trained = anchor(llama.folder, 6)
    assert all(np.array_equal(trained[name], p.detach().numpy()) for name, p in model.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(llama.export)
    assert tokenizer.decode(tokenizer.encode("8 plus 1 – ü")) == "8 plus 1 – ü"
    config = quick.config()
    corpus = prepare(config.data, config.tokenizer)
    blocks = torch.from_numpy(corpus.open().heldout(np.arange(8)))
    with torch.no_grad():
        assert float(model(input_ids=blocks, labels=blocks).loss) == pytest.approx(llama["final_eval_loss"], abs=1e-5)
