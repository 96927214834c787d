"""Any Hugging Face tokenizer: from a folder, the hub, or a user's own function.

transformers is imported when the tokenizer is first used, not to look up a corpus that a local folder has already
tokenised.  Where the tokenizer is a fast one, its `tokenizers` backend encodes whole batches on all cores.
"""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_diloco.config.functions import import_function
from ray_diloco.config.schema import TokenizerConfig
from ray_diloco.data.cache import files_digest, key_of
from ray_diloco.data.functions import called
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

if TYPE_CHECKING:
    import tokenizers

_CONTRACT = ("encode", "eos_token_id", "__len__", "save_pretrained")
# What a tokenizer may consist of; a model's folder may hold its weights too, which have no say.
_SUFFIXES = {".json", ".model", ".txt", ".tiktoken", ".jinja", ".py"}


def encode_batch(backend: tokenizers.Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids (uint32) of each text, without special tokens, and with those that a text spells taken as text."""
    backend.encode_special_tokens = True
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


class HuggingFaceTokenizer:
    """A tokenizer from a folder, the hub, or the user's `tokenizer.builder`, loaded when it is first used.

    The contract of `tokenizer.builder`: `function(config: TokenizerConfig)` returns a Hugging Face tokenizer, or an
    object with `encode(text) -> list[int]`, `eos_token_id`, `__len__` (above every id) and `save_pretrained(folder)`,
    which writes the same files for the same tokenizer.
    """

    def __init__(self, config: TokenizerConfig, cache: Path) -> None:
        self._config = config
        self._cache = cache
        self._title = config.builder or config.name
        self._key = ("tokenizer.builder" if config.builder else "tokenizer.name", self._title)

    @cached_property
    def identity(self) -> str:
        """Digest of the files that make it; those of a loaded tokenizer are written for that."""
        folder = Path(self._config.name).expanduser()
        if not self._config.builder and folder.is_dir():
            return self._files_identity(folder)
        with tempfile.TemporaryDirectory() as draft:
            self.save(Path(draft))
            return self._files_identity(Path(draft))

    def _files_identity(self, folder: Path) -> str:
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES)
        return key_of("hf-1", [path.name for path in files], files_digest(files, self._cache, Reporter()))

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = _build(self._config) if self._config.builder else _from_pretrained(self._config.name)
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise DataError(
                321,
                f"tokenizer {self._title} has no end-of-text token (eos_token) to put between documents",
                "set eos_token in its tokenizer_config.json, or choose another tokenizer",
            )
        return tokenizer

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        return int(self._tokenizer.eos_token_id)

    @cached_property
    def vocab_size(self) -> int:
        """One above the largest id: added tokens may leave holes."""
        known = self._tokenizer.get_vocab().values() if hasattr(self._tokenizer, "get_vocab") else ()
        return max(len(self._tokenizer), max(known, default=0) + 1)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer | None:
        """A copy of a fast tokenizer's backend, or None."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        copy: tokenizers.Tokenizer = type(backend).from_str(backend.to_str())
        # A saved tokenizer may cut and fill texts to a length, which would drop and add tokens.
        copy.no_truncation()
        copy.no_padding()
        return copy

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Ids as uint32; raises DataError 311 or 322 for a builder's tokenizer that fails."""
        if self._backend is not None:
            return encode_batch(self._backend, texts)
        return [self._checked(called(self._encode, text, *self._key)) for text in texts]

    def _encode(self, text: str) -> Any:
        from transformers import PreTrainedTokenizerBase

        if isinstance(self._tokenizer, PreTrainedTokenizerBase):
            return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self._tokenizer.encode(text)

    def _checked(self, ids: Any) -> np.ndarray:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
            raise DataError(
                322,
                f"tokenizer {self._title}: encode returned {type(ids).__name__} {ids!r:.60}, not a list of ids",
                "return one non-negative int per token",
            )
        return array.astype(np.uint32)

    def save(self, folder: Path) -> None:
        """Writes the folder by the tokenizer's own `save_pretrained`."""
        self._tokenizer.save_pretrained(str(folder))


def _from_pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(Path(name).expanduser()) if name.startswith("~") else name)
    except Exception as error:  # the library raises whatever its transports and parsers raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            320,
            f"tokenizer.name={name} is neither bytes nor bpe, and no tokenizer loads from there: {what}",
            "correct the folder or hub name; without a network only folders and what is stored already will do",
        ) from error


def _build(config: TokenizerConfig) -> Any:
    path = str(config.builder)
    tokenizer = called(import_function(path, "tokenizer.builder"), config, "tokenizer.builder", path)
    missing = [name for name in _CONTRACT if not hasattr(tokenizer, name)]
    if missing:
        raise DataError(
            322,
            f"tokenizer.builder={path} returned {type(tokenizer).__name__}, which has no {', '.join(missing)}",
            "return a Hugging Face tokenizer, or an object with all of these",
        )
    return tokenizer
