"""Tokenizers: bytes, a BPE trained on the corpus, any Hugging Face tokenizer, or a user's own function.

All save as a Hugging Face folder that `AutoTokenizer.from_pretrained` loads without code of ours.  Documents are
encoded without special tokens, and text that happens to spell one stays text: only the end-of-text token between
documents is put in, by `blocks`.  transformers is imported for `huggingface` only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ray_diloco.config.schema import TokenizerConfig
from ray_diloco.data.cache import key_of, publish
from ray_diloco.data.documents import Source
from ray_diloco.data.huggingface import HuggingFaceTokenizer, encode_batch
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
# A BPE is trained on the first so many bytes of text; more changes its merges little and takes hours.
BPE_TRAINING_BYTES = 1 << 30
# Training takes quadratic time in the length of a word, and a blob of base64 is one word: cut texts to this.
_BPE_TRAINING_CHARACTERS = 1 << 14
_BYTES_AND_SPECIALS = 256 + 2


class Tokenizer(Protocol):
    """What turning documents into blocks needs of a tokenizer."""

    @property
    def identity(self) -> str:
        """Changes whenever the ids of any text may change; part of the cache key."""

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, unsigned integers of shape [tokens], without special tokens."""

    def save(self, folder: Path) -> None:
        """Writes a folder for `AutoTokenizer.from_pretrained`."""


def load_tokenizer(
    config: TokenizerConfig, source: Source, source_identity: str, cache: Path, reporter: Reporter
) -> Tokenizer:
    """The tokenizer that `tokenizer` describes; `bpe` is trained on the source, once per content.

    Raises:
      DataError: 320 cannot be loaded, 321 no end-of-text token, 322 a builder's object that cannot be used, 323 a
        vocabulary size that BPE cannot have; a Hugging Face tokenizer raises 320 to 322 when it is first used.
      ConfigError: 113 or 122, a builder that cannot be imported.
    """
    if config.builder:
        return HuggingFaceTokenizer(config, cache)
    if config.name == "bytes":
        return ByteTokenizer()
    if config.name == "bpe":
        return trained_bpe(config.vocab_size, source, source_identity, cache, reporter)
    return HuggingFaceTokenizer(config, cache)


class ByteTokenizer:
    """UTF-8 bytes: id b is byte b, 256 ends a text, 257 pads."""

    identity = "bytes-1"
    vocab_size = _BYTES_AND_SPECIALS
    eos_id = 256

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """The UTF-8 bytes themselves: what the saved tokenizer would give, without its cost."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def save(self, folder: Path) -> None:
        """Writes a byte-level BPE of 256 symbols without merges, which is the same thing."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        backend = Backend(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([END_OF_TEXT, PAD])
        _save_backend(backend, folder)


def byte_symbols() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2's table), by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class BackendTokenizer:
    """A folder that this module wrote, by the `tokenizers` library alone."""

    def __init__(self, folder: Path, identity: str) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self.identity = identity
        self.vocab_size = self._backend.get_vocab_size()
        self.eos_id = self._backend.get_vocab()[END_OF_TEXT]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids as uint32."""
        return encode_batch(self._backend, texts)

    def save(self, folder: Path) -> None:
        """Writes the folder again."""
        _save_backend(self._backend, folder)


def trained_bpe(
    vocab_size: int, source: Source, source_identity: str, cache: Path, reporter: Reporter
) -> BackendTokenizer:
    """A byte-level BPE of at most `vocab_size` tokens (fewer if the text has no more pairs), cached by content.

    Raises:
      DataError: 323, no such size is possible.
    """
    if not _BYTES_AND_SPECIALS < vocab_size <= 1 << 24:
        raise DataError(
            323,
            f"tokenizer.vocab_size={vocab_size}: a BPE holds 256 bytes, 2 special tokens and what it learns",
            f"set it above {_BYTES_AND_SPECIALS}, usually 4096 to 65536",
        )
    key = key_of("bpe-1", source_identity, vocab_size)
    folder = cache / "tokenizers" / key
    if not (folder / "tokenizer.json").exists():
        with publish(folder) as draft:
            _save_backend(_train_bpe(vocab_size, source, reporter), draft)
    return BackendTokenizer(folder, f"bpe-{key}")


def _train_bpe(vocab_size: int, source: Source, reporter: Reporter) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total = None if source.total_bytes is None else min(source.total_bytes, BPE_TRAINING_BYTES)
    reporter.begin(f"training a BPE of {vocab_size} tokens", total)
    backend.train_from_iterator(_training_texts(source, reporter), trainer)
    reporter.end()
    return backend


def _training_texts(source: Source, reporter: Reporter) -> Iterator[str]:
    left = BPE_TRAINING_BYTES
    for piece in source.pieces():
        for start in range(0, len(piece.text), _BPE_TRAINING_CHARACTERS):
            yield piece.text[start : start + _BPE_TRAINING_CHARACTERS]
        size = len(piece.text.encode(errors="replace"))
        reporter.advance(size)
        left -= size
        if left <= 0:
            return


def _save_backend(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """By hand, because `save_pretrained` needs transformers and names a class that its version 4 does not have."""
    backend.encode_special_tokens = False
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
