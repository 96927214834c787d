"""A whole plan, of a small layout and links that are easy to reckon with."""

import json

import pytest

from ray_diloco.blocks import channels_of
from ray_diloco.cli import main
from ray_diloco.config.compose import compose
from ray_diloco.config.plan import SiteConfig
from ray_diloco.outer.layout import layout_of
from ray_diloco.planning import gather, links, remembered, speeds, steps
from ray_diloco.planning.estimate import plan_of
from ray_diloco.planning.expected import expected
from ray_diloco.planning.search import options
from ray_diloco.planning.show import show_plan
from ray_diloco.planning.timing import Link, Speeds
from ray_diloco.planning.traffic import traffic_of

LAYOUT = layout_of([(f"layers.{k}.w", (125_000,)) for k in range(8)])
TIMES = ({"eu": 0.1, "us": 0.1}, "given")
SETTINGS = ["islands.count=2", "islands.names=[eu,us]", "inner.H=50", "run.rounds=36", "plan.up_mbit=32"]


def config(*settings):
    return compose([*SETTINGS, "plan.down_mbit=32", *settings]).config


def planned(*settings, times=TIMES, measured=None):
    c = config(*settings)
    return plan_of(c, traffic_of(c, LAYOUT), times, Speeds(), measured or {})


def test_a_million_parameters_in_fp32_take_a_second_each_way_at_32_mbit():
    plan = planned()
    # 4 MB and a header up, the same down, over 4 MB/s; 50 steps of 0.1 s.
    assert plan.times.round_s == pytest.approx(5 + 2, rel=1e-3)
    assert plan.times.utilisation == pytest.approx(5 / 7, rel=1e-3)
    assert plan.times.exposed_s == pytest.approx(2, rel=1e-3)
    assert plan.times.run_s == pytest.approx(36 * 7, rel=1e-3)


def test_tokens_a_day_are_those_of_all_islands():
    plan = planned()
    a_round = 2 * 50 * 4 * 256
    assert plan.tokens_per_round == a_round
    assert plan.times.tokens_per_day == pytest.approx(a_round / 7 * 86400, rel=1e-3)


def test_money_and_carbon_are_those_of_the_hours_of_the_run():
    us = ["plan.islands.us.dollars_per_hour=10", "plan.islands.us.watts=2000", "plan.islands.us.grams_co2_per_kwh=500"]
    of_eu, of_us = planned("run.rounds=3600", *us).spend
    hours = 3600 * 7 / 3600
    assert (of_us.region, of_us.dollars) == ("us", pytest.approx(10 * hours, rel=1e-3))
    assert of_us.kwh == pytest.approx(2 * hours, rel=1e-3)
    assert of_us.kg_co2 == pytest.approx(hours, rel=1e-3)
    assert (of_eu.dollars, of_eu.kwh, of_eu.kg_co2) == (None, None, None)


def test_the_peak_of_streaming_is_a_fragment_over_the_steps_that_hide_it():
    plan = planned("fragments.kind=layers", "fragments.size=1", "schedule.spread=true", "schedule.delay=2")
    assert plan.fragments == 8
    assert plan.times.peak_mbit == pytest.approx(125_000 * 32 / 0.2 / 1e6, rel=1e-2)


def test_without_the_time_of_a_step_the_plan_still_has_bytes_and_memory():
    plan = planned(times=({}, "unknown"))
    assert plan.times is None and plan.spend == ()
    assert plan.bytes_down > 4e6 and plan.memory.shard > 0
    assert "set plan.step_seconds" in show_plan(plan)


def test_steps_follow_the_time_of_a_round_and_the_speed_of_an_island():
    slow = ({"eu": 0.1, "us": 0.2}, "given")
    by_time = planned("inner.round_seconds=2", times=slow)
    assert by_time.tokens_per_round == (20 + 10) * 4 * 256
    by_speed = planned("inner.work=by_speed", times=slow)
    assert by_speed.tokens_per_round == (50 + 25) * 4 * 256


def test_links_that_are_given_win_over_those_that_were_measured():
    pair = {"rtt_ms": 90.0, "one_mbit": 40.0, "several_mbit": 80.0}
    measured = {"us>eu": pair, "eu>us": pair | {"several_mbit": 160.0}}
    bare = compose(SETTINGS[:-1]).config
    assert links.link_of(bare, "us", "eu", measured) == (Link(10e6, 20e6, 0.09), "measured")
    assert links.link_of(config(), "us", "eu", measured) == (Link(4e6, 4e6, 0.0), "given")
    assert links.link_of(bare, "us", "eu", {}) == (Link(), "none")


