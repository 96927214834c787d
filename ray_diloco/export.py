"""A committed anchor as a Hugging Face folder: configuration, weights in safetensors, tokenizer.

transformers itself writes the folder, from a model without storage (torch's meta device) and the anchor's tensors
as its state, so that names, tied weights and shards are as its loader expects them, and memory holds the weights
once.  The folder appears whole or not at all: it is written beside its place and renamed.  A user's own module that
is no transformers model gets its weights and a page that says how to load them, but no `config.json`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.dlpack import from_dlpack

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.config.schema import ModelConfig
from ray_diloco.errors import CheckpointError
from ray_diloco.inner.model import build_model, model_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Weights above this size are cut into files of at most this size, with an index.
SHARD_SIZE = "5GB"
# Key in config.json: tokens per training sequence, beyond which a model from scratch knows positions only by name.
TRAINED_LENGTH = "trained_sequence_length"
# Files of a tokenizer folder that is a model folder too.
_NOT_TOKENIZER = ("config.json", "generation_config.json", "README.md")
_NOT_TOKENIZER_SUFFIXES = (".safetensors", ".bin", ".pt", ".index.json")


@dataclass(frozen=True)
class Vocabulary:
    """What an export needs to know of the corpus.

    Attributes:
      tokenizer: folder that `AutoTokenizer.from_pretrained` loads.
      vocab_size: number of token ids of the tokenizer.
      eos_id: id of the end-of-text token, if there is one.
      sequence_length: tokens per training sequence.
    """

    tokenizer: Path
    vocab_size: int
    eos_id: int | None
    sequence_length: int


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
      folder: the export.
      loadable: whether `AutoModelForCausalLM.from_pretrained(folder)` builds the model; False for a user's own module.
      parameters: number of elements, tied weights once.
      nbytes: size of all files.
    """

    folder: Path
    loadable: bool
    parameters: int
    nbytes: int


def export_run(
    folder: Path,
    store: CheckpointStore,
    manifest: Manifest,
    model: ModelConfig,
    vocabulary: Vocabulary,
    seed: int,
    dtype: str = "float32",
) -> ExportResult:
    """Writes the anchor of a commit as a Hugging Face folder; a folder that is there is replaced.

    Args:
      folder: where; its parent must be writable.
      store: where the commit lies.
      manifest: which commit.
      model: the run's model section.
      vocabulary: the run's tokenizer and sequence length.
      seed: the run's seed, which founded whatever the anchor does not hold (frozen parameters, buffers).
      dtype: key of `DTYPES`, of the floating-point weights.

    Raises:
      CheckpointError: RD-540, the commit's tensors are not those of the model; RD-541, the folder cannot be written;
        what `store.load` raises.
      InnerError: what `inner.model` raises where the model cannot be built.
    """
    folder = Path(folder)
    build = partial(build_model, model, vocabulary.vocab_size, vocabulary.eos_id, vocabulary.sequence_length, seed)
    shell = build() if model.builder else _structure(model, vocabulary)
    state = _state(shell, store.load(manifest), DTYPES[dtype])
    _complete(state, shell, build, DTYPES[dtype])
    parameters = sum(tensor.numel() for tensor in state.values())
    try:
        with _replacing(folder) as staging:
            loadable = _write_model(staging, shell.to(DTYPES[dtype]), state, vocabulary)
            _copy_tokenizer(vocabulary.tokenizer, staging)
            (staging / "README.md").write_text(_page(manifest, model, dtype, loadable), encoding="utf-8")
            for path in staging.iterdir():
                # safetensors files are the owner's alone otherwise.
                shutil.copymode(staging / "README.md", path)
            nbytes = sum(path.stat().st_size for path in staging.iterdir())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            541,
            f"the export {folder} cannot be written: {error}",
            "free space or mend the rights of its parent folder",
        ) from error
    return ExportResult(folder, loadable, parameters, nbytes)


