"""`ray-diloco simulate`: the same configuration as `train`, in a world that is told in a few keys."""

import json

import pytest

from ray_diloco.cli import main
from ray_diloco.config.compose import compose
from ray_diloco.errors import ConfigError
from ray_diloco.simulating import conditions_of, setup_of, simulate

# Ten islands, 100 steps of 2 s and 1000 tokens, a model of 400 MB over 800 Mbit/s: 4 s each way.
TEN = (
    "islands.count=10",
    "run.rounds=5",
    "inner.H=100",
    "inner.micro_batch=4",
    "data.sequence_length=250",
    "evaluate.every=0",
    "outer.momentum=0.5",
    "plan.step_seconds=2",
    "plan.up_mbit=800",
    "plan.down_mbit=800",
    "simulate.parameters=100000000",
    "simulate.launch_s=0",
    "simulate.merge_s=2",
    "simulate.write_s=0",
)


def test_without_failures_goodput_is_the_formula() -> None:
    report = simulate(compose(TEN).config)
    # A round is 200 s of training, 4 s up, 2 s of merge, 4 s down; at the start all adopt once.
    assert report.tokens == 10 * 5 * 100 * 1000
    assert report.seconds == pytest.approx(5 * 210 + 4, abs=0.5)
    assert report.goodput == pytest.approx(1000 / report.seconds, rel=1e-6)
    assert report.bytes_up == report.bytes_down == 10 * 5 * 400_000_000
    assert report.wait == pytest.approx(2 / 210, abs=1e-4)


def test_a_hub_that_all_links_share_is_a_queue() -> None:
    free, narrow = (simulate(compose([*TEN, f"simulate.hub_mbit={mbit}"]).config) for mbit in (0, 800))
    # Ten times 4 s in place of 4: at the first adoption, the first sending, and every adoption of a round.  Whoever
    # adopts later sends later, so that from the second round on nobody waits to send.
    assert narrow.seconds - free.seconds == pytest.approx(36 + 36 + 5 * 36, rel=0.001)


def test_failures_cost_goodput_and_a_quorum_gives_some_back() -> None:
    storm = ["simulate.failures.exit=1", "simulate.repair_s=600", "simulate.spread=0.3", "run.rounds=12"]
    calm = simulate(compose([*TEN, "run.rounds=12"]).config)
    waiting = simulate(compose([*TEN, *storm]).config)
    assert waiting.events["island_lost"] > 5
    assert waiting.goodput < calm.goodput - 0.1
    assert waiting.tokens_lost > 0
    assert sum(tenth.islands_lost for tenth in waiting.timeline) == waiting.events["island_lost"]


def test_islands_have_the_speeds_and_links_that_a_plan_gives_them() -> None:
    config = compose([*TEN, "plan.islands.i3.step_seconds=5", "plan.islands.i3.up_mbit=8", "plan.rtt_ms=100"]).config
    conditions = conditions_of(config)
    assert (conditions.pace("i3"), conditions.pace("i4")) == (5.0, 2.0)
    slow, usual = conditions.link_of("i3"), conditions.link_of("i4")
    assert (slow.up_bytes_per_s, slow.down_bytes_per_s, slow.latency_s) == (1e6, 1e8, 0.05)
    assert usual.up_bytes_per_s == 1e8


def test_a_codec_of_whole_tensors_needs_a_model() -> None:
    with pytest.raises(ConfigError) as caught:
        setup_of(compose([*TEN, "codec.up.kind=low_rank"]).config)
    assert caught.value.number == 167


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *TEN, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["status"], figures["rounds"], figures["islands"]) == ("finished", 5, 10)
    assert main(["simulate", *TEN, "faults.plan=[exit i3 2 mid_inner]", "faults.allowed=true"]) == 0
    printed = capsys.readouterr().out
    assert "goodput" in printed
    assert "island_lost 1" in printed


def test_seeds_are_tried_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "0:8", "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["schedules"], counts["failed"]) == (8, [])
    assert main(["simulate", "--seeds", "x"]) == 2
    assert "RD-166" in capsys.readouterr().err
