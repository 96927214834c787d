"""Hugging Face tokenizers from folders, a user's own tokenizers, and what either may lack."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from ray_diloco.config.schema import TokenizerConfig
from ray_diloco.data.huggingface import HuggingFaceTokenizer
from ray_diloco.data.tokenizers import ByteTokenizer
from ray_diloco.errors import DataError

TEXT = "some text  <|endoftext|> größer 😀\n"


def refused(action: Callable[[], object]) -> DataError:
    with pytest.raises(DataError) as caught:
        action()
    return caught.value


def load(tmp_path: Path, name: str | Path = "", builder: str | None = None) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(TokenizerConfig(name=str(name), builder=builder), tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer"
    path.mkdir()
    ByteTokenizer().save(path)
    return path


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text())
    content.update(values)
    path.write_text(json.dumps(content))


def test_a_folder_is_loaded_as_auto_tokenizer_does(tmp_path: Path, folder: Path) -> None:
    tokenizer = load(tmp_path, folder)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (258, 256)
    assert tokenizer.encode_batch([TEXT, ""])[0].tolist() == list(TEXT.encode())
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("hi")["input_ids"] == [104, 105]


def test_truncation_and_padding_of_a_saved_tokenizer_do_not_touch_documents_nor_what_is_saved(
    tmp_path: Path, folder: Path
) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 257,
        "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }
    change(folder / "tokenizer.json", truncation=cut, padding=fill)
    tokenizer = load(tmp_path, folder)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["ab", "abcdefgh"])] == [[97, 98], list(range(97, 105))]
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["truncation"] == cut


def test_the_identity_follows_the_tokenizers_files_and_nothing_else(tmp_path: Path, folder: Path) -> None:
    before = load(tmp_path, folder).identity
    (folder / "model.safetensors").write_bytes(b"weights")
    assert load(tmp_path, folder).identity == before
    change(folder / "tokenizer_config.json", pad_token="<|endoftext|>")
    assert load(tmp_path, folder).identity != before


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path, folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token=None)
    error = refused(lambda: load(tmp_path, folder).eos_id)
    assert (error.number, str(folder) in error.what) == (321, True)


@pytest.mark.parametrize("name", ["empty", "byets/nowhere"])
def test_what_is_no_tokenizer_is_refused_with_the_librarys_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    error = refused(lambda: load(tmp_path, name).vocab_size)
    assert error.number == 320
    assert f"tokenizer.name={name} is neither bytes nor bpe" in error.what
    assert "\n" not in error.what


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("users_tokens")
    monkeypatch.setitem(sys.modules, "users_tokens", made)
    return made


class Letters:
    """The least that a builder may return: a is 0, … z is 25."""

    eos_token_id = 26

    def __len__(self) -> int:
        return 27

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "letters.json").write_text("26")


def test_a_builder_may_return_a_tokenizer_of_the_users_own(tmp_path: Path, module: ModuleType) -> None:
    module.build = lambda config: Letters()
    tokenizer = load(tmp_path, builder="users_tokens:build")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (27, 26)
    assert [ids.tolist() for ids in tokenizer.encode_batch(["abc", ""])] == [[0, 1, 2], []]
    assert tokenizer.identity == load(tmp_path, builder="users_tokens:build").identity


def test_a_builder_may_return_a_hugging_face_tokenizer_without_a_fast_form(tmp_path: Path, module: ModuleType) -> None:
    module.build = lambda config: ByT5Tokenizer()
    tokenizer = load(tmp_path, builder="users_tokens:build")
    # ByT5 puts pad, eos and unk before the bytes.
    assert tokenizer.eos_id == 1
    assert tokenizer.encode_batch(["ab</s>"])[0].tolist() == [byte + 3 for byte in b"ab</s>"]
    assert tokenizer.vocab_size >= 259


def test_a_builders_tokenizer_must_have_the_contracts_parts(tmp_path: Path, module: ModuleType) -> None:
    module.build = lambda config: type("Half", (), {"encode": None, "eos_token_id": 1})()
    error = refused(lambda: load(tmp_path, builder="users_tokens:build").eos_id)
    assert (error.number, "Half, which has no __len__, save_pretrained" in error.what) == (322, True)


@pytest.mark.parametrize(
    ("encode", "number", "text"),
    [
        (lambda self, text: "abc", 322, "encode returned str 'abc', not a list of ids"),
        (lambda self, text: [0.5], 322, "encode returned list [0.5]"),
        (lambda self, text: [-1], 322, "encode returned list [-1]"),
        (lambda self, text: text[99], 311, "raised IndexError"),
    ],
)
def test_a_builders_tokenizer_that_encodes_wrongly_is_named(
    tmp_path: Path, module: ModuleType, encode: Callable[..., object], number: int, text: str
) -> None:
    module.build = lambda config: type("Odd", (Letters,), {"encode": encode})()
    error = refused(lambda: load(tmp_path, builder="users_tokens:build").encode_batch(["abc"]))
    assert error.number == number
    assert text in error.what
    assert "users_tokens:build" in error.what
