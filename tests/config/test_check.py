import dataclasses
import math
import typing
from typing import Any

import pytest

from ray_diloco.config.check import check, check_inner
from ray_diloco.config.compose import compose
from ray_diloco.config.keys import dotted, fields_of, schema_keys, type_of
from ray_diloco.config.limits import ALLOWED, BOUNDS
from ray_diloco.config.schema import Config, InnerConfig, InnerOptimizerConfig, InnerScheduleConfig
from ray_diloco.errors import ConfigError


def refused(number: int, *arguments: str) -> ConfigError:
    config = compose(arguments).config
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.number == number, str(caught.value)
    return caught.value


def with_value(key: str, value: Any) -> Config:
    """The default run with one key set past composition, as from Python."""
    config = compose().config
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part)
    setattr(section, name, value)
    return config


def test_the_default_run_and_the_schema_itself_pass() -> None:
    check(compose().config)
    check(Config())


@pytest.mark.parametrize("key", sorted(ALLOWED))
def test_a_value_outside_an_enumeration_is_refused_with_the_allowed_ones(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(with_value(key, "other"))
    assert caught.value.number == 110
    assert f"{key}=other" in caught.value.what
    assert caught.value.mend.endswith(f"allowed: {', '.join(map(str, ALLOWED[key]))}")


def test_a_near_miss_of_an_enumeration_is_suggested() -> None:
    assert "did you mean nesterov?" in refused(110, "outer.kind=Nestrov").mend


@pytest.mark.parametrize("key", sorted(BOUNDS))
def test_a_number_below_its_bound_or_not_finite_is_refused(key: str) -> None:
    for value in (-2, math.inf, math.nan):
        with pytest.raises(ConfigError) as caught:
            check(with_value(key, value))
        assert caught.value.number == 111
        assert f"{key}={value}" in caught.value.what


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("inner.H=0", "at least 1"),
        ("run.rounds=0", "at least 1"),
        ("inner.lr=0", "more than 0"),
        ("outer.lr=0", "more than 0"),
        ("stale.c_ok=-1.5", "at least -1 and at most 1"),
        ("channels.fast.outer.lr=0", "more than 0"),
        ("channels.fast.H=0", "at least 1"),
        ("outer.momentum=1", "at least 0 and less than 1"),
        ("inner.schedule.final_ratio=1.1", "at least 0 and at most 1"),
        ("data.sequence_length=1", "at least 2"),
        ("islands.i0.micro_batch=0", "at least 1"),
        ("islands.i1.data.heldout_blocks=0", "at least 1"),
    ],
)
def test_the_bound_is_said(argument: str, words: str) -> None:
    error = refused(111, argument)
    assert argument in error.what.replace(".0", "")
    assert words in error.mend


def test_every_number_of_the_schema_has_a_bound_and_every_table_row_is_a_key() -> None:
    numbers = {dotted(key) for key in schema_keys() if type_of(key, "") in (int, float)}
    assert numbers == set(BOUNDS) | {"inner.zero_stage"}
    assert set(ALLOWED) <= {dotted(key) for key in schema_keys()}


@pytest.mark.parametrize("name", ["a/b", "..", ".x", "-x", "a b", "", "é", "x" * 65, "a\n"])
def test_names_that_cannot_be_file_names_are_refused(name: str) -> None:
    for key, value in (("run.name", name), ("islands.names", [name, "ok"])):
        with pytest.raises(ConfigError) as caught:
            check(with_value(key, value))
        assert caught.value.number == 113
        assert repr(name) in caught.value.what


def test_an_island_cannot_be_named_like_a_key_of_its_section() -> None:
    assert "islands.ranks" in refused(113, "islands.names=[ranks,us]").what


@pytest.mark.parametrize("value", ["module", "pkg.module", "pkg:", ":f", "pkg/module.py:f", "a b:f"])
@pytest.mark.parametrize("section", ["model", "data", "tokenizer"])
def test_a_builder_is_the_import_path_of_a_function(section: str, value: str) -> None:
    assert "package.module:function" in refused(113, f"{section}.builder={value}").mend


def test_a_good_builder_passes_and_needs_no_path() -> None:
    check(compose(["data.builder=my_pkg.corpus:documents", "model.builder=my.models:build"]).config)


def test_island_names_are_unique_and_as_many_as_the_count() -> None:
    assert "us more than once" in refused(114, "islands.names=[us,eu,us]").what
    error = refused(114, "islands.names=[us,eu]", "islands.count=3")
    assert "islands.count=3" in error.what
    assert "us, eu" in error.what


def test_min_count_max_and_quorum_fit_together() -> None:
    assert "islands.min=3" in refused(116, "islands.min=3").what
    assert "islands.max=1" in refused(116, "islands.max=1").what
    assert "quorum.n=3" in refused(116, "quorum.kind=at_least", "quorum.n=3", "islands.max=4").what
    check(compose(["quorum.kind=at_least", "quorum.n=2", "islands.max=4", "islands.min=2"]).config)


def test_bf16_needs_a_zero_stage_that_has_correct_masters() -> None:
    error = refused(115, "inner.precision=bf16", "inner.zero_stage=0")
    assert "inner.zero_stage=1" in error.mend
    check(compose(["inner.precision=bf16", "inner.zero_stage=1"]).config)


