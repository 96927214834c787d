"""A corpus as numbered blocks of token ids in a memory-mapped file, prepared once per content.

Documents are tokenised in order, an end-of-text token after each, and cut into blocks of `sequence_length` ids;
nothing is dropped but the last partial block.  A block's number says where it is, so any position is read at once.
The cache is keyed by the content of source and tokenizer: changed data never meets old blocks, and the same data has
the same blocks and the same digest on every machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data.cache import cache_folder, key_of, publish
from ray_diloco.data.documents import TEXT_IDENTITY, Source
from ray_diloco.data.heldout import Split
from ray_diloco.data.packing import pack, token_dtype
from ray_diloco.data.progress import Progress, Reporter
from ray_diloco.data.sources import open_source
from ray_diloco.data.tokenizers import Tokenizer, load_tokenizer
from ray_diloco.errors import DataError

_FORMAT = 1
_TOKENS = "tokens.bin"
_COUNTS = "counts.npy"
_ABOUT = "corpus.json"
_TOKENIZER = "tokenizer"
# Files up to this size are read and compared with their digest at every start, larger ones only measured.
_VERIFY_BYTES = 1 << 30


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: where it is and what is in it; small enough to travel to every rank."""

    folder: Path
    # `data.name` of the configuration that it was prepared for.
    name: str
    # Token ids per block.
    sequence_length: int
    train_blocks: int
    heldout_blocks: int
    vocab_size: int
    eos_id: int
    # Token ids in all blocks, and UTF-8 bytes of all documents.
    tokens: int
    bytes_of_text: int
    documents: int
    # Stands for the content and number of every block: equal digests, equal training data.
    digest: str
    # Entropy of the token frequencies of the training blocks in nats per token: the loss of a model without context.
    unigram_entropy: float
    # UTF-8 bytes of text per token, end-of-text tokens counted as tokens.
    bytes_per_token: float

    @property
    def tokenizer_folder(self) -> Path:
        """Hugging Face folder of the tokenizer."""
        return self.folder / _TOKENIZER

    def open(self) -> Blocks:
        """The blocks, mapped into memory; raises DataError 334 if they are not on this machine."""
        return Blocks(self)


class Blocks:
    """Read access to the blocks of a corpus, in O(1) anywhere; nothing but the asked-for blocks is copied."""

    def __init__(self, corpus: Corpus) -> None:
        split = Split(corpus.train_blocks + corpus.heldout_blocks, corpus.heldout_blocks)
        self._split = split
        self._rows = _map_tokens(corpus.folder / _TOKENS, split.blocks, corpus.sequence_length, corpus.vocab_size)

    def train(self, indices: np.ndarray) -> np.ndarray:
        """Training blocks as int64 [n, sequence_length].  Raises IndexError outside 0..train_blocks-1."""
        return self._read(self._split.place_of_train(indices))

    def heldout(self, indices: np.ndarray) -> np.ndarray:
        """Held-out blocks as int64 [n, sequence_length].  Raises IndexError outside 0..heldout_blocks-1."""
        return self._read(self._split.place_of_heldout(indices))

    def _read(self, places: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._rows[places].astype(np.int64)
        return rows


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    progress: Progress | None = None,
    trained_on: DataConfig | None = None,
) -> Corpus:
    """The blocks of a source, from the cache or tokenised now.

    Args:
      data: the source, the length of blocks, and how many are held out.
      tokenizer: what turns its documents into ids.
      progress: called about once a second by whatever takes longer than two.
      trained_on: the source that `tokenizer=bpe` is trained on, where islands with different data share one
        tokenizer; default: `data`.

    Raises:
      DataError: 3xx; docs/errors.md has the list.
    """
    _check(data)
    reporter = Reporter(progress)
    cache = cache_folder(data.cache)
    source = open_source(data)
    identity = source.identity(reporter)
    text, text_identity = source, identity
    if tokenizer.name == "bpe" and trained_on is not None and trained_on != data:
        text = open_source(trained_on)
        text_identity = text.identity(reporter)
    encoder = load_tokenizer(tokenizer, text, text_identity, cache, reporter)
    folder = cache / "blocks" / key_of(_FORMAT, identity, encoder.identity, data.sequence_length)
    about = _load_about(folder)
    if about is None:
        _prepare_now(folder, data.sequence_length, source, identity, encoder, reporter)
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return _corpus(folder, about, data, source.title)


