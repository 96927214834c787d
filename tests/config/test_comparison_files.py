from pathlib import Path

import pytest

from ray_diloco.config.comparison import Ordering, read_comparison
from ray_diloco.config.compose import compose
from ray_diloco.errors import ConfigError

PAIR = """\
common:
  inner: {H: 7, lr: 0.01}
  outer.momentum: 0.5
variants:
  plain:
  fast: {algorithm: eager, inner.H: 3, outer: {lr: 0.1}}
orderings:
  - {claim: "fast is lower", better: fast, worse: plain, within: 1, source: nobody}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    return tmp_path


def refused(text: str, *arguments: str) -> ConfigError:
    Path("wrong.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_comparison(None, arguments, "wrong.yaml")
    return caught.value


def test_a_variant_lies_over_what_is_common_and_that_over_the_algorithm() -> None:
    plain, fast = (v.composed.config for v in read_comparison(config_file="pair.yaml").variants)
    assert (plain.inner.H, plain.inner.lr, plain.outer.lr, plain.outer.momentum) == (7, 0.01, 0.7, 0.5)
    assert (fast.inner.H, fast.inner.lr, fast.outer.lr, fast.outer.momentum) == (3, 0.01, 0.1, 0.5)
    assert (plain.algorithm.name, fast.algorithm.name, fast.stale.own_fresh) == ("diloco", "eager", True)
    assert fast.topology == compose(["algorithm=eager"]).config.topology


def test_arguments_lie_over_every_variant() -> None:
    variants = read_comparison(None, ["inner.H=9", "overlay=none"], "pair.yaml").variants
    assert [v.composed.config.inner.H for v in variants] == [9, 9]


def test_every_variant_is_a_run_below_the_folder_of_the_comparison() -> None:
    comparison = read_comparison(config_file="pair.yaml")
    assert (comparison.name, comparison.folder) == ("pair", Path("runs/pair"))
    assert [(v.composed.config.run.root, v.composed.config.run.name) for v in comparison.variants] == [
        ("runs/pair", "plain"),
        ("runs/pair", "fast"),
    ]
    home = read_comparison(None, ["run.root=~/runs"], "pair.yaml")
    assert home.folder == Path.home() / "runs/pair"
    assert {v.composed.config.run.root for v in home.variants} == {str(home.folder)}
    renamed = read_comparison(None, ["run.name=again", "run.root=elsewhere"], "pair.yaml")
    assert (renamed.name, renamed.folder) == ("again", Path("elsewhere/again"))


def test_what_a_variant_has_different_is_told_as_arguments() -> None:
    comparison = read_comparison(config_file="pair.yaml")
    assert comparison.common == ("inner.H=7", "inner.lr=0.01", "outer.momentum=0.5")
    assert [v.settings for v in comparison.variants] == [(), ("algorithm=eager", "inner.H=3", "outer.lr=0.1")]


def test_orderings_are_read() -> None:
    assert read_comparison(config_file="pair.yaml").orderings == (
        Ordering("fast is lower", "fast", "plain", "nobody", 1.0),
    )


def test_a_comparison_of_ones_own_is_found_by_name(elsewhere: Path) -> None:
    (elsewhere / "mine/compare").mkdir(parents=True)
    (elsewhere / "mine/compare/pair.yaml").write_text(PAIR)
    assert len(read_comparison("pair", conf_dir="mine").variants) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("common: {}\n", "wrong.yaml:1: 'variants' is no mapping"),
        ("common: 3\nvariants: {a: {}}\n", "wrong.yaml:1: 'common' is no mapping"),
        ("variants:\n  a: {}\n  b: 3\n", "wrong.yaml:3: the variant 'b' is no name with settings"),
        ("variants: {a: {}}\nordering: []\n", "wrong.yaml:2: unknown key 'ordering'; did you mean 'orderings'?"),
        ("variants: {a: {}}\norderings: {a: b}\n", "wrong.yaml:2: 'orderings' is no list"),
        ("variants: {a: {}}\norderings: [{claim: c, better: a, worse: b}]\n", "ordering 1: there is no variant 'b'"),
        ("variants: {a: {}}\norderings: [{better: a, worse: a}]\n", "ordering 1 has not the keys"),
        ("variants: {a: {}}\norderings: [{claim: c, better: a, worse: a, within: x}]\n", "within='x' is no number"),
        ("variants:\n  a: {run.name: a}\n  b: {run.name: b}\n", "wrong.yaml:3: a variant has its own run.name"),
    ],
)
def test_a_file_of_another_form_is_refused(text: str, words: str) -> None:
    error = refused(text)
    assert error.number == 150
    assert words in str(error)


def test_a_mistyped_key_is_named_with_its_line() -> None:
    error = refused("common:\n  inner.H: 3\nvariants:\n  a:\n    inner:\n      h: 3\n")
    assert error.number == 101
    assert str(error).startswith("RD-101: wrong.yaml:6: unknown key 'inner.h'")


def test_a_variant_that_cannot_run_is_refused_before_anything_starts() -> None:
    assert refused("variants:\n  a: {}\n  b: {inner.H: 0}\n").number == 111
    assert refused("variants:\n  a/b: {}\n").number == 113


def test_the_family_is_compared_at_equal_tokens() -> None:
    family = read_comparison("family")
    assert len(family.variants) >= 15
    steps = {v.name: v.composed.config.inner.H * v.composed.config.run.rounds for v in family.variants}
    # Fragments that take turns have their last turns after their last round.
    assert {name for name, count in steps.items() if count != 480} == {"streaming", "decoupled"}
    assert {steps["streaming"], steps["decoupled"]} == {460}
    shared = {
        (c.run.seed, c.model.name, c.data.name, c.islands.count, c.inner.micro_batch, c.inner.schedule.kind)
        for c in (v.composed.config for v in family.variants)
    }
    assert len(shared) == 1


def test_the_family_warns_only_of_what_it_wants_to_show() -> None:
    warned = {v.name for v in read_comparison("family").variants if v.warnings}
    assert warned == {"diloco_2bit", "async_naive"}
