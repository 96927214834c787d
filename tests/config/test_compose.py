from pathlib import Path

import pytest

from ray_diloco.config.compose import Composed, compose, composed_from
from ray_diloco.config.islands import IslandOverrideConfig
from ray_diloco.config.schema import Config, RunConfig, island_data
from ray_diloco.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder of the test's own, so that ./conf is what the test writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> str:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return path


def refused(number: int, *arguments: str, config_file: str | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(arguments, config_file)
    assert caught.value.number == number, str(caught.value)
    return caught.value


# Precedence


def test_without_arguments_the_default_groups_lie_over_the_schema() -> None:
    composed = compose()
    assert composed.config.model.config["hidden_size"] == 160
    assert composed.config.inner.H == 500
    assert composed.origins["model.config.hidden_size"] == "conf/model/tiny.yaml"
    assert composed.origins["inner.H"] == "conf/algorithm/diloco.yaml"
    assert composed.origins["inner.micro_batch"] == "default"


def test_an_experiment_file_wins_over_groups_and_an_argument_over_both() -> None:
    file = write("e.yaml", "inner:\n  H: 20\n  lr: 0.01\n")
    composed = compose(["inner.lr=0.5"], file)
    assert (composed.config.inner.H, composed.config.inner.lr) == (20, 0.5)
    assert composed.origins["inner.H"] == "e.yaml"
    assert composed.origins["inner.lr"] == "argument"


@pytest.mark.parametrize("choice", ["model: llama_150m", "model: {name: llama_150m}", "model.name: llama_150m"])
def test_an_experiment_file_chooses_a_group_and_an_argument_sets_a_key_of_it(choice: str) -> None:
    file = write("e.yaml", choice)
    model = compose(["model.config.num_hidden_layers=2"], file).config.model
    assert (model.name, model.config["hidden_size"], model.config["num_hidden_layers"]) == ("llama_150m", 896, 2)


def test_keys_of_an_experiment_file_lie_over_the_group_that_it_chooses() -> None:
    file = write("e.yaml", "model:\n  name: llama_150m\n  config:\n    num_hidden_layers: 2\n")
    model = compose([], file).config.model
    assert (model.config["hidden_size"], model.config["num_hidden_layers"]) == (896, 2)


def test_a_group_chosen_by_an_argument_leaves_nothing_of_the_experiments_choice() -> None:
    file = write("e.yaml", "model:\n  name: llama_1b\n  attention: eager\n  config:\n    hidden_size: 64\n")
    model = compose(["model=tiny"], file).config.model
    assert model.config["hidden_size"] == 160
    assert "rope_parameters" not in model.config
    assert not model.activation_checkpointing
    assert model.attention == "eager", "what does not define the model outlives the choice"


def test_an_algorithm_chosen_by_an_argument_lies_over_the_experiment_file() -> None:
    file = write("e.yaml", "algorithm: diloco\ninner: {H: 20}\nouter: {momentum: 0.5}\n")
    config = compose(["algorithm=local_sgd", "outer.lr=0.9"], file).config
    assert (config.algorithm.name, config.inner.H, config.outer.momentum) == ("local_sgd", 50, 0.0)
    assert config.outer.lr == 0.9


def test_the_last_of_two_arguments_wins() -> None:
    assert compose(["inner.H=1", "model=llama_1b", "inner.H=2", "model=tiny"]).config.inner.H == 2
    assert compose(["model=llama_1b", "model=tiny"]).config.model.name == "tiny"


def test_settings_from_python_may_be_nested_or_dotted_and_count_as_arguments() -> None:
    composed = compose(["inner.H=1"], settings={"inner.H": 7, "outer": {"lr": 0.3}, "model": "llama_150m"})
    assert (composed.config.inner.H, composed.config.outer.lr) == (7, 0.3)
    assert composed.config.model.name == "llama_150m"
    assert composed.origins["outer.lr"] == "argument"


# Where group files come from


def test_a_users_own_group_files_are_found_beside_the_packaged_ones() -> None:
    write("conf/model/mine.yaml", "architecture: gpt2\nconfig: {n_layer: 2}\n")
    composed = compose(["model=mine"])
    assert composed.config.model.architecture == "gpt2"
    assert composed.config.model.config == {"n_layer": 2}
    assert composed.origins["model.config.n_layer"] == "conf/model/mine.yaml"
    assert compose(["model=tiny"]).config.model.config["hidden_size"] == 160


def test_the_conf_dir_is_searched_first_then_the_current_folder_then_the_package() -> None:
    write("conf/model/tiny.yaml", "config: {hidden_size: 32}\n")
    write("other/model/tiny.yaml", "config: {hidden_size: 16}\n")
    composed = compose(conf_dir="other")
    assert composed.config.model.config == {"hidden_size": 16}
    assert composed.origins["model.config.hidden_size"] == "other/model/tiny.yaml"
    assert compose().config.model.config == {"hidden_size": 32}


def test_a_named_experiment_is_an_experiment_file() -> None:
    write("conf/experiment/mine.yaml", "inner: {H: 3}\n")
    composed = compose(["experiment=mine"])
    assert composed.config.inner.H == 3
    assert composed.origins["inner.H"] == "conf/experiment/mine.yaml"


# What a group takes instead of a name


def test_a_folder_is_a_pretrained_model_and_nothing_of_the_default_model_is_left() -> None:
    Path("weights/m").mkdir(parents=True)
    model = compose(["model=weights/m"]).config.model
    assert (model.pretrained, model.name, model.config) == ("weights/m", "m", {})


@pytest.mark.parametrize("value", ["some-org/some.model", "folder"])
def test_a_tokenizer_is_a_folder_or_a_hub_name(value: str) -> None:
    Path("folder").mkdir()
    assert compose([f"tokenizer={value}"]).config.tokenizer.name == value
    assert compose(["tokenizer.name=gpt2"]).config.tokenizer.name == "gpt2"


@pytest.mark.parametrize(
    ("file", "value", "source"),
    [
        ("a.txt", "a.txt", "text"),
        ("a.py", "*.py", "text"),
        ("d/a.jsonl", "d/*.jsonl", "jsonl"),
        ("a.parquet", "a.parquet", "parquet"),
        ("a.CSV", "a.CSV", "csv"),
        ("a.txt", "a.txt,*.txt", "text"),
    ],
)
def test_a_path_or_glob_is_a_data_source_of_the_form_that_its_ending_says(file: str, value: str, source: str) -> None:
    write(file, "x")
    data = compose([f"data={value}"]).config.data
    assert (data.source, data.name, data.path) == (source, source, value)


def test_files_of_two_forms_are_not_one_source() -> None:
    write("a.txt", "x")
    write("a.csv", "x")
    assert "csv, text" in refused(102, "data=a.txt,a.csv").what


def test_a_section_that_a_layer_defines_by_itself_keeps_nothing_of_the_default_group() -> None:
    model = compose(["model.architecture=gpt2", "model.config.n_layer=2"]).config.model
    assert (model.config, model.name) == ({"n_layer": 2}, "gpt2")
    model = compose([], write("e.yaml", "model: {name: mine, architecture: gpt2, config: {n_layer: 2}}")).config.model
    assert (model.config, model.name) == ({"n_layer": 2}, "mine")
    data = compose(["data.source=jsonl", "data.path=x.jsonl"]).config.data
    assert (data.name, data.path) == ("jsonl", "x.jsonl")


def test_vocab_size_is_short_for_the_tokenizers() -> None:
    assert compose(["tokenizer=bpe", "vocab_size=1000"]).config.tokenizer.vocab_size == 1000


# Values


def test_values_are_typed_by_the_schema() -> None:
    config = compose(
        ["inner.lr=1e-3", "islands.cpus_per_rank=2", "trace.contributions=true", "ray.address=null", "data.cache="]
    ).config
    assert config.inner.lr == 0.001
    assert isinstance(config.islands.cpus_per_rank, float)
    assert config.trace.contributions is True
    assert config.ray.address is None
    assert config.data.cache is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("export.prompt=if x == {: ", "if x == {: "),
        ("export.prompt=a=b=c", "a=b=c"),
        ("export.prompt=", ""),
        ("export.prompt=' x'", " x"),
        ("export.prompt=007", "007"),
        ("export.prompt=off", "off"),
        ("export.prompt=${run.name}!", "run!"),
        ("export.prompt=\\${run.name}", "${run.name}"),
    ],
)
def test_text_is_taken_as_it_stands(argument: str, value: str) -> None:
    assert compose([argument]).config.export.prompt == value


