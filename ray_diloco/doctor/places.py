"""Storage and data as a run will find them: written and read once, opened and tokenised a little."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray_diloco.checkpoint.files import Files, open_files
from ray_diloco.config.schema import Config, DataConfig, TokenizerConfig, island_data, island_names
from ray_diloco.data.cache import cache_folder
from ray_diloco.data.progress import Reporter
from ray_diloco.data.sources import open_source
from ray_diloco.data.tokenizers import load_tokenizer
from ray_diloco.doctor.record import Check, passed
from ray_diloco.errors import DilocoError
from ray_diloco.observe.units import show_bytes, show_count

PROBE = "doctor-probe"
_PROBE_BYTES = 4 << 20


def check_storage(url: str, where: str = "") -> Check:
    """Writes a few megabytes where commits go, reads them back, and removes them."""
    try:
        _, files = open_files(url)
        return passed("storage", where, f"{url}: {_probe(files)}")
    except DilocoError as error:
        return Check("storage", where, "fail", error.what, error.mend)
    except OSError as error:
        said = f"{url} cannot be written and read: {error.strerror or error}"
        return Check("storage", where, "fail", said, "set run.root or run.storage to a place that can be written")


@contextmanager
def marker(folder: str) -> Iterator[str]:
    """A file in a folder, for as long as the block takes, for others to look for.  Raises OSError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{PROBE}-") as file:
        yield file.name


def check_data(config: Config) -> list[Check]:
    """The first document of each island's data, through its tokenizer."""
    different: dict[str, DataConfig] = {}
    for name in island_names(config):
        data = island_data(config, name)
        if data not in different.values():
            different[name] = data
    return [_check_source(data, config.tokenizer, "" if len(different) == 1 else n) for n, data in different.items()]


def _check_source(data: DataConfig, tokenizer: TokenizerConfig, where: str) -> Check:
    try:
        source = open_source(data)
        first = next(islice(source.pieces(), 1), None)
        if first is None:
            return Check("data", where, "fail", f"{source.title} has no document", "give data.path or data.dataset")
        text = first.text[:10_000]
        if tokenizer.name == "bpe" and tokenizer.builder is None:
            # It is trained on all of the text, which takes longer than a doctor may.
            return passed("data", where, f"{source.title} opens; its BPE is trained when the run prepares it")
        loaded = load_tokenizer(tokenizer, source, "", cache_folder(data.cache), Reporter(None))
        (ids,) = loaded.encode_batch([text])
        said = f"{source.title} opens; {len(text)} characters are {show_count(len(ids))} tokens of {loaded.vocab_size}"
        return passed("data", where, said)
    except DilocoError as error:
        return Check("data", where, "fail", error.what, error.mend)


def _probe(files: Files) -> str:
    content = bytes(range(256)) * (_PROBE_BYTES // 256)
    # Other nodes may probe the same storage at the same time.
    name = f"{PROBE}-{uuid4().hex}"
    began = time.perf_counter()
    files.write(name, [content])
    written = time.perf_counter()
    try:
        found: Any = files.read(name, 0, len(content))
        read = time.perf_counter()
    finally:
        files.remove(name)
    if found != content:
        raise OSError("what was read is not what was written")
    rates = [len(content) / max(seconds, 1e-9) for seconds in (written - began, read - written)]
    return f"written at {show_bytes(rates[0])}/s and read at {show_bytes(rates[1])}/s"
