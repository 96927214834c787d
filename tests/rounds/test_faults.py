import pytest

from ray_diloco.blocks import faults_of
from ray_diloco.config.check import check
from ray_diloco.config.compose import compose
from ray_diloco.errors import ConfigError
from ray_diloco.rounds.faults import ANY, Fault, FaultPlan, parse_faults

ISLANDS = ("eu", "us")


def test_a_fault_strikes_once_at_its_point_and_its_incarnation_only() -> None:
    plan = FaultPlan([Fault("exit", "eu", 3, "mid_send"), Fault("freeze", "eu", 3, "mid_send", incarnation=1)])
    assert plan.at("eu", 2, "mid_send") is None
    assert plan.at("us", 3, "mid_send") is None
    assert plan.at("eu", 3, "before_send") is None
    assert plan.at("eu", 3, "mid_send", incarnation=1) == Fault("freeze", "eu", 3, "mid_send", incarnation=1)
    assert plan.at("eu", 3, "mid_send") == Fault("exit", "eu", 3, "mid_send")
    assert plan.at("eu", 3, "mid_send") is None
    assert not plan


def test_any_incarnation_means_whichever_comes_by_first() -> None:
    plan = FaultPlan([Fault("exit", "eu", 1, "before_inner", incarnation=ANY)])
    assert plan.at("eu", 1, "before_inner", incarnation=4) is not None
    assert plan.at("eu", 1, "before_inner", incarnation=5) is None


def test_a_target_gets_its_own_faults_alone() -> None:
    faults = (Fault("exit", "eu", 1, "before_inner"), Fault("exit", "us", 1, "before_inner"))
    assert FaultPlan(faults).of("us").left == faults[1:]


@pytest.mark.parametrize("row", ["slow_link us 2 before_send bytes_per_s=1e6 seconds=20", None])
def test_text_and_mapping_say_the_same(row: str | None) -> None:
    fault = Fault("slow_link", "us", 2, "before_send", bytes_per_s=1e6, seconds=20.0)
    mapping = {
        "kind": "slow_link",
        "target": "us",
        "round": 2,
        "phase": "before_send",
        "bytes_per_s": 1e6,
        "seconds": 20,
    }
    assert parse_faults([row or mapping], ISLANDS) == (fault,)
    assert parse_faults([str(fault)], ISLANDS) == (fault,)


@pytest.mark.parametrize(
    ("row", "number"),
    [
        ("exit eu", 161),
        ("exit eu two mid_send", 161),
        ("exit eu 2 mid_send more", 161),
        ("exit eu 2 mid_send when=now", 161),
        (7, 161),
        ("explode eu 2 mid_send", 162),
        ("exit asia 2 mid_send", 163),
        ("driver_exit eu 2 mid_send", 163),
        ("exit shard:2 2 mid_send", 163),
        ("storage_error storage 2 before_inner", 164),
        ("exit eu 2 midway", 164),
        ("exit eu 0 mid_send", 165),
        ("slow_link eu 1 mid_send", 165),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_by_number(row: object, number: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults([row], ISLANDS, shards=2)
    assert caught.value.number == number


def test_a_plan_needs_leave() -> None:
    settings = ["faults.plan=[exit i1 2 before_send]"]
    with pytest.raises(ConfigError) as caught:
        check(compose(settings).config)
    assert caught.value.number == 160
    config = compose([*settings, "faults.allowed=true"]).config
    check(config)
    assert faults_of(config).left == (Fault("exit", "i1", 2, "before_send"),)