def test_names_in_a_list_stay_names() -> None:
    config = compose(["islands.names=[us,no,01]"]).config
    assert config.islands.names == ["us", "no", "01"]
    assert config.islands.count == 3, "the count follows the names"
    assert compose([], write("e.yaml", "islands: {names: [no, 01]}")).config.islands.names == ["no", "01"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("inner.H=abc", "must be a whole number; got abc"),
        ("inner.H=1.5", "must be a whole number; got 1.5"),
        ("inner.H=true", "must be a whole number; got true"),
        ("inner.lr=null", "must be a number; got null"),
        ("run.name=null", "must be text; got null"),
        ("trace.contributions=7", "must be true or false; got 7"),
        ("islands.names=us", "must be a list such as"),
        ("model.config=3", "must be a mapping; got 3"),
        ("run.seed=???", "must be a whole number; got ???"),
        ("islands.i0.ranks=x", "must be a whole number or null; got x"),
        ("islands.i0.data.max_documents=x", "must be a whole number; got x"),
    ],
)
def test_a_wrong_type_says_what_is_expected_and_what_was_given(argument: str, words: str) -> None:
    error = refused(103, argument)
    assert words in error.what
    assert argument in error.what


def test_a_wrong_type_names_the_allowed_values_where_there_are_few() -> None:
    assert "(0, 1, 2, 3)" in refused(103, "inner.zero_stage=two").mend


