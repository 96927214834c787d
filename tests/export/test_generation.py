"""Text from an export: chosen as asked, whole characters only, longer than the context; a clear word otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ray_diloco.errors import CheckpointError, ConfigError
from ray_diloco.export import Vocabulary
from ray_diloco.generation import export_of, generate

END = 256
CONTEXT = 64


def save(folder: Path, model: PreTrainedModel, vocabulary: Vocabulary) -> Path:
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(vocabulary.tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def chain(tmp_path: Path, vocabulary: Vocabulary) -> Path:
    """A model that has learnt a chain by heart: a → é (two bytes) → a → …, and x → end of text."""
    tokenizer = AutoTokenizer.from_pretrained(vocabulary.tokenizer)
    a, c3, a9, x = tokenizer("aéx")["input_ids"]
    follows = {a: c3, c3: a9, a9: a, x: END, END: x}
    config = LlamaConfig(
        vocab_size=257, hidden_size=260, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=CONTEXT, bos_token_id=END, eos_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        # Attention and MLP add nothing, so the logits are a table of the current token alone.
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(257, 260))
        for token, after in follows.items():
            model.lm_head.weight[after, token] = 10
    return save(tmp_path / "chain" / "export", model, vocabulary)


@pytest.fixture
def gpt2(tmp_path: Path, vocabulary: Vocabulary) -> Path:
    """An untrained model whose positions are a table: beyond it there is an error."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=CONTEXT, bos_token_id=END, eos_token_id=END,
        initializer_range=0.3,
    )  # fmt: skip
    return save(tmp_path / "gpt2" / "export", GPT2LMHeadModel(config), vocabulary)


def test_the_result_is_the_prompt_with_its_continuation(chain: Path) -> None:
    assert generate(chain, "éa", tokens=5) == "éaéaé"


def test_the_end_of_text_ends_it_and_is_not_shown(chain: Path) -> None:
    assert generate(chain, "ax", tokens=50) == "ax"


def test_an_empty_prompt_starts_behind_an_end_of_text(chain: Path) -> None:
    assert generate(chain, "", tokens=50) == "x"


@pytest.mark.parametrize("tokens", [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_text_goes_on_beyond_the_context(chain: Path, tokens: int) -> None:
    expected = ("aé" * tokens).encode()[: 1 + tokens].decode(errors="replace")
    assert generate(chain, "a", tokens=tokens) == expected


def test_a_model_never_sees_more_tokens_than_it_was_trained_on(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    forward = LlamaForCausalLM.forward

    def watch(self: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        lengths.append(output.past_key_values.get_seq_length())
        return output

    settings = json.loads((chain / "config.json").read_text())
    (chain / "config.json").write_text(json.dumps({**settings, "trained_sequence_length": 16}))
    monkeypatch.setattr(LlamaForCausalLM, "forward", watch)
    assert generate(chain, "a", tokens=60) == "aé" * 20 + "a"
    # One token less than 16 is read: the sixteenth is the last that is chosen.
    assert max(lengths) == 15


def test_only_whole_characters_are_shown_as_they_come(chain: Path) -> None:
    pieces: list[str] = []
    assert generate(chain, "é", tokens=6, show=pieces.append) == "éaéaé"
    assert pieces == ["é", "a", "é", "a", "é"]


def test_a_character_that_is_cut_off_is_shown_at_the_end_as_such(chain: Path) -> None:
    pieces: list[str] = []
    assert generate(chain, "a", tokens=1, show=pieces.append) == "a\N{REPLACEMENT CHARACTER}"
    assert pieces == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_the_same_seed_gives_the_same_text_and_another_one_another(gpt2: Path) -> None:
    first = generate(gpt2, "def ", tokens=30, seed=3)
    assert generate(gpt2, "def ", tokens=30, seed=3) == first
    assert generate(gpt2, "def ", tokens=30, seed=4) != first


def test_the_callers_random_state_is_left_alone(gpt2: Path) -> None:
    before = torch.get_rng_state()
    generate(gpt2, "def ", tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"top_k": 1}])
def test_without_chance_each_token_is_the_likeliest(gpt2: Path, how: dict) -> None:
    model, tokenizer = GPT2LMHeadModel.from_pretrained(gpt2), AutoTokenizer.from_pretrained(gpt2)
    ids = tokenizer("def ")["input_ids"]
    with torch.no_grad():
        for _ in range(20):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert END not in ids
    assert generate(gpt2, "def ", tokens=20, **how) == tokenizer.decode(ids)


def test_top_k_zero_chooses_among_all_tokens(gpt2: Path) -> None:
    assert generate(gpt2, "def ", tokens=30, top_k=0) != generate(gpt2, "def ", tokens=30, top_k=2)


def test_a_prompt_longer_than_the_context_is_kept_whole_in_the_text(gpt2: Path) -> None:
    prompt = "import os\n" * 20
    text = generate(gpt2, prompt, tokens=10)
    assert text.startswith(prompt)
    assert len(text) > len(prompt)


def test_generating_prints_and_warns_nothing(
    gpt2: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    for temperature in (0.0, 0.8):
        generate(gpt2, "def ", tokens=2 * CONTEXT, temperature=temperature)
    assert capfd.readouterr() == ("", "")
    assert [str(w.message) for w in recwarn.list] == []


def test_the_export_of_a_run_is_a_folder_below_it(chain: Path) -> None:
    assert export_of(chain.parent) == chain


@pytest.mark.parametrize("name", ["chian", "young"])
def test_a_run_without_an_export_is_refused_with_those_that_have_one(chain: Path, gpt2: Path, name: str) -> None:
    (chain.parents[1] / "young").mkdir()
    with pytest.raises(CheckpointError, match=f"RD-542: the run '{name}' has no export.*\n.*: chain, gpt2$"):
        export_of(chain.parents[1] / name)


def test_a_folder_without_exports_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"RD-542: .*\n.*: none$"):
        export_of(tmp_path / "nowhere" / "demo")


def test_an_export_of_a_users_own_module_is_refused(chain: Path) -> None:
    (chain / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"RD-543: .*no config\.json"):
        generate(chain, "a")


def test_damaged_weights_are_refused(chain: Path) -> None:
    (chain / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"RD-543: .*cannot be loaded"):
        generate(chain, "a")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, gpt2: Path, vocabulary: Vocabulary) -> None:
    model = GPT2LMHeadModel.from_pretrained(gpt2)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"RD-544: .*'transformer.ln_f.weight'"):
        generate(save(tmp_path / "diverged", model, vocabulary), "a")


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}])
def test_arguments_out_of_range_are_refused_with_their_value(chain: Path, wrong: dict) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"RD-172: {name}={value}"):
        generate(chain, "a", **wrong)


def test_an_empty_prompt_needs_an_end_of_text_token(chain: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chain)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(chain)
    with pytest.raises(ConfigError, match="RD-173"):
        generate(chain, "", tokens=1)
