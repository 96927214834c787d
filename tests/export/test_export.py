"""An export holds exactly the anchor, loads by transformers' own classes, and appears whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ray_diloco import export as export_module
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.names import anchor_filename
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.config.schema import ModelConfig
from ray_diloco.errors import CheckpointError
from ray_diloco.export import Vocabulary, export_run
from ray_diloco.inner.model import build_model

END = 256
IDS = torch.tensor([[0, 5, 200, 256, 17, 42, 99, 3]])
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": ModelConfig(architecture="llama", config={**SMALL, "tie_word_embeddings": False}),
    "llama with tied embeddings": ModelConfig(architecture="llama", config={**SMALL, "tie_word_embeddings": True}),
    "gpt2": ModelConfig(architecture="gpt2", config={"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "qwen3": ModelConfig(architecture="qwen3", config={**SMALL, "num_key_value_heads": 1, "head_dim": 16}),
    "mixtral": ModelConfig(architecture="mixtral", config={**SMALL, "num_key_value_heads": 1, "num_local_experts": 2}),
}


def committed(folder: Path, anchor: Mapping[str, np.ndarray]) -> tuple[CheckpointStore, Manifest]:
    """A commit of that anchor in two shards, as a run leaves it."""
    store = CheckpointStore(str(folder))
    names = list(anchor)
    files = [
        store.write_tensors(3, anchor_filename(k, 2), {n: anchor[n] for n in names[k::2]}, kind="anchor")
        for k in range(2)
    ]
    layout = tuple((name, array.shape) for name, array in anchor.items())
    return store, store.commit(Manifest("sail", 3, {"0": 3}, 60, layout, tuple(files)))


def anchor_of(model: nn.Module) -> dict[str, np.ndarray]:
    """The trainable tensors of a model, moved off their initial values."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: (p.detach() + torch.randn(p.shape, generator=generator) * 0.01).numpy()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def with_anchor(model: nn.Module, anchor: Mapping[str, np.ndarray]) -> nn.Module:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in anchor:
                p.copy_(torch.from_numpy(anchor[name]))
    return model.eval()


def build(config: ModelConfig, vocabulary: Vocabulary) -> nn.Module:
    return build_model(config, vocabulary.vocab_size, vocabulary.eos_id, vocabulary.sequence_length, 0)


@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_export_gives_exactly_the_anchors_logits(name: str, tmp_path: Path, vocabulary: Vocabulary) -> None:
    model = build(MODELS[name], vocabulary)
    anchor = anchor_of(model)
    store, manifest = committed(tmp_path / "run", anchor)
    result = export_run(tmp_path / "export", store, manifest, MODELS[name], vocabulary, seed=0)
    loaded, info = AutoModelForCausalLM.from_pretrained(result.folder, output_loading_info=True)
    assert {key: value for key, value in info.items() if value} == {}
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, with_anchor(model, anchor)(IDS).logits)
    assert result.loadable
    assert result.parameters == sum(array.size for array in anchor.values())
    assert result.nbytes == sum(path.stat().st_size for path in result.folder.iterdir())


def test_the_folder_says_what_the_model_is(tmp_path: Path, vocabulary: Vocabulary) -> None:
    config = MODELS["llama with tied embeddings"]
    store, manifest = committed(tmp_path / "run", anchor_of(build(config, vocabulary)))
    folder = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0).folder
    written = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "float32",
        "vocab_size": 257,
        "max_position_embeddings": 64,
        "eos_token_id": END,
        "tie_word_embeddings": True,
        "trained_sequence_length": 64,
    }
    assert {key: written[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (END, END)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    page = (folder / "README.md").read_text()
    assert "`sail`" in page and "outer round 3" in page and manifest.digest in page


def test_the_tokenizer_goes_with_the_model(tmp_path: Path, vocabulary: Vocabulary) -> None:
    config = MODELS["llama"]
    store, manifest = committed(tmp_path / "run", anchor_of(build(config, vocabulary)))
    folder = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0).folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("def naïve():\n\treturn '…'")["input_ids"]) == "def naïve():\n\treturn '…'"
    assert tokenizer.eos_token_id == END


def test_bfloat16_rounds_the_weights_once_and_halves_the_file(tmp_path: Path, vocabulary: Vocabulary) -> None:
    config = MODELS["llama"]
    anchor = anchor_of(build(config, vocabulary))
    store, manifest = committed(tmp_path / "run", anchor)
    full = export_run(tmp_path / "full", store, manifest, config, vocabulary, seed=0)
    half = export_run(tmp_path / "half", store, manifest, config, vocabulary, seed=0, dtype="bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(half.folder)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, torch.from_numpy(anchor[name]).bfloat16()), name
    sizes = [(r.folder / "model.safetensors").stat().st_size for r in (full, half)]
    assert sizes[0] - sizes[1] == pytest.approx(2 * full.parameters, abs=200)


def test_large_weights_are_cut_into_files_with_an_index(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "SHARD_SIZE", "64KB")
    config = MODELS["llama"]
    model = build(config, vocabulary)
    anchor = anchor_of(model)
    store, manifest = committed(tmp_path / "run", anchor)
    folder = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(anchor)
    assert len(set(index["weight_map"].values())) > 1
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, with_anchor(model, anchor)(IDS).logits)