def test_a_wrong_value_in_a_file_is_named_with_its_line() -> None:
    assert "e.yaml:3: 'inner.H'" in refused(103, config_file=write("e.yaml", "inner:\n  lr: 1\n  H: many\n")).what
    assert "e.yaml:2: 'run.name'" in refused(103, config_file=write("e.yaml", "run:\n  name: true\n")).what
    assert "e.yaml:2: unknown key" in refused(101, config_file=write("e.yaml", "inner:\n  Hh: 3\n")).what
    write("conf/model/bad.yaml", "architecture: x\natention: sdpa\n")
    error = refused(101, "model=bad")
    assert "conf/model/bad.yaml:2" in error.what
    assert "did you mean 'model.attention'?" in error.mend


def test_a_reference_that_leads_nowhere_is_refused() -> None:
    assert "argument 'run.root=${run.nam}'" in refused(107, "run.root=${run.nam}").what
    refused(107, "run.root=${oc.env:SURELY_NOT_SET}/x")
    refused(107, "run.root=${")


# Mistakes


@pytest.mark.parametrize("argument", ["foo", "=3", "", "inner..H=3", " inner.H=3", "inner.H =3", "--x"])
def test_an_argument_that_is_no_pair_is_refused_with_the_form(argument: str) -> None:
    assert "inner.H=50" in refused(104, argument).mend


def test_a_value_that_is_not_yaml_is_refused() -> None:
    refused(104, "model.config={a: 1")


def test_an_unknown_choice_lists_the_choices_and_the_nearest() -> None:
    error = refused(102, "model=tyni")
    assert "there is no model 'tyni'" in error.what
    assert "did you mean model=tiny?" in error.mend
    assert "llama_150m, llama_1b, tiny" in error.mend
    assert "demo" in refused(102, "experiment=dmo").mend
    assert "e.yaml:1" in refused(102, config_file=write("e.yaml", "algorithm: {name: dilco}")).what
    refused(102, "model=../model/tiny")


def test_missing_files_and_folders_are_named() -> None:
    assert "nowhere.yaml" in refused(105, config_file="nowhere.yaml").what
    with pytest.raises(ConfigError, match="--conf-dir nowhere") as caught:
        compose(conf_dir="nowhere")
    assert caught.value.number == 105


