"""Documents into one stream of token ids: an end-of-text token after each, cut into whole blocks, counted on the way.

One pass, a few megabytes of memory whatever the corpus.  What does not fill a block is carried into the next batch, so
where batches end leaves no trace in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from ray_diloco.data.documents import Piece, Source, TextDigest, encode
from ray_diloco.data.progress import Reporter
from ray_diloco.data.tokenizers import Tokenizer
from ray_diloco.errors import DataError

# A batch ends at so many bytes of text or so many pieces.
_BATCH_BYTES = 1 << 18
_BATCH_PIECES = 1024


@dataclass(frozen=True)
class Packed:
    """What `pack` has written and seen."""

    blocks: int
    # Ids in all, the last partial block included.
    all_tokens: int
    documents: int
    # In UTF-8.
    bytes_of_text: int
    # How often each id stands in the blocks: int64 [vocab_size].
    counts: np.ndarray
    # xxh3-128 of the file, hexadecimal.
    digest: str
    # Identity of a source of exactly these documents.
    text_identity: str


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian, two bytes where every id fits."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pack(source: Source, tokenizer: Tokenizer, sequence_length: int, file: BinaryIO, reporter: Reporter) -> Packed:
    """Writes the whole blocks of a source's documents to `file`, as `token_dtype` ids.

    Raises:
      DataError: 303–308 and 311 from reading, 311 and 322 from a user's tokenizer, 324 an id outside the vocabulary.
    """
    writer = _Writer(tokenizer, sequence_length, file)
    text, documents, bytes_of_text = TextDigest(), 0, 0
    reporter.begin(f"tokenising {source.title}", source.total_bytes)
    batch: list[Piece] = []
    batch_bytes = 0
    for piece in source.pieces():
        encoded = encode(piece, documents, source.title)
        text.add(encoded, piece.last)
        documents += piece.last
        batch.append(piece)
        batch_bytes += len(encoded)
        if batch_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            writer.add(batch)
            bytes_of_text += batch_bytes
            reporter.advance(batch_bytes)
            batch, batch_bytes = [], 0
    writer.add(batch)
    reporter.end()
    return Packed(
        blocks=writer.blocks,
        all_tokens=writer.blocks * sequence_length + writer.rest.size,
        documents=documents,
        bytes_of_text=bytes_of_text + batch_bytes,
        counts=writer.counts,
        digest=writer.digest.hexdigest(),
        text_identity=text.identity(),
    )


class _Writer:
    def __init__(self, tokenizer: Tokenizer, sequence_length: int, file: BinaryIO) -> None:
        self._tokenizer = tokenizer
        self._length = sequence_length
        self._file = file
        self._end = np.array([tokenizer.eos_id], dtype=np.uint32)
        self.rest = np.empty(0, dtype=token_dtype(tokenizer.vocab_size))
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.digest = xxhash.xxh3_128()
        self.blocks = 0

    def add(self, batch: list[Piece]) -> None:
        encoded = [self.rest, *self._ids(batch)]
        ids = np.concatenate(encoded, dtype=self.rest.dtype, casting="unsafe")
        blocks = ids.size // self._length
        whole, self.rest = ids[: blocks * self._length], ids[blocks * self._length :]
        self._file.write(whole.data)
        self.digest.update(whole.data)
        self.counts += np.bincount(whole, minlength=self.counts.size)
        self.blocks += blocks

    def _ids(self, batch: list[Piece]) -> Iterator[np.ndarray]:
        if not batch:
            return
        for piece, ids in zip(batch, self._tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
            if ids.size and int(ids.max()) >= self.counts.size:
                raise DataError(
                    324,
                    f"the tokenizer gave id {int(ids.max())}, its vocabulary has {self.counts.size}",
                    "its __len__ must be above every id that encode returns",
                )
            yield ids
            if piece.last:
                yield self._end