def test_a_run_from_pretrained_weights_keeps_that_models_configuration(tmp_path: Path, vocabulary: Vocabulary) -> None:
    base = build(MODELS["gpt2"], vocabulary)
    base.config.summary_first_dropout = 0.25
    base.generation_config.max_length = 33
    base.save_pretrained(tmp_path / "base")
    config = ModelConfig(pretrained=str(tmp_path / "base"))
    model = build(config, vocabulary)
    anchor = anchor_of(model)
    store, manifest = committed(tmp_path / "run", anchor)
    folder = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0).folder
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(loaded.config, "trained_sequence_length")
    assert (loaded.config.summary_first_dropout, loaded.generation_config.max_length) == (0.25, 33)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, with_anchor(model, anchor)(IDS).logits)


class Bigram(nn.Module):
    """A user's own model: logits from a table, one row of which is frozen, and a persistent buffer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size))
        self.bias = nn.Parameter(torch.randn(vocab_size), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.table[input_ids] + self.bias
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def build_bigram(config: ModelConfig, vocab_size: int) -> nn.Module:
    return Bigram(vocab_size)


def test_a_users_own_module_is_exported_as_weights_with_a_word_on_how_to_load_them(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import load_torch_model

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = ModelConfig(builder="test_export:build_bigram")
    model = build(config, vocabulary)
    anchor = anchor_of(model)
    assert set(anchor) == {"table"}
    store, manifest = committed(tmp_path / "run", anchor)
    result = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0)
    assert not result.loadable
    assert not (result.folder / "config.json").exists()
    assert "test_export:build_bigram" in (result.folder / "README.md").read_text()
    blank = Bigram(vocabulary.vocab_size)
    load_torch_model(blank, result.folder)
    assert torch.equal(blank.table, torch.from_numpy(anchor["table"]))
    assert torch.equal(blank.bias, model.get_parameter("bias"))


def test_a_commit_of_another_model_is_refused_by_name_and_shape(tmp_path: Path, vocabulary: Vocabulary) -> None:
    anchor = anchor_of(build(MODELS["llama"], vocabulary))
    wider = ModelConfig(architecture="llama", config={**MODELS["llama"].config, "intermediate_size": 96})
    store, manifest = committed(tmp_path / "run", anchor)
    with pytest.raises(CheckpointError, match=r"RD-540: .*up_proj.weight' has shape \(64, 32\).*\(96, 32\)"):
        export_run(tmp_path / "export", store, manifest, wider, vocabulary, seed=0)
    assert not (tmp_path / "export").exists()


def test_a_commit_that_lacks_a_tensor_is_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    anchor = anchor_of(build(MODELS["llama"], vocabulary))
    del anchor["model.norm.weight"]
    store, manifest = committed(tmp_path / "run", anchor)
    with pytest.raises(CheckpointError, match=r"RD-540: .*lacks 1 tensors of the model, 'model.norm.weight'"):
        export_run(tmp_path / "export", store, manifest, MODELS["llama"], vocabulary, seed=0)


def test_a_new_export_replaces_the_old_one_whole(tmp_path: Path, vocabulary: Vocabulary) -> None:
    anchor = anchor_of(build(MODELS["llama"], vocabulary))
    store, manifest = committed(tmp_path / "run", anchor)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "stale.txt").write_text("old")
    export_run(tmp_path / "export", store, manifest, MODELS["llama"], vocabulary, seed=0)
    assert not (tmp_path / "export" / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_export_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    anchor = anchor_of(build(MODELS["llama"], vocabulary))
    store, manifest = committed(tmp_path / "run", anchor)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "good.txt").write_text("good")
    monkeypatch.setattr(export_module, "_copy_tokenizer", full)
    with pytest.raises(CheckpointError, match=r"RD-541: .*No space left"):
        export_run(tmp_path / "export", store, manifest, MODELS["llama"], vocabulary, seed=0)
    assert os.listdir(tmp_path / "export") == ["good.txt"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_model_folder_as_tokenizer_gives_its_tokenizer_only(tmp_path: Path, vocabulary: Vocabulary) -> None:
    for name in ("model.safetensors", "config.json", "README.md", "pytorch_model.bin"):
        (vocabulary.tokenizer / name).write_text("{}")
    config = MODELS["llama"]
    store, manifest = committed(tmp_path / "run", anchor_of(build(config, vocabulary)))
    folder = export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0).folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not (folder / "pytorch_model.bin").exists()
    assert (folder / "model.safetensors").stat().st_size > 2


def test_exporting_shows_no_progress_bar_and_no_warning(
    tmp_path: Path, vocabulary: Vocabulary, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    config = MODELS["llama with tied embeddings"]
    store, manifest = committed(tmp_path / "run", anchor_of(build(config, vocabulary)))
    capfd.readouterr()
    export_run(tmp_path / "export", store, manifest, config, vocabulary, seed=0)
    assert capfd.readouterr() == ("", "")
    assert [str(w.message) for w in recwarn.list] == []