def _check(data: DataConfig) -> None:
    for key, least in (("sequence_length", 2), ("heldout_blocks", 0), ("max_documents", 0)):
        value = getattr(data, key)
        if value < least:
            raise DataError(332, f"data.{key}={value} is too small", f"set it to {least} or more")


def _load_about(folder: Path) -> dict[str, Any] | None:
    """What a prepared folder says about itself; None where it is missing or damaged."""
    try:
        about: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        tokens = folder / _TOKENS
        intact = tokens.stat().st_size == about["bytes"] and (folder / _COUNTS).exists()
        if intact and about["bytes"] <= _VERIFY_BYTES:
            intact = _digest_of(tokens) == about["digest"]
    except (OSError, ValueError, KeyError):
        return None
    return about if intact else None


def _digest_of(tokens: Path) -> str:
    with tokens.open("rb") as file:
        digest = xxhash.xxh3_128()
        while chunk := file.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _prepare_now(
    folder: Path, sequence_length: int, source: Source, identity: str, encoder: Tokenizer, reporter: Reporter
) -> None:
    with publish(folder, replace=folder.exists()) as draft:
        (draft / _TOKENIZER).mkdir()
        encoder.save(draft / _TOKENIZER)
        with (draft / _TOKENS).open("wb") as file:
            packed = pack(source, encoder, sequence_length, file, reporter)
        if packed.text_identity != identity if identity.startswith(TEXT_IDENTITY) else _changed(source, identity):
            raise DataError(
                312,
                f"{source.title}: its documents changed while they were tokenised",
                "wait until nobody writes to it, and see that every pass gives the same documents; then run again",
            )
        if packed.blocks == 0:
            raise DataError(
                330,
                f"{source.title}: {packed.all_tokens} tokens are less than one block of {sequence_length}",
                "give more text, or lower data.sequence_length",
            )
        np.save(draft / _COUNTS, packed.counts)
        about = {
            "format": _FORMAT,
            "source": source.title,
            "tokenizer": encoder.identity,
            "sequence_length": sequence_length,
            "blocks": packed.blocks,
            "bytes": (draft / _TOKENS).stat().st_size,
            "digest": packed.digest,
            "vocab_size": encoder.vocab_size,
            "eos_id": encoder.eos_id,
            "documents": packed.documents,
            "bytes_of_text": packed.bytes_of_text,
            "dropped_tokens": packed.all_tokens - packed.blocks * sequence_length,
        }
        (draft / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _changed(source: Source, identity: str) -> bool:
    return source.identity(Reporter()) != identity


def _corpus(folder: Path, about: dict[str, Any], data: DataConfig, title: str) -> Corpus:
    split = Split(about["blocks"], data.heldout_blocks)
    if split.train < 1:
        raise DataError(
            331,
            f"{title}: {split.blocks} blocks of {data.sequence_length} tokens, of which data.heldout_blocks="
            f"{split.heldout} would leave none to train on",
            f"give more text, or set data.heldout_blocks to at most {split.blocks - 1}",
        )
    rows = _map_tokens(folder / _TOKENS, split.blocks, data.sequence_length, about["vocab_size"])
    heldout = rows[split.place_of_heldout(np.arange(split.heldout))].ravel()
    counts = np.load(folder / _COUNTS) - np.bincount(heldout, minlength=about["vocab_size"])
    tokens = split.blocks * data.sequence_length
    return Corpus(
        folder=folder,
        name=data.name,
        sequence_length=data.sequence_length,
        train_blocks=split.train,
        heldout_blocks=split.heldout,
        vocab_size=about["vocab_size"],
        eos_id=about["eos_id"],
        tokens=tokens,
        bytes_of_text=about["bytes_of_text"],
        documents=about["documents"],
        digest=key_of(about["digest"], data.sequence_length, split.heldout, about["vocab_size"]),
        unigram_entropy=_entropy(counts),
        bytes_per_token=about["bytes_of_text"] / (tokens + about["dropped_tokens"]),
    )


def _entropy(counts: np.ndarray) -> float:
    """−Σ p ln p of frequencies, in nats."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _map_tokens(path: Path, blocks: int, sequence_length: int, vocab_size: int) -> np.ndarray:
    dtype = token_dtype(vocab_size)
    expected = blocks * sequence_length * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(
            334,
            f"the prepared blocks {path} are not on this machine: {error.strerror or error}",
            "put data.cache on storage that every node sees, or prepare the same data on this node",
        ) from error
    if size != expected:
        raise DataError(
            334,
            f"the prepared blocks {path} have {size} bytes, not {expected}",
            "remove that folder; the data is prepared again at the next start",
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(blocks, sequence_length))
