"""Sweep files and the arguments over them, before anything runs."""

import pytest

from ray_diloco.config.compose import compose
from ray_diloco.config.space import Values
from ray_diloco.config.sweep import read_sweep, tokens_per_round
from ray_diloco.errors import ConfigError

TINY = """\
search: grid
tokens: 64000
common: {model: tiny, islands.count: 2, inner.micro_batch: 4, data.sequence_length: 100}
space:
  inner.H: [20, 50]
  outer: {lr: [0.5, 1.0]}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TINY)
    return "mine.yaml"


def test_trials_are_runs_of_their_own_with_equal_tokens(file):
    sweep = read_sweep(["run.seed=3"], file)
    trials = list(sweep.proposals())
    assert [trial.label for trial in trials] == ["H20-lr0.5", "H20-lr1", "H50-lr0.5", "H50-lr1"]
    first, last = trials[0].config, trials[-1].config
    assert (first.run.root, first.run.name, first.observe.wandb_group) == ("runs/mine", "mine-H20-lr0.5", "mine")
    assert (first.inner.H, first.outer.lr, last.inner.H, last.outer.lr) == (20, 0.5, 50, 1.0)
    # 64,000 tokens over 20 or 50 steps of 2 islands, 4 sequences, 100 tokens.
    assert (first.run.rounds, last.run.rounds) == (4, 2)
    assert {trial.config.run.seed for trial in trials} == {3}
    assert sweep.planned == 4


def test_arguments_lie_over_the_file(file):
    arguments = ["sweep.tokens=0", "sweep.space.outer.lr=null", "sweep.space.outer.momentum=[0.1]", "run.name=other"]
    sweep = read_sweep([*arguments, "run.rounds=7"], file)
    assert sweep.space == {"inner.H": Values((20, 50)), "outer.momentum": Values((0.1,))}
    assert str(sweep.folder) == "runs/other"
    assert [trial.config.run.rounds for trial in sweep.proposals()] == [7, 7]


def test_a_group_can_be_tried(file):
    sweep = read_sweep(["sweep.space.algorithm=[diloco,muloco]"], file)
    assert {trial.config.algorithm.name for trial in sweep.proposals()} == {"diloco", "muloco"}


def test_a_combination_that_is_refused_is_a_trial_that_says_so(file):
    sweep = read_sweep(["sweep.space.inner.precision=[fp32,bf16]", "sweep.space.inner.H=[20]"], file)
    refusals = [trial.refusal and trial.refusal.number for trial in sweep.proposals()]
    assert refusals == [None, 115, None, 115]


def test_tokens_of_islands_that_differ_are_counted():
    settings = [
        "islands.count=2",
        "islands.i1.ranks=3",
        "islands.i1.micro_batch=2",
        "inner.micro_batch=4",
        "inner.H=10",
    ]
    assert tokens_per_round(compose([*settings, "data.sequence_length=100"]).config) == 10 * (4 + 3 * 2) * 100


@pytest.mark.parametrize(
    ("arguments", "number", "words"),
    [
        (["sweep.trails=3"], 190, "unknown key 'trails'; did you mean 'trials'"),
        (["sweep.search=gird"], 190, "'gird' is none of grid, random, optuna"),
        (["sweep.trials=0"], 190, "must be at least 1"),
        (["sweep.trials=2.5"], 190, "is not a whole number"),
        (["sweep.diverged=1"], 190, "must be more than 1"),
        (["sweep.space.inner.h=[1]"], 101, "unknown key 'inner.h'"),
        (["sweep.space.inner.H=[]"], 191, "'inner.H' has no values"),
        (["sweep.space.inner.H=null", "sweep.space.outer.lr=null"], 191, "is empty"),
        (["sweep.space.inner.H={integers: [1, 9]}"], 192, "a grid cannot draw 'inner.H'"),
        (["sweep.search=optuna", "sweep.space.islands.names=[[a,b],[c,d]]"], 192, "among lists or mappings"),
        (["sweep.space.run.name=[a,b]"], 193, "is what a sweep sets itself"),
        (["sweep.space.run.rounds=[1,2]"], 193, "is what a sweep with tokens sets itself"),
        (["inner.H=30"], 193, "is tried, and an argument sets it"),
        (["experiment=demo"], 108, "both experiment=demo and a sweep"),
        (["sweep=outer"], 108, "both --config mine.yaml and sweep=outer"),
        (["inner.h=30"], 101, "unknown key 'inner.h'"),
        (["sweep.space.inner.H=[1"], 104, "is not YAML"),
    ],
)
def test_a_mistake_has_a_number(file, arguments, number, words):
    with pytest.raises(ConfigError) as refused:
        read_sweep(arguments, file)
    assert refused.value.number == number
    assert words in refused.value.what


def test_a_mistake_in_the_file_names_its_line(file, tmp_path):
    (tmp_path / "bad.yaml").write_text(TINY.replace("lr:", "lrr:"))
    with pytest.raises(ConfigError, match=r"RD-101: bad.yaml:6: unknown key 'outer.lrr'"):
        read_sweep([], "bad.yaml")


def test_the_sweep_that_comes_along_can_be_run():
    sweep = read_sweep()
    assert (sweep.name, sweep.planned) == ("outer", 27)
    trials = list(sweep.proposals())
    assert all(trial.refusal is None for trial in trials)
    assert {trial.config.run.rounds * tokens_per_round(trial.config) for trial in trials} == {524_288}
