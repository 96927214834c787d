"""What every source of text is made of: pieces of documents, and an identity of the content behind them.

A document is a `str`; a large file travels as several pieces of one document, so that no corpus and no file is ever
held in memory.  The identity keys the cache of prepared blocks: equal content has an equal identity on every machine,
changed content never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import xxhash

from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

# An identity that starts so is the digest of the documents themselves, see `TextDigest`.
TEXT_IDENTITY = "text-"


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    # The document ends with this piece.
    last: bool


@dataclass(frozen=True)
class Source:
    """A source of documents that can be read again and again."""

    # What it is, for messages: "3 jsonl files (corpus/*.jsonl)".
    title: str
    # Starts a fresh pass over the documents; raises DataError for what cannot be read.
    pieces: Callable[[], Iterator[Piece]]
    # Identity of the content; may have to read all of it, and reports the bytes that it has read.
    identity: Callable[[Reporter], str]
    # Expected UTF-8 bytes of text, for progress; None where unknown.
    total_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        """A fresh pass in whole documents; raises DataError for what cannot be read."""
        parts: list[str] = []
        for piece in self.pieces():
            parts.append(piece.text)
            if piece.last:
                yield "".join(parts)
                parts.clear()


def whole(texts: Iterable[str]) -> Iterator[Piece]:
    """Pieces of documents that come whole."""
    return (Piece(text, True) for text in texts)


def without_empty(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Leaves documents without any text out: they would add nothing but an end-of-text token."""
    inside = False
    for piece in pieces:
        if piece.text or inside:
            yield piece
            inside = not piece.last


def first_documents(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    """The pieces of the first `count` documents, without reading further."""
    done = 0
    for piece in pieces:
        yield piece
        done += piece.last
        if done == count:
            return


def non_empty(pieces: Iterator[Piece], title: str) -> Iterator[Piece]:
    """The same pieces; raises DataError 308 if there is none."""
    first = next(pieces, None)
    if first is None:
        raise DataError(308, f"{title}: there is no text in it", "choose a source that holds at least one document")
    return chain((first,), pieces)


def encode(piece: Piece, number: int, title: str) -> bytes:
    """UTF-8 of a piece of document `number` (from 0); raises DataError 304 for text that has none."""
    try:
        return piece.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            304,
            f"{title}: document {number} holds U+{ord(piece.text[error.start]):04X} at character {error.start}, "
            "half of a surrogate pair, which is no text",
            "repair or remove that document",
        ) from error


class TextDigest:
    """Digest of documents in order (xxh3, 128 bits); where a document is cut into pieces does not matter."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._length = 0

    def add(self, encoded: bytes, last: bool) -> None:
        """Takes the next piece, in UTF-8."""
        self._hash.update(encoded)
        self._length += len(encoded)
        if last:
            # Text and lengths alternate, so that moving a border between documents changes the digest.
            self._hash.update(b"\xff" + self._length.to_bytes(8, "little"))
            self._length = 0

    def identity(self) -> str:
        """The identity of a source with exactly these documents."""
        return TEXT_IDENTITY + self._hash.hexdigest()
