"""Packing: one stream of documents, each with an end, cut into whole blocks, whatever the batches."""

import io
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_diloco.data import packing
from ray_diloco.data.documents import Piece, Source, TextDigest, first_documents, without_empty
from ray_diloco.data.packing import Packed, pack, token_dtype
from ray_diloco.data.progress import Reporter
from ray_diloco.data.tokenizers import ByteTokenizer
from ray_diloco.errors import DataError

END = 256


def packed(pieces: list[Piece], sequence_length: int) -> tuple[Packed, np.ndarray]:
    file = io.BytesIO()
    source = Source("pieces", pieces=lambda: iter(pieces), identity=lambda _: "")
    result = pack(source, ByteTokenizer(), sequence_length, file, Reporter())
    assert result.digest == xxhash.xxh3_128_hexdigest(file.getvalue())
    return result, np.frombuffer(file.getvalue(), dtype="<u2").reshape(-1, sequence_length)


def cut(document: str, places: list[int]) -> list[Piece]:
    borders = [0, *sorted(place % (len(document) + 1) for place in places), len(document)]
    parts = [document[start:stop] for start, stop in pairwise(borders)]
    return [Piece(part, number == len(parts) - 1) for number, part in enumerate(parts)]


def test_three_documents_by_hand() -> None:
    result, blocks = packed([Piece("abc", True), Piece("é", True), Piece("xyz!", True)], 5)
    assert blocks.tolist() == [[97, 98, 99, END, 0xC3], [0xA9, END, 120, 121, 122]]
    # "!" and the last end do not fill a block.
    assert (result.blocks, result.all_tokens, result.documents, result.bytes_of_text) == (2, 12, 3, 9)
    assert {i: n for i, n in enumerate(result.counts) if n} == {
        **dict.fromkeys([97, 98, 99, 120, 121, 122, 0xC3, 0xA9], 1),
        END: 2,
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.tuples(st.text("ab\né", min_size=1, max_size=30), st.lists(st.integers(0, 99), max_size=3))),
    sequence_length=st.integers(2, 20),
    batch_bytes=st.integers(1, 40),
    batch_pieces=st.integers(1, 5),
)
def test_neither_batches_nor_pieces_leave_a_trace(
    monkeypatch: pytest.MonkeyPatch,
    documents: list[tuple[str, list[int]]],
    sequence_length: int,
    batch_bytes: int,
    batch_pieces: int,
) -> None:
    monkeypatch.setattr(packing, "_BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(packing, "_BATCH_PIECES", batch_pieces)
    stream = [id for text, _ in documents for id in [*text.encode(), END]]
    result, blocks = packed([piece for text, places in documents for piece in cut(text, places)], sequence_length)
    assert blocks.ravel().tolist() == stream[: len(stream) // sequence_length * sequence_length]
    assert (result.all_tokens, result.documents) == (len(stream), len(documents))
    assert result.bytes_of_text == sum(len(text.encode()) for text, _ in documents)
    whole = TextDigest()
    for text, _ in documents:
        whole.add(text.encode(), True)
    assert result.text_identity == whole.identity()


def test_ids_take_two_bytes_where_every_id_fits() -> None:
    assert token_dtype(65_536) == np.dtype("<u2")
    assert token_dtype(65_537) == np.dtype("<u4")


class Large(ByteTokenizer):
    """Ids beyond two bytes, one of them outside the vocabulary."""

    vocab_size = 70_002

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([70_000 + len(text)], dtype=np.uint32) for text in texts]


def test_a_large_vocabulary_is_kept_whole_and_its_border_is_checked() -> None:
    file = io.BytesIO()
    pieces = [Piece("", True), Piece("a", True)]
    source = Source("pieces", pieces=lambda: iter(pieces), identity=lambda _: "")
    pack(source, Large(), 2, file, Reporter())
    assert np.frombuffer(file.getvalue(), dtype="<u4").tolist() == [70_000, END, 70_001, END]
    pieces.append(Piece("ab", True))
    with pytest.raises(DataError) as caught:
        pack(source, Large(), 2, file, Reporter())
    assert (caught.value.number, "gave id 70002, its vocabulary has 70002" in caught.value.what) == (324, True)


def test_empty_documents_are_left_out_but_an_empty_last_piece_still_ends_its_document() -> None:
    pieces = [Piece("", True), Piece("a", False), Piece("", True), Piece("", True), Piece("b", True)]
    assert list(without_empty(pieces)) == [Piece("a", False), Piece("", True), Piece("b", True)]
    assert list(first_documents(without_empty(pieces), 1)) == [Piece("a", False), Piece("", True)]
