"""A user's own model by import path, and the contract that it must meet.

    def build(config: ModelConfig, vocab_size: int) -> torch.nn.Module

The module's `forward(input_ids, labels)` takes two equal int64 tensors [batch, sequence] and returns an object or
dict with `loss`: a scalar, the mean over all predictions of the next token in nats, shifted inside as Hugging Face
models do.  `logits` [batch, sequence, vocabulary] beside it make evaluation faster.  Parameters are initialised from
torch's random state only, so that every process builds the same model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ray_diloco.config.functions import import_function
from ray_diloco.config.schema import ModelConfig
from ray_diloco.errors import InnerError

_CONTRACT = "see docs/python.md for the contract: build(config, vocab_size) -> torch.nn.Module"
_PROBE_TOKENS = 8


def build_from_path(model: ModelConfig, vocab_size: int, sequence_length: int) -> nn.Module:
    """Imports and calls `model.builder`, and tries what it returns on one short sequence.

    Raises:
      ConfigError: RD-113 or RD-122, it cannot be imported.
      InnerError: RD-708 it failed or returned something else, RD-709 `forward` lacks an argument, RD-710 its result has
        no scalar loss.
    """
    path = str(model.builder)
    built = _call(path, import_function(path, "model.builder"), model, vocab_size)
    _check_forward(path, built)
    _try_forward(path, built, min(sequence_length, _PROBE_TOKENS), vocab_size)
    return built


def output_field(output: Any, name: str) -> Any:
    """Field `name` of what a model's forward returned, an object or a mapping; None if it has none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _call(path: str, function: Callable[..., Any], model: ModelConfig, vocab_size: int) -> nn.Module:
    try:
        built = function(model, vocab_size)
    except Exception as error:
        raise InnerError(708, f"model.builder={path!r} failed: {type(error).__name__}: {error}", _CONTRACT) from error
    if not isinstance(built, nn.Module):
        raise InnerError(
            708, f"model.builder={path!r} returned a {type(built).__name__}, not a torch.nn.Module", _CONTRACT
        )
    return built


def _check_forward(path: str, model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in ("input_ids", "labels"):
        if name not in parameters:
            raise InnerError(
                709,
                f"forward of the {type(model).__name__} from {path} has no argument {name!r}; it has "
                f"{', '.join(parameters) or 'none'}",
                _CONTRACT,
            )


def _try_forward(path: str, model: nn.Module, tokens: int, vocab_size: int) -> None:
    ids = torch.arange(tokens).remainder(vocab_size).unsqueeze(0)
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(input_ids=ids, labels=ids)
    except Exception as error:
        raise InnerError(
            710,
            f"the {type(model).__name__} from {path} failed on a sequence of {tokens} tokens: "
            f"{type(error).__name__}: {error}",
            _CONTRACT,
        ) from error
    finally:
        model.train(was_training)
    loss = output_field(output, "loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise InnerError(
            710,
            f"forward of the {type(model).__name__} from {path} returned no scalar loss but {_describe(loss)}",
            _CONTRACT,
        )


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