def test_two_experiments_at_once_are_refused() -> None:
    refused(108, "experiment=demo", config_file=write("e.yaml", ""))
    refused(108, config_file=write("e.yaml", "experiment: demo"))


def test_a_group_file_sets_its_own_part_only() -> None:
    write("conf/algorithm/x.yaml", "model: tiny\n")
    assert "conf/algorithm/x.yaml" in refused(101, "algorithm=x").what
    write("conf/data/x.yaml", "inner: {H: 3}\n")
    assert "conf/data/x.yaml:1" in refused(101, "data=x").what


def test_an_empty_choice_is_refused() -> None:
    refused(103, "model=")
    refused(103, config_file=write("e.yaml", "model: 3"))


# Islands that differ


def test_an_islands_own_data_and_size_reach_its_override() -> None:
    config = compose(
        [
            "islands.names=[us,eu]",
            "islands.us.data=jsonl",
            "islands.us.data.path=us/*.jsonl",
            "islands.us.data.text_column=body",
            "islands.eu.ranks=2",
            "islands.eu.micro_batch=8",
        ]
    ).config
    assert config.islands.overrides["eu"] == IslandOverrideConfig(ranks=2, micro_batch=8)
    data = island_data(config, "us")
    assert (data.name, data.source, data.path, data.text_column) == ("jsonl", "jsonl", "us/*.jsonl", "body")
    assert data.sequence_length == config.data.sequence_length
    assert island_data(config, "eu") == config.data


def test_an_islands_data_may_be_a_path() -> None:
    write("us.csv", "text\nx\n")
    data = island_data(compose(["islands.i0.data=us.csv", "data.sequence_length=64"]).config, "i0")
    assert (data.source, data.path, data.sequence_length) == ("csv", "us.csv", 64)


def test_an_argument_replaces_the_experiments_data_of_an_island() -> None:
    file = write("e.yaml", "islands: {i0: {data: {name: jsonl, path: a.jsonl, text_column: body}}}")
    assert island_data(compose([], file).config, "i0").path == "a.jsonl"
    data = island_data(compose(["islands.i0.data=text", "islands.i0.data.path=b.txt"], file).config, "i0")
    assert (data.source, data.path, data.text_column) == ("text", "b.txt", "text")


def test_only_the_runs_own_islands_have_settings() -> None:
    error = refused(109, "islands.names=[us,eu]", "islands.su.ranks=2")
    assert "no island 'su'" in error.what
    assert error.mend == "did you mean 'us'? islands: eu, us"
    assert "islands: i0, i1" in refused(109, "islands.i2.ranks=2").mend


def test_an_unknown_setting_of_an_island_is_refused() -> None:
    assert "did you mean 'islands.overrides.i0.ranks'?" in refused(101, "islands.i0.rank=2").mend
    assert "did you mean 'data.text_column'?" in refused(101, "islands.i0.data.text_colum=x").mend
    refused(102, "islands.i0.data=nowhere")


def test_a_mistyped_key_of_the_section_is_no_island() -> None:
    assert "did you mean 'islands.count'?" in refused(101, "islands.cuont=3").mend


# From Python


def test_a_configuration_from_python_knows_what_differs_from_the_schema() -> None:
    composed = composed_from(Config(run=RunConfig(name="mine")))
    assert isinstance(composed, Composed)
    assert composed.origins["run.name"] == "python"
    assert composed.origins["run.root"] == "default"


def test_the_result_is_the_schemas_own_dataclasses() -> None:
    config = compose(["islands.i0.ranks=2"]).config
    assert type(config) is Config
    assert type(config.islands.overrides["i0"]) is IslandOverrideConfig
    assert type(config.model.config) is dict


def test_a_complete_file_is_taken_as_it_is_whatever_group_files_say() -> None:
    write("conf/model/tiny.yaml", "config: {hidden_size: 1, new_key: 2}\n")
    file = write("e.yaml", "complete: true\nmodel: {name: tiny, config: {hidden_size: 160}}\n")
    composed = compose([], file)
    assert composed.config.model.config == {"hidden_size": 160}
    assert composed.config.inner.H == Config().inner.H
    assert compose(["model=tiny"], file).config.model.config == {"hidden_size": 1, "new_key": 2}