def test_islands_of_a_region_share_its_links():
    c = compose(["islands.regions={eu: 1, us: 2}", "islands.count=3", "plan.anchor=eu-0"]).config
    pair = {"rtt_ms": 90.0, "one_mbit": 40.0, "several_mbit": 80.0}
    measured = {"us>eu": pair, "eu>us": pair}
    assert links.link_of(c, "us-1", "eu-0", measured) == (Link(10e6, 10e6, 0.09), "measured")
    assert links.link_of(c, "eu-0", "eu-0", measured) == (Link(), "beside")


def test_the_best_option_stays_within_the_budget_and_beats_plain_diloco():
    found = options(config("plan.quality=0.012"), LAYOUT, TIMES[0], lambda channel: Speeds(), {})
    assert found and all(option.loss <= 0.012 for option in found)
    assert found[0].utilisation > planned().times.utilisation
    assert found[0].utilisation >= max(option.utilisation for option in found) - 0.004


def test_no_option_is_left_where_the_budget_allows_no_published_loss():
    assert options(config("plan.quality=0"), LAYOUT, TIMES[0], lambda channel: Speeds(), {}) == []


def test_given_steps_win_over_those_of_an_earlier_run(tmp_path):
    c = config(f"data.cache={tmp_path}")
    steps.remember_steps(c, {"eu": 0.3, "us": 0.4})
    assert steps.step_seconds(c, 10) == ({"eu": 0.3, "us": 0.4}, "an earlier run")
    c.plan.islands["us"] = SiteConfig(step_seconds=9.0)
    assert steps.step_seconds(c, 10)[0] == {"eu": 0.3, "us": 9.0}
    other = config(f"data.cache={tmp_path}", "inner.micro_batch=9")
    assert steps.step_seconds(other, 10**9) == ({}, "unknown")


def test_what_cannot_be_read_counts_as_not_remembered(tmp_path):
    folder = tmp_path / remembered.FOLDER
    folder.mkdir()
    (folder / "speeds.json").write_text("{")
    assert remembered.recall(str(tmp_path), "speeds") == {}
    remembered.remember(str(tmp_path), "speeds", {"a": 1})
    remembered.remember(str(tmp_path), "speeds", {"b": 2})
    assert remembered.recall(str(tmp_path), "speeds") == {"a": 1, "b": 2}


@pytest.mark.parametrize("setting", ["plan.islands.mars.watts=3", "plan.anchor=mars"])
def test_an_island_that_the_run_does_not_have_is_refused(setting, capsys):
    assert main(["plan", setting]) == 2
    assert capsys.readouterr().err.startswith("RD-180")


def test_the_command_prints_the_plan_and_its_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gather, "layout_of_config", lambda config: LAYOUT)
    monkeypatch.setattr(gather, "speeds_of", lambda channel, cache: Speeds())
    arguments = [*SETTINGS, f"data.cache={tmp_path}", "plan.step_seconds=0.1", "outer.momentum=0.5"]
    assert main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "1.0M parameters, 2 islands" in printed and "islands train" in printed
    assert main(["plan", *arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["plan"]["parameters"] == LAYOUT.numel
    assert {"H", "codec", "loss", "source"} <= set(values["options"][0])


def test_the_tables_are_printed_with_both_values(capsys):
    assert main(["plan", "--table"]) == 0
    assert "85.6 % / 85.6 %" in capsys.readouterr().out
    assert main(["plan", "--table", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["streaming_diloco"]) == 45


def test_a_run_expects_the_bytes_of_its_plan_and_times_that_are_remembered(tmp_path):
    c = config(f"data.cache={tmp_path}")
    bare = expected(c, LAYOUT)
    plan = planned()
    assert (bare.bytes_up, bare.bytes_down) == (sum(plan.bytes_up.values()), 2 * plan.bytes_down)
    assert bare.round_s is None
    steps.remember_steps(c, TIMES[0])
    remembered.remember(str(tmp_path), "speeds", {speeds._key(channels_of(c)[0]): {"emit": 0.0}})
    known = expected(c, LAYOUT)
    assert known.round_s == pytest.approx(7, rel=1e-3)
    assert known.train_s == pytest.approx(5, rel=1e-3)


def test_steps_of_a_run_are_those_of_its_metrics():
    lines = [
        {"kind": "island", "island": "eu", "train_s": 1.0, "steps": 10},
        {"kind": "island", "island": "eu", "train_s": 3.0, "steps": 10},
        {"kind": "commit"},
        {"kind": "island", "island": "us", "train_s": 0.0, "steps": 0},
    ]
    assert steps.steps_of_run(lines) == {"eu": 0.2}