def _structure(model: ModelConfig, vocabulary: Vocabulary) -> PreTrainedModel:
    """The model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if model.pretrained:
        config = AutoConfig.from_pretrained(model.pretrained)
        for key, value in model.config.items():
            setattr(config, key, value)
    else:
        config = model_configuration(model, vocabulary.vocab_size, vocabulary.eos_id, vocabulary.sequence_length)
    with torch.device("meta"):
        shell: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=model.attention
        )
    if not model.pretrained:
        setattr(shell.config, TRAINED_LENGTH, vocabulary.sequence_length)
    else:
        # A folder without generation_config.json keeps the one derived from the configuration.
        with suppress(OSError):
            shell.generation_config = GenerationConfig.from_pretrained(model.pretrained)
    return shell


def _state(shell: nn.Module, anchor: Iterable[tuple[str, np.ndarray]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The anchor's tensors in `dtype`, each checked against the model's parameter of that name."""
    shapes = {name: tuple(p.shape) for name, p in shell.named_parameters()}
    state: dict[str, torch.Tensor] = {}
    for name, array in anchor:
        if shapes.get(name) != array.shape:
            raise _mismatch(f"tensor {name!r} has shape {array.shape}, the model's has {shapes.get(name, 'none')}")
        # The array's own memory: a commit on a disk is mapped, not loaded.
        state[name] = from_dlpack(array).to(dtype)
    return state


def _complete(
    state: dict[str, torch.Tensor], shell: nn.Module, build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """Adds what never travels: frozen parameters and persistent buffers, which are still those of version 0."""
    names = {name for name, _ in shell.named_parameters()}
    tied = {name for name, _ in shell.named_parameters(remove_duplicate=False)} - names
    missing = shell.state_dict().keys() - tied - state.keys()
    if not missing:
        return
    whole = build()
    trained = sorted(name for name, p in whole.named_parameters() if p.requires_grad and name in missing)
    if trained:
        raise _mismatch(f"it lacks {len(trained)} tensors of the model, {trained[0]!r} among them")
    for name, tensor in whole.state_dict().items():
        if name in missing:
            state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor


def _mismatch(detail: str) -> CheckpointError:
    return CheckpointError(
        540,
        f"the commit does not fit the model of the configuration: {detail}",
        "export with the model.* settings of the run's own config.yaml",
    )


def _write_model(staging: Path, shell: nn.Module, state: dict[str, torch.Tensor], vocabulary: Vocabulary) -> bool:
    """Writes weights and configuration; whether transformers' own classes load them."""
    from huggingface_hub import save_torch_state_dict
    from transformers import PreTrainedModel

    if not isinstance(shell, PreTrainedModel):
        save_torch_state_dict(state, staging, max_shard_size=SHARD_SIZE)
        return False
    if shell.can_generate():
        _set_generation(shell, vocabulary)
    with no_progress_bar():
        shell.save_pretrained(staging, state_dict=state, max_shard_size=SHARD_SIZE)
    return type(shell).__module__.startswith("transformers.")


def _set_generation(shell: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Gives `generate` the ids at which a text ends, so that it neither guesses nor warns."""
    generation = shell.generation_config
    if generation.eos_token_id is None:
        generation.eos_token_id = vocabulary.eos_id
    if generation.pad_token_id is None:
        generation.pad_token_id = vocabulary.eos_id


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Inside, transformers loads and saves without a bar of its own across the run's display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _copy_tokenizer(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        foreign = path.name in _NOT_TOKENIZER or path.name.endswith(_NOT_TOKENIZER_SUFFIXES)
        if path.is_file() and not foreign:
            shutil.copyfile(path, target / path.name)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place when all went well and vanishes otherwise."""
    staging = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        staging.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


_LOAD_HF = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
"""
_LOAD_OWN = """
from huggingface_hub import load_torch_model
from transformers import AutoTokenizer

load_torch_model(model, folder)  # model: what {builder} returns
tokenizer = AutoTokenizer.from_pretrained(folder)
"""


def _page(manifest: Manifest, model: ModelConfig, dtype: str, loadable: bool) -> str:
    """The README of the folder: where the weights come from and how to load them."""
    load = _LOAD_HF if loadable else _LOAD_OWN.format(builder=model.builder)
    return (
        f"# {manifest.run}\n\n"
        f"The anchor of the run `{manifest.run}` after outer round {manifest.round}, as {dtype}; exported by "
        f"ray_diloco from the commit with digest `{manifest.digest}`.\n\n"
        f"```python{load}```\n"
    )
