"""bytes and bpe: what they encode to, and that AutoTokenizer loads what they save."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ray_diloco.config.schema import TokenizerConfig
from ray_diloco.data.documents import Source, whole
from ray_diloco.data.progress import Reporter
from ray_diloco.data.tokenizers import END_OF_TEXT, ByteTokenizer, Tokenizer, byte_symbols, load_tokenizer
from ray_diloco.errors import DataError

TEXTS = [f"def function_{i}(x):\n    return x + {i}  # größer 😀\n" for i in range(200)]
MIXED = f"héllo\n\r\x00\t wörld , don't .  日本 😀 {END_OF_TEXT} x"


def texts_source(texts: list[str]) -> Source:
    return Source("texts", pieces=lambda: whole(texts), identity=lambda _: "texts")


def load(name: str, cache: Path, vocab_size: int = 400, texts: list[str] = TEXTS) -> Tokenizer:
    config = TokenizerConfig(name=name, vocab_size=vocab_size)
    return load_tokenizer(config, texts_source(texts), str(hash(tuple(texts))), cache, Reporter())


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    return caught.value


def saved(tokenizer: Tokenizer, folder: Path) -> PreTrainedTokenizerBase:
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def reloaded_bytes(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return saved(ByteTokenizer(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load("bpe", tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def reloaded_bpe(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return saved(bpe, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("text", [MIXED, "", " ", "\n", "a", "".join(map(chr, range(0x2000)))])
def test_the_id_of_a_byte_is_its_value(text: str) -> None:
    assert ByteTokenizer().encode_batch([text])[0].tolist() == list(text.encode())


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=50))
def test_the_saved_bytes_tokenizer_gives_the_same_ids_and_the_same_text_back(
    reloaded_bytes: PreTrainedTokenizerBase, text: str
) -> None:
    ids = reloaded_bytes(text, split_special_tokens=True)["input_ids"]
    assert ids == ByteTokenizer().encode_batch([text])[0].tolist()
    assert reloaded_bytes.decode(ids) == text
    assert reloaded_bytes.decode(reloaded_bytes(text)["input_ids"]) == text


def test_every_byte_has_a_symbol_of_its_own_in_the_saved_vocabulary(reloaded_bytes: PreTrainedTokenizerBase) -> None:
    assert reloaded_bytes.convert_tokens_to_ids(byte_symbols()) == list(range(256))
    assert len(set(byte_symbols())) == 256


def test_the_saved_bytes_tokenizer_knows_its_special_tokens(reloaded_bytes: PreTrainedTokenizerBase) -> None:
    assert len(reloaded_bytes) == ByteTokenizer().vocab_size == 258
    assert reloaded_bytes.eos_token_id == reloaded_bytes.bos_token_id == ByteTokenizer().eos_id == 256
    assert reloaded_bytes.pad_token_id == 257
    assert reloaded_bytes.decode([104, 105, 256], skip_special_tokens=True) == "hi"


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_saved_tokenizer_stays_the_same_beside_a_models_configuration(
    tmp_path: Path, name: str, architecture: str, bpe: Tokenizer
) -> None:
    tokenizer = bpe if name == "bpe" else ByteTokenizer()
    AutoConfig.for_model(architecture).save_pretrained(tmp_path)
    reloaded = saved(tokenizer, tmp_path)
    assert reloaded(MIXED, split_special_tokens=True)["input_ids"] == tokenizer.encode_batch([MIXED])[0].tolist()
    assert reloaded.decode(reloaded(MIXED)["input_ids"]) == MIXED
    assert reloaded.eos_token_id == tokenizer.eos_id


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_document_that_spells_the_end_of_text_token_does_not_end(tmp_path: Path, name: str) -> None:
    tokenizer = load(name, tmp_path)
    assert tokenizer.eos_id not in tokenizer.encode_batch([f"a {END_OF_TEXT} b"])[0]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_batch_encodes_like_its_texts_alone(tmp_path: Path, name: str) -> None:
    tokenizer = load(name, tmp_path)
    texts = ["", "one", "two words", "größer"]
    for batched, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert np.array_equal(batched, tokenizer.encode_batch([text])[0])


def test_bpe_learns_the_words_of_its_corpus(bpe: Tokenizer, reloaded_bpe: PreTrainedTokenizerBase) -> None:
    assert bpe.vocab_size == len(reloaded_bpe) == 400
    assert bpe.eos_id == reloaded_bpe.eos_token_id
    assert reloaded_bpe.tokenize("def function") == ["def", "Ġfunction"]
    assert all(len(bpe.encode_batch([text])[0]) < len(text) / 2 for text in TEXTS)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=50))
def test_bpe_gives_any_text_back(bpe: Tokenizer, reloaded_bpe: PreTrainedTokenizerBase, text: str) -> None:
    ids = bpe.encode_batch([text])[0]
    assert reloaded_bpe.decode(ids) == text
    assert ids.size == 0 or ids.max() < bpe.vocab_size


def test_bpe_is_trained_once_per_content_and_the_same_each_time(tmp_path: Path) -> None:
    passes = 0

    def pieces() -> object:
        nonlocal passes
        passes += 1
        return whole(TEXTS)

    source = Source("texts", pieces=pieces, identity=lambda _: "texts")
    config = TokenizerConfig(name="bpe", vocab_size=300)
    first, again = (load_tokenizer(config, source, "texts", tmp_path / "a", Reporter()) for _ in range(2))
    assert passes == 1
    other = load_tokenizer(config, source, "texts", tmp_path / "b", Reporter())
    for number, tokenizer in enumerate((first, again, other)):
        (tmp_path / str(number)).mkdir()
        tokenizer.save(tmp_path / str(number))
    contents = {(tmp_path / n / "tokenizer.json").read_bytes() for n in "012"}
    assert len(contents) == 1
    assert first.identity == again.identity == other.identity
    assert load_tokenizer(config, source, "other", tmp_path / "a", Reporter()).identity != first.identity


def test_bpe_holds_what_a_small_corpus_has(tmp_path: Path) -> None:
    assert load("bpe", tmp_path, vocab_size=5000, texts=["abab"]).vocab_size == 258 + 2


def test_bpe_is_trained_on_a_bounded_part_of_a_huge_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_diloco.data.tokenizers.BPE_TRAINING_BYTES", 8)
    read: list[str] = []

    def pieces() -> object:
        return (read.append(text) or piece for text, piece in zip(TEXTS, whole(["abcd"] * 200), strict=True))

    source = Source("texts", pieces=pieces, identity=lambda _: "texts")
    load_tokenizer(TokenizerConfig("bpe", 300), source, "texts", tmp_path, Reporter())
    assert len(read) == 2


@pytest.mark.parametrize("vocab_size", [-1, 0, 258, 1 << 25])
def test_a_vocabulary_that_bpe_cannot_have_is_refused(tmp_path: Path, vocab_size: int) -> None:
    error = refused(lambda: load("bpe", tmp_path, vocab_size))
    assert (error.number, f"vocab_size={vocab_size}" in error.what) == (323, True)
