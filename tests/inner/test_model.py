import pytest
import torch

from ray_diloco.config.schema import ModelConfig
from ray_diloco.errors import DilocoError, InnerError
from ray_diloco.inner.model import build_model, model_configuration, parameter_count

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCAB, SEQUENCE = 64, 16


def build(seed=0, vocab_size=VOCAB, sequence=SEQUENCE, **changes):
    model = ModelConfig(**({"config": dict(SMALL)} | changes))
    return build_model(model, vocab_size, 3, sequence, seed)


def builder(name):
    return build(config={}, builder=f"inner_builders:{name}")


def number(call, *args, **kwargs):
    with pytest.raises(DilocoError) as caught:
        call(*args, **kwargs)
    return caught.value.number


def test_a_model_from_a_configuration_is_fp32_and_has_the_tokenizers_vocabulary():
    model = build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().num_embeddings == VOCAB
    assert model.config.eos_token_id == 3
    assert model.config._attn_implementation == "sdpa"
    assert model.training


def test_parameters_are_counted_once_when_tied():
    untied, tied = build(), build(config=SMALL | {"tie_word_embeddings": True})
    assert parameter_count(untied) - parameter_count(tied) == VOCAB * 32


def test_the_same_seed_gives_the_same_model_and_another_one_another():
    first, again, other = (torch.cat([p.flatten() for p in build(seed).parameters()]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_building_leaves_the_random_state_of_the_process_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build(seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_positions_reach_as_far_as_a_sequence_by_default():
    assert build(sequence=48).config.max_position_embeddings == 48


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gpt_neox"])
def test_other_families_build_from_the_same_keys(architecture):
    config = dict(SMALL)
    if architecture == "gpt2":
        del config["intermediate_size"]
    if architecture == "qwen2":
        config["num_key_value_heads"] = 2
    model = build(architecture=architecture, config=config)
    ids = torch.zeros((1, SEQUENCE), dtype=torch.int64)
    assert torch.isfinite(model(input_ids=ids, labels=ids, use_cache=False).loss)


def test_an_unknown_architecture_names_the_nearest():
    with pytest.raises(InnerError, match="RD-701") as caught:
        build(architecture="lama")
    assert "'llama'" in caught.value.mend


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(InnerError, match=r"RD-702.*hidden_sise") as caught:
        build(config=SMALL | {"hidden_sise": 3})
    assert "'hidden_size'" in caught.value.mend


def test_the_old_spelling_of_the_rotary_base_is_accepted():
    model = ModelConfig(config=SMALL | {"rope_theta": 500.0})
    assert model_configuration(model, VOCAB, None, SEQUENCE).rope_parameters["rope_theta"] == 500.0


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (703, {"config": SMALL | {"num_attention_heads": 3}}),
        (703, {"config": SMALL | {"hidden_size": "wide"}}),
        (704, {"config": SMALL | {"vocab_size": VOCAB - 1}}),
        (713, {"attention": "sdpaa"}),
        (714, {"config": SMALL | {"max_position_embeddings": SEQUENCE - 1}}),
    ],
)
def test_values_that_cannot_work_are_refused_by_number(expected, changes):
    assert number(build, **changes) == expected


def test_a_saved_model_is_loaded_in_fp32_whatever_it_was_saved_in(tmp_path):
    saved = build(seed=4).bfloat16()
    saved.save_pretrained(tmp_path)
    loaded = build(pretrained=str(tmp_path), config={})
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs.float())


def test_a_saved_model_with_too_few_token_rows_is_refused(tmp_path):
    build().save_pretrained(tmp_path)
    assert number(build, vocab_size=VOCAB + 1, pretrained=str(tmp_path), config={}) == 704
    assert number(build, sequence=SEQUENCE + 1, pretrained=str(tmp_path), config={}) == 714


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    assert number(build, pretrained=str(tmp_path), config={}) == 705


def test_activation_checkpointing_is_switched_on_where_it_is_supported():
    assert build(activation_checkpointing=True).is_activation_checkpointing
    checkpointed = {"activation_checkpointing": True, "config": {}, "builder": "inner_builders:bigram"}
    assert number(build, **checkpointed) == 712


@pytest.mark.parametrize("name", ["bigram", "loss_only", "half_precision"])
def test_a_builder_that_meets_the_contract_gives_a_model_in_fp32(name):
    assert {p.dtype for p in builder(name).parameters()} == {torch.float32}


def test_a_builders_model_is_seeded_too():
    weights = [build(seed, config={}, builder="inner_builders:bigram").table.weight.detach() for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absent", 122),
        ("not_a_function", 122),
        ("raising", 708),
        ("not_a_module", 708),
        ("no_labels", 709),
        ("no_loss", 710),
        ("loss_per_token", 710),
        ("failing_forward", 710),
        ("frozen", 711),
    ],
)
def test_a_builder_that_breaks_the_contract_is_refused_by_number(name, expected):
    assert number(builder, name) == expected


@pytest.mark.parametrize(
    ("path", "expected"), [("no_such_package.models:build", 122), ("inner_builders", 113), (":bigram", 113)]
)
def test_a_builder_that_cannot_be_found_is_refused(path, expected):
    assert number(build, config={}, builder=path) == expected


def test_a_contract_error_says_what_was_returned():
    with pytest.raises(InnerError, match=r"scalar loss but a tensor of shape \[1, 8\]"):
        builder("loss_per_token")
