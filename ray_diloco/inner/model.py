"""The model of a rank, in fp32: from a Hugging Face configuration, a folder or hub name, or a user's function.

A seeded initialisation is the same in every process and leaves the process's own random state alone.  Parameters
are fp32 here whatever precision the engine trains in; buffers (rotary frequencies) stay fp32 there too.
transformers is imported inside the functions: its import takes 2 to 3 s, a Llama's as much as any other model's.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ray_diloco.config.schema import ModelConfig
from ray_diloco.errors import InnerError
from ray_diloco.inner.builder import build_from_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Accepted by every configuration with `rope_parameters`, though its signature does not say so.
_ROPE_ARGUMENTS = ("rope_theta", "rope_scaling")


def build_model(
    model: ModelConfig, vocab_size: int, eos_id: int | None, sequence_length: int, seed: int
) -> PreTrainedModel | nn.Module:
    """Builds the model on the CPU in fp32, in training mode.

    Args:
      model: what to build; `builder` wins over `pretrained`, `pretrained` over `architecture`.
      vocab_size: number of token ids of the tokenizer.
      eos_id: id of the end-of-text token.
      sequence_length: tokens per training sequence.
      seed: of the initialisation.

    Raises:
      InnerError: RD-701 to RD-714 (`docs/errors.md`).
      ConfigError: RD-113 or RD-122, a builder that cannot be imported.
    """
    with _seeded(seed):
        if model.builder:
            built: nn.Module = build_from_path(model, vocab_size, sequence_length)
        elif model.pretrained:
            built = _from_pretrained(model, vocab_size)
        else:
            built = _from_config(model, model_configuration(model, vocab_size, eos_id, sequence_length))
    _check_positions(built, sequence_length)
    _normalise(built)
    if getattr(built, "loss_type", "") is None:
        # Its own choice too, but with a warning, for models that are not named …ForCausalLM.
        built.loss_type = "ForCausalLM"  # type: ignore[assignment]
    if model.activation_checkpointing:
        _checkpoint_activations(built)
    return built.train()


def empty_model(model: ModelConfig, vocab_size: int, sequence_length: int) -> nn.Module:
    """The same model without memory for its parameters, on torch's meta device; a builder's is built for real.

    Raises:
      InnerError, ConfigError: as `build_model`.
    """
    if model.builder:
        return build_model(model, vocab_size, None, sequence_length, 0)
    config = (
        _pretrained_configuration(model)
        if model.pretrained
        else model_configuration(model, vocab_size, None, sequence_length)
    )
    with torch.device("meta"):
        return _from_config(model, config)


def model_configuration(
    model: ModelConfig, vocab_size: int, eos_id: int | None, sequence_length: int
) -> PretrainedConfig:
    """The Hugging Face configuration of a model that is built from one.

    Raises:
      InnerError: RD-701 unknown architecture, RD-702 unknown argument, RD-703 refused values, RD-704 a vocabulary
        smaller than the tokenizer's, RD-714 fewer positions than a sequence has tokens.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model.architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InnerError(
            701,
            f"model.architecture={model.architecture!r} is not a causal language model that transformers knows",
            f"use {_nearest(model.architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}",
        )
    config_class = CONFIG_MAPPING[model.architecture]
    known = _arguments_of(config_class)
    arguments = dict(model.config)
    _check_arguments(model.architecture, arguments, known)
    if int(arguments.setdefault("vocab_size", vocab_size)) < vocab_size:
        raise _vocabulary_too_small("model.config.vocab_size", arguments["vocab_size"], vocab_size)
    if "max_position_embeddings" in known and not arguments.keys() & {"max_position_embeddings", "n_positions"}:
        arguments["max_position_embeddings"] = sequence_length
    if eos_id is not None:
        arguments.setdefault("bos_token_id", eos_id)
        arguments.setdefault("eos_token_id", eos_id)
    try:
        config = config_class(**arguments)
    except Exception as error:
        raise InnerError(
            703,
            f"transformers refuses this configuration of {model.architecture}: {_one_line(error)}",
            "mend the values under model.config",
        ) from error
    return config


