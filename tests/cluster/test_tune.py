"""`ray-diloco tune` on a real Ray: good, diverging and refused trials, the best as a file, and the command again."""

import json
from dataclasses import replace

from cluster_runs import manifest
from ray.util.placement_group import placement_group_table

from ray_diloco.cli import main
from ray_diloco.config.compose import compose
from ray_diloco.config.sweep import read_sweep

SWEEP = """\
common:
  model: {name: micro, builder: "cluster_builders:mixer"}
  data: {source: text, sequence_length: 32, heldout_blocks: 8}
  tokenizer: bytes
  islands: {count: 1}
  inner: {H: 4, micro_batch: 2, lr: 0.01, schedule: {kind: constant, warmup_steps: 2}}
  outer.momentum: 0.5
  export: {enabled: false}
tokens: 1024
space:
  outer.lr: [0.7, 1.0e+30, -1.0]
"""


def test_bad_trials_harm_nobody_the_best_can_be_trained_and_nothing_is_run_twice(place, tmp_path, capsys):
    file = tmp_path / "rates.yaml"
    file.write_text(SWEEP)
    settings = [f"{key}={value}" for key, value in place.common.items()]
    command = ["tune", "--config", str(file), *settings]
    assert main(command) == 0
    folder = place.folder("rates")
    results = json.loads((folder / "sweep.json").read_text())
    good, lost, refused = results["trials"]
    assert [good["status"], lost["status"], refused["status"]] == ["finished", "diverged", "refused"]
    assert (good["label"], results["best"]) == ("lr0.7", "lr0.7")
    # 1024 tokens are 4 rounds of 4 steps of 2 sequences of 32.
    assert (good["run"]["rounds"], good["run"]["tokens"]) == (4, 1024)
    assert good["loss"] == good["run"]["points"][-1]["loss"]
    assert lost["run"]["rounds"] == 0, "it ended at once"
    assert lost["reason"].startswith("RD-417: ") and refused["reason"].startswith("RD-111: outer.lr=-1.0")
    printed = capsys.readouterr().out
    assert "[1/3] lr0.7 begins" in printed and "lr1e30 diverged: " in printed
    groups = placement_group_table().values()
    assert not [group for group in groups if group["name"].startswith("run rates-")], (
        "islands are in the trials' groups"
    )
    assert {group["state"] for group in groups if not group["name"]} == {"REMOVED"}, "trials have given their room back"

    best = compose((), str(folder / "best.yaml")).config
    trial = read_sweep(settings, str(file)).trial({"outer.lr": 0.7}).config
    assert (best.run.name, best.run.root, best.run.rounds) == ("rates-best", place.common["run.root"], 4)
    assert replace(best, run=trial.run, export=trial.export, observe=trial.observe) == trial

    commit = manifest(folder / "rates-lr0.7")
    assert main(command) == 0
    assert manifest(folder / "rates-lr0.7") == commit
    assert json.loads((folder / "sweep.json").read_text()) == results
    assert "[1/3] lr0.7 was finished" in capsys.readouterr().out
