"""A byte-level tokenizer without merges, shared by the tests of exports."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ray_diloco.export import Vocabulary


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    """256 bytes and, as id 256, an end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", model_max_length=64)
    fast.save_pretrained(tmp_path / "tokenizer")
    return Vocabulary(tmp_path / "tokenizer", len(fast), eos_id=256, sequence_length=64)