def parameter_count(model: nn.Module) -> int:
    """Trainable elements, tied weights once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _from_config(model: ModelConfig, config: PretrainedConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        built: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=model.attention
        )
    except Exception as error:
        raise _unbuildable(model.architecture, model.attention, error) from error
    return built


def _pretrained_configuration(model: ModelConfig) -> PretrainedConfig:
    from transformers import AutoConfig

    name = str(model.pretrained)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InnerError(
            705,
            f"model.pretrained={name!r} cannot be loaded: {_one_line(error)}",
            "give a folder with config.json and safetensors files, or the hub name of a causal language model",
        ) from error
    _check_arguments(config.model_type, model.config, _arguments_of(type(config)))
    for key, value in model.config.items():
        setattr(config, key, value)
    return config


def _from_pretrained(model: ModelConfig, vocab_size: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    name, config = str(model.pretrained), _pretrained_configuration(model)
    try:
        built: nn.Module = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, attn_implementation=model.attention
        )
    except Exception as error:
        raise _unbuildable(name, model.attention, error) from error
    rows = built.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if rows < vocab_size:
        raise _vocabulary_too_small(f"the vocabulary of {name}", rows, vocab_size)
    return built


def _normalise(model: nn.Module) -> None:
    """Makes every trainable parameter a contiguous fp32 tensor on the CPU."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InnerError(
            711,
            f"{type(model).__name__} has no parameter with requires_grad=True",
            "return a model with at least one trainable parameter",
        )
    for p in trainable:
        p.data = p.data.to(device="cpu", dtype=torch.float32).contiguous()


def _check_positions(model: nn.Module, sequence_length: int) -> None:
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < sequence_length:
        raise InnerError(
            714,
            f"data.sequence_length={sequence_length}, but the model has only {positions} positions",
            "lower data.sequence_length or raise model.config.max_position_embeddings",
        )


def _checkpoint_activations(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise InnerError(
            712,
            f"model.activation_checkpointing=true, but {type(model).__name__} does not support it",
            "set model.activation_checkpointing=false, or call torch.utils.checkpoint inside the model",
        )
    model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random state of this seed on the CPU inside, the process's own outside."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _arguments_of(config_class: type) -> set[str]:
    names = set(inspect.signature(config_class).parameters)
    names |= set(getattr(config_class, "attribute_map", {}))
    if "rope_parameters" in names:
        names |= set(_ROPE_ARGUMENTS)
    return names


def _check_arguments(architecture: str, arguments: dict[str, Any], known: set[str]) -> None:
    for name in arguments:
        if name not in known:
            raise InnerError(
                702,
                f"model.config.{name} is not an argument of a {architecture} configuration",
                f"use {_nearest(name, known)}",
            )


def _vocabulary_too_small(what: str, size: int, needed: int) -> InnerError:
    return InnerError(
        704,
        f"{what} is {size}, but the tokenizer has {needed} ids",
        "use the tokenizer that belongs to the model, or a model with at least as many rows in its embedding",
    )


def _unbuildable(name: str, attention: str, error: Exception) -> InnerError:
    if "attn_implementation" in str(error) or "attention" in str(error).lower():
        return InnerError(
            713,
            f"model.attention={attention!r} cannot be used with {name}: {_one_line(error)}",
            "use model.attention=sdpa or model.attention=eager",
        )
    return InnerError(
        705,
        f"transformers cannot build {name}: {_one_line(error)}",
        "mend model.config, or give the name of a causal language model",
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    """The nearest valid names, for the end of a sentence."""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return " or ".join(repr(n) for n in near) if near else f"one of {', '.join(sorted(known)[:40])}"


def _one_line(error: Exception, limit: int = 300) -> str:
    return " ".join(str(error).split())[:limit]