@pytest.mark.parametrize(
    ("number", "inner"),
    [
        (110, InnerConfig(zero_stage=4)),
        (110, InnerConfig(optimizer=InnerOptimizerConfig(name="lamb"))),
        (110, InnerConfig(schedule=InnerScheduleConfig(kind="step"))),
        (111, InnerConfig(micro_batch=0)),
        (111, InnerConfig(lr=math.nan)),
        (115, InnerConfig(precision="bf16", zero_stage=0)),
    ],
)
def test_the_inner_section_can_be_checked_alone(number: int, inner: InnerConfig) -> None:
    check_inner(InnerConfig())
    with pytest.raises(ConfigError) as caught:
        check_inner(inner)
    assert caught.value.number == number
    assert "inner." in caught.value.what


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_accepted_from_stage_1_on(stage: int) -> None:
    check_inner(InnerConfig(zero_stage=stage, precision="bf16"))


def test_what_a_source_needs_must_be_given_and_what_it_does_not_read_must_not() -> None:
    for source in ("text", "jsonl", "parquet", "csv"):
        assert "data.path=" in refused(112, f"data={source}").mend
        check(compose([f"data={source}", "data.path=somewhere/*.x"]).config)
    assert "data.dataset=" in refused(112, "data=hf").mend
    assert "data=text" in refused(119, "data.path=a.txt").mend
    assert "data=hf" in refused(119, "data.dataset=a/b").mend
    assert "islands.i1.data.path" in refused(112, "islands.i1.data=text").mend


def test_all_islands_have_blocks_of_one_length() -> None:
    assert "islands.i0.data.sequence_length" in refused(117, "islands.i0.data.sequence_length=8").what


def test_an_island_sends_in_a_codec_of_its_own_where_contributions_can_meet() -> None:
    refused(110, "islands.i0.codec=topk")
    refused(110, "islands.i0.codec=int9")
    refused(128, "islands.i0.codec=int8", "codec.up.kind=dct", "codec.up.k=8", "codec.up.feedback=true")
    refused(128, "islands.i0.codec=int8", "topology.kind=ring")
    check(compose(["islands.i0.codec=int8", "codec.up.kind=bf16"]).config)


def test_a_model_comes_from_one_place() -> None:
    refused(118, "model.pretrained=a/b", "model.builder=pkg:f")


def test_a_sequence_fits_the_positions_of_the_model() -> None:
    error = refused(118, "data.sequence_length=2048")
    assert "2048" in error.what
    assert "1024" in error.what


def test_a_tokenizer_folder_must_exist() -> None:
    assert "./nowhere" in refused(112, "tokenizer.name=./nowhere").what


def test_warm_up_and_decay_fit_into_a_schedule_of_given_length() -> None:
    refused(120, "inner.schedule.total_steps=30", "inner.schedule.warmup_steps=20", "inner.schedule.decay_steps=20")


@pytest.mark.parametrize("storage", ["/data/x", "relative", "file:///x", "memory://x", "s3://bucket/x", "gs://b"])
def test_a_storage_of_a_known_scheme_passes(storage: str) -> None:
    check(compose([f"run.storage={storage}"]).config)


def test_an_unknown_storage_scheme_is_refused() -> None:
    error = refused(121, "run.storage=s4://bucket")
    assert "s4" in error.what
    assert "did you mean s3://?" in error.mend


def test_short_runs_are_warned_of_the_papers_momentum() -> None:
    warnings = check(compose(["outer.lr=0.7", "outer.momentum=0.9", "run.rounds=29"]).config)
    assert len(warnings) == 1
    assert "by 7;" in warnings[0]
    assert "29 rounds" in warnings[0]
    assert check(compose(["run.rounds=30"]).config) == []
    assert check(compose(["outer.momentum=0.5"]).config) == []
    assert check(compose(["outer.kind=sgd", "outer.lr=1"]).config) == []


def test_a_learning_rate_that_is_never_reached_is_warned_of() -> None:
    short = ["outer.momentum=0.5", "run.rounds=2", "inner.H=10"]
    (warning,) = check(compose([*short, "inner.schedule.warmup_steps=20"]).config)
    assert "warmup_steps=20" in warning
    (warning,) = check(compose([*short, "inner.schedule.warmup_steps=5", "inner.schedule.decay_steps=16"]).config)
    assert "overlap in 20" in warning


def test_the_tables_know_every_enumeration_that_the_schema_comments() -> None:
    texts = [f"{section}.{name}" for section, name in _plain_text_keys()]
    free = {"run.name", "run.root", "model.name", "model.architecture", "data.name", "data.split", "data.text_column"}
    free |= {"tokenizer.name", "algorithm.name", "overlay.name", "observe.wandb_project", "export.prompt"}
    free |= {"islands.region_label", "islands.region_resource", "islands.accelerator"}
    assert set(texts) - free == set(ALLOWED) - {"inner.zero_stage"}


def _plain_text_keys() -> list[tuple[str, str]]:
    found = []
    for key in schema_keys():
        section: Any = Config
        for name in key[:-1]:
            section = fields_of(section)[name]
        assert dataclasses.is_dataclass(section)
        if typing.get_type_hints(section)[key[-1]] is str:
            found.append((dotted(key[:-1]), key[-1]))
    return found
