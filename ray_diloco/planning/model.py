"""The canonical form of a run's model without memory for its parameters, so that any size is counted in a moment."""

from __future__ import annotations

from ray_diloco.config.schema import Config
from ray_diloco.data.cache import cache_folder
from ray_diloco.data.tokenizers import ByteTokenizer
from ray_diloco.inner.model import empty_model
from ray_diloco.inner.slices import layout_of_model
from ray_diloco.outer.layout import Layout


def layout_of_config(config: Config) -> Layout:
    """Names and shapes of the trainable tensors of a run's model.

    Raises:
      InnerError: 7xx, the model cannot be built.
      DataError: 320 to 322, the tokenizer cannot be loaded.
    """
    return layout_of_model(empty_model(config.model, vocabulary(config), config.data.sequence_length))


def vocabulary(config: Config) -> int:
    """Token ids of the tokenizer; of a BPE that is yet to be trained, the size that is asked for."""
    tokenizer = config.tokenizer
    if tokenizer.builder is None and tokenizer.name == "bytes":
        return ByteTokenizer.vocab_size
    if tokenizer.builder is None and tokenizer.name == "bpe":
        return tokenizer.vocab_size
    from ray_diloco.data.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer(tokenizer, cache_folder(config.data.cache)).vocab_size
