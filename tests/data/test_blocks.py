"""A prepared corpus: what its blocks hold, when it is prepared again, and what cannot be prepared."""

import dataclasses
import itertools
import json
import math
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from transformers import AutoTokenizer

from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data import blocks
from ray_diloco.data.blocks import Corpus, prepare
from ray_diloco.data.permutation import virtual_to_block
from ray_diloco.errors import DataError

END = 256
BYTES = TokenizerConfig()


def config(tmp_path: Path, **settings: object) -> DataConfig:
    plain = {"source": "text", "path": str(tmp_path / "*.txt"), "cache": str(tmp_path / "cache")}
    return DataConfig(**{**plain, "sequence_length": 4, "heldout_blocks": 1, **settings})


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    return caught.value


@pytest.fixture
def two_texts(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text("abcdefg")
    (tmp_path / "b.txt").write_text("hi")
    return config(tmp_path)


@pytest.fixture
def never_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes any further tokenising fail."""
    return lambda: monkeypatch.setattr(blocks, "pack", None)


def test_two_documents_by_hand(two_texts: DataConfig) -> None:
    corpus = prepare(two_texts, BYTES)
    # a b c d | e f g end | h i end: the first block is held out, the third is not whole.
    opened = corpus.open()
    assert opened.heldout(np.array([0])).tolist() == [[97, 98, 99, 100]]
    assert opened.train(np.array([0])).tolist() == [[101, 102, 103, END]]
    assert opened.train(np.array([0, 0])).dtype == np.int64
    expected = {
        "name": "stdlib",
        "sequence_length": 4,
        "train_blocks": 1,
        "heldout_blocks": 1,
        "vocab_size": 258,
        "eos_id": END,
        "tokens": 8,
        "bytes_of_text": 9,
        "documents": 2,
    }
    assert {key: getattr(corpus, key) for key in expected} == expected
    assert corpus.unigram_entropy == pytest.approx(math.log(4))
    assert corpus.bytes_per_token == 9 / 11


def test_unigram_entropy_is_that_of_the_training_blocks_alone(tmp_path: Path) -> None:
    # Held out is the run in the middle of the 15 training blocks: before it 7 of them.
    (tmp_path / "a.txt").write_text("abcd" * 7 + "xxxx" + "aaaa" * 8)
    counts = {"a": 7 + 4 * 8, "b": 7, "c": 7, "d": 7}
    entropy = -sum(n / 60 * math.log(n / 60) for n in counts.values())
    assert prepare(config(tmp_path), BYTES).unigram_entropy == pytest.approx(entropy)


def test_blocks_outside_the_corpus_are_refused(two_texts: DataConfig) -> None:
    opened = prepare(two_texts, BYTES).open()
    for ask in (opened.train, opened.heldout):
        for index in (-1, 1):
            with pytest.raises(IndexError, match=f"asked for {index}"):
                ask(np.array([index]))


def test_what_is_read_may_be_changed_without_touching_the_corpus(two_texts: DataConfig) -> None:
    opened = prepare(two_texts, BYTES).open()
    opened.train(np.array([0]))[:] = 0
    assert opened.train(np.array([0])).tolist() == [[101, 102, 103, END]]


def test_the_second_preparation_reads_the_cache(two_texts: DataConfig, never_again: Callable[[], None]) -> None:
    first = prepare(two_texts, BYTES)
    never_again()
    assert prepare(two_texts, BYTES) == first


def test_another_number_of_held_out_blocks_uses_the_same_tokens(
    tmp_path: Path, never_again: Callable[[], None]
) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    one = prepare(config(tmp_path), BYTES)
    never_again()
    three = prepare(config(tmp_path, heldout_blocks=3), BYTES)
    assert (one.train_blocks, three.train_blocks) == (24, 22)
    assert one.digest != three.digest, "the numbers of the training blocks have changed"


def test_the_same_content_has_the_same_digest_anywhere(tmp_path: Path) -> None:
    corpora = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("the same text")
        corpora.append(prepare(config(tmp_path / name), BYTES))
    assert corpora[0].digest == corpora[1].digest
    assert corpora[0].folder != corpora[1].folder


def test_changed_data_is_prepared_again(two_texts: DataConfig, tmp_path: Path) -> None:
    before = prepare(two_texts, BYTES)
    (tmp_path / "a.txt").write_text("abcdefG")
    after = prepare(two_texts, BYTES)
    assert after.digest != before.digest
    assert after.open().train(np.array([0])).tolist() == [[101, 102, ord("G"), END]]
    assert before.open().train(np.array([0])).tolist() == [[101, 102, 103, END]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "tokens.bin").write_bytes(b"\0" * 16),
        lambda folder: (folder / "tokens.bin").write_bytes(b""),
        lambda folder: (folder / "tokens.bin").unlink(),
        lambda folder: (folder / "counts.npy").unlink(),
        lambda folder: (folder / "corpus.json").unlink(),
        lambda folder: (folder / "corpus.json").write_text("{"),
        lambda folder: (folder / "corpus.json").write_text("{}"),
    ],
)
def test_a_damaged_cache_is_prepared_again(two_texts: DataConfig, damage: Callable[[Path], None]) -> None:
    first = prepare(two_texts, BYTES)
    damage(first.folder)
    assert prepare(two_texts, BYTES) == first
    assert first.open().train(np.array([0])).tolist() == [[101, 102, 103, END]]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\0" * 6)])
def test_blocks_that_are_not_on_this_machine_or_cut_off_are_refused(
    two_texts: DataConfig, damage: Callable[[Path], None]
) -> None:
    corpus = prepare(two_texts, BYTES)
    damage(corpus.folder / "tokens.bin")
    error = refused(corpus.open)
    assert (error.number, str(corpus.folder) in error.what) == (334, True)


def test_a_file_that_changes_while_it_is_tokenised_is_an_error(
    two_texts: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = blocks.pack

    def interrupted(*arguments: object) -> object:
        done = pack(*arguments)
        (tmp_path / "b.txt").write_text("ho")
        return done

    monkeypatch.setattr(blocks, "pack", interrupted)
    error = refused(lambda: prepare(two_texts, BYTES))
    assert (error.number, "changed while they were tokenised" in error.what) == (312, True)
    assert not list((tmp_path / "cache").rglob("tokens.bin"))


@pytest.mark.parametrize(
    ("settings", "number", "texts"),
    [
        ({"sequence_length": 12}, 330, ["11 tokens are less than one block of 12"]),
        ({"heldout_blocks": 2}, 331, ["2 blocks of 4 tokens", "heldout_blocks=2 would leave none"]),
        ({"heldout_blocks": 64}, 331, ["2 blocks of 4 tokens", "heldout_blocks=64"]),
        ({"sequence_length": 1}, 332, ["sequence_length=1"]),
        ({"heldout_blocks": -1}, 332, ["heldout_blocks=-1"]),
        ({"max_documents": -5}, 332, ["max_documents=-5"]),
    ],
)
def test_what_is_too_short_or_asks_too_much_is_refused_with_its_numbers(
    two_texts: DataConfig, settings: dict[str, object], number: int, texts: list[str]
) -> None:
    error = refused(lambda: prepare(dataclasses.replace(two_texts, **settings), BYTES))
    assert error.number == number
    assert all(text in error.what for text in texts), error.what


def test_a_corpus_of_exactly_one_block_and_its_end_can_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    corpus = prepare(config(tmp_path, heldout_blocks=0), BYTES)
    assert corpus.open().train(np.array([0])).tolist() == [[97, 98, 99, END]]
    assert corpus.open().heldout(np.array([], dtype=np.int64)).shape == (0, 4)


def read_from(corpus: Corpus, seed: int, start: int, stop: int) -> list[list[int]]:
    opened = pickle.loads(pickle.dumps(corpus)).open()
    return opened.train(virtual_to_block(seed, np.arange(start, stop), corpus.train_blocks)).tolist()


def test_a_run_resumed_three_times_reads_what_an_uninterrupted_one_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(200)))
    corpus = prepare(config(tmp_path), BYTES)
    end = 2 * corpus.train_blocks + 7
    straight = read_from(corpus, 3, 0, end)
    borders = [0, 13, 14, corpus.train_blocks + 1, end]
    resumed = [row for start, stop in itertools.pairwise(borders) for row in read_from(corpus, 3, start, stop)]
    assert resumed == straight
    assert sorted(straight[: corpus.train_blocks]) == sorted(straight[corpus.train_blocks : 2 * corpus.train_blocks])


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig("bpe", 300)], ids=lambda t: t.name)
def test_the_text_can_be_read_back_through_the_saved_tokenizer(tmp_path: Path, tokenizer: TokenizerConfig) -> None:
    texts = ["def function(x):\n    return größer(x)\n" * 20, "the end 😀" * 30]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = prepare(config(tmp_path, heldout_blocks=0), tokenizer)
    reloaded = AutoTokenizer.from_pretrained(corpus.tokenizer_folder)
    ids = corpus.open().train(np.arange(corpus.train_blocks)).ravel()
    decoded = reloaded.decode(ids).split("<|endoftext|>")
    assert decoded[0] == texts[0]
    # The tail of the last document is in the partial block.
    assert texts[1].startswith(decoded[1].rstrip("\ufffd"))
    assert len(decoded[1]) > len(texts[1]) - 10
    assert (len(reloaded), reloaded.eos_token_id) == (corpus.vocab_size, corpus.eos_id)


def test_islands_with_other_data_can_share_the_tokenizer_of_a_prepared_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, some more words " * 20)
    (tmp_path / "b.txt").write_text("quite other words " * 20)
    first = prepare(config(tmp_path, path=str(tmp_path / "a.txt")), TokenizerConfig("bpe", 280))
    shared = TokenizerConfig(str(first.tokenizer_folder))
    other = prepare(config(tmp_path, path=str(tmp_path / "b.txt"), heldout_blocks=0), shared)
    assert (other.vocab_size, other.eos_id) == (first.vocab_size, first.eos_id)
    ids = other.open().train(np.arange(other.train_blocks)).ravel()
    assert AutoTokenizer.from_pretrained(first.tokenizer_folder).decode(ids).startswith("quite other words quite")


def test_a_bpe_can_be_trained_on_other_data_than_it_encodes_on_any_machine(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, some more words " * 20)
    (tmp_path / "b.txt").write_text("quite other words " * 20)
    bpe = TokenizerConfig("bpe", 280)

    def vocabulary(name: str, trained_on: str, cache: str) -> dict[str, int]:
        data, other = (
            config(tmp_path, path=str(tmp_path / f), cache=str(tmp_path / cache)) for f in (name, trained_on)
        )
        vocab: dict[str, int] = AutoTokenizer.from_pretrained(
            prepare(data, bpe, trained_on=other).tokenizer_folder
        ).get_vocab()
        return vocab

    first = vocabulary("a.txt", "a.txt", "one")
    assert vocabulary("b.txt", "a.txt", "one") == vocabulary("b.txt", "a.txt", "two") == first
    assert vocabulary("b.txt", "b.txt", "one") != first


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("users_blocks")
    monkeypatch.setitem(sys.modules, "users_blocks", made)
    return made


def test_a_builder_is_cached_by_what_it_yields(
    tmp_path: Path, module: ModuleType, never_again: Callable[[], None]
) -> None:
    module.build = lambda config: ["abcdefg", "hi"]
    built = config(tmp_path, builder="users_blocks:build")
    first = prepare(built, BYTES)
    assert prepare(dataclasses.replace(built, max_documents=1, heldout_blocks=0), BYTES).tokens == 8
    never_again()
    assert prepare(built, BYTES) == first


def test_a_builder_that_does_not_repeat_itself_is_refused(tmp_path: Path, module: ModuleType) -> None:
    passes = iter(range(99))
    module.build = lambda config: [f"pass number {next(passes)} of many"]
    error = refused(lambda: prepare(config(tmp_path, builder="users_blocks:build"), BYTES))
    assert (error.number, "data.builder=users_blocks:build" in error.what) == (312, True)


def test_a_corpus_is_never_held_in_memory(tmp_path: Path, module: ModuleType) -> None:
    def build(_: DataConfig) -> Iterator[str]:
        return (chr(97 + number % 26) * 1_000_000 for number in range(48))

    module.build = build
    built = config(tmp_path, builder="users_blocks:build", sequence_length=1024)
    tracemalloc.start()
    corpus = prepare(built, BYTES)
    opened = corpus.open()
    opened.train(np.arange(8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.tokens > 47_000_000
    assert peak < 24_000_000


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_a_cached_corpus_of_bytes_needs_no_large_library(two_texts: DataConfig) -> None:
    prepare(two_texts, BYTES)
    process = run_python(
        f"""
import sys
import numpy
import ray_diloco.data
from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data.blocks import prepare
prepare({two_texts!r}, TokenizerConfig()).open().train(numpy.array([0]))
print(*{{"torch", "transformers", "datasets", "pyarrow", "tokenizers", "ray", "huggingface_hub"}} & set(sys.modules))
"""
    )
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output.split()) == (0, [])


def test_two_processes_that_prepare_at_once_both_get_the_corpus(two_texts: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("x" * 2_000_000)
    code = f"""
from ray_diloco.config.schema import DataConfig, TokenizerConfig
from ray_diloco.data.blocks import prepare
print(prepare({two_texts!r}, TokenizerConfig()).digest)
"""
    outputs = {process.communicate(timeout=60)[0] for process in [run_python(code), run_python(code)]}
    assert outputs == {prepare(two_texts, BYTES).digest + "\n"}
    assert [path.name for path in (tmp_path / "cache" / "blocks").iterdir() if path.name.startswith(".")] == []


def test_long_preparations_say_what_they_do_and_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_diloco.data.progress._QUIET_S", 0)
    (tmp_path / "a.txt").write_text("x" * 1_000_000)
    reports: list[tuple[str, int, int | None]] = []
    prepare(config(tmp_path), TokenizerConfig("bpe", 300), lambda *report: reports.append(report))
    assert list(dict.fromkeys(what.split()[0] for what, _, _ in reports)) == ["reading", "training", "tokenising"]
    assert {total for _, _, total in reports} == {1_000_000}
    assert reports[-1][1] == 1_000_000


def test_a_prepared_folder_says_what_it_is(two_texts: DataConfig) -> None:
    about = json.loads((prepare(two_texts, BYTES).folder / "corpus.json").read_text())
    assert about["source"].startswith("2 text files")
    assert (about["tokenizer"], about["blocks"], about["dropped_tokens"]) == ("bytes-1", 2, 3)


@pytest.mark.parametrize("tokenizer", [BYTES, TokenizerConfig("bpe", 300)], ids=lambda t: t.name)
def test_a_source_that_breaks_on_the_way_leaves_nothing_in_the_cache(
    two_texts: DataConfig, tmp_path: Path, tokenizer: TokenizerConfig
) -> None:
    (tmp_path / "c.txt").write_bytes(b"fine until \xff")
    error = refused(lambda: prepare(two_texts, tokenizer))
    assert (error.number, "c.txt is not UTF-8: byte 0xff at offset 11" in error.what) == (304, True)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.parent.name != "digests"] == []
