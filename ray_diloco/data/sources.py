"""Where documents come from: the standard library, local files, Hugging Face datasets, or a user's own function.

`stdlib` is the default because every machine has it: about 12 MB of real text, the `.py` files of the running
interpreter's own library without its tests and installed packages.  All sources stream `str` documents in a fixed
order and can be read again; none holds the corpus in memory.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from ray_diloco.config.functions import import_function
from ray_diloco.config.schema import DataConfig
from ray_diloco.data.cache import cache_folder, key_of
from ray_diloco.data.documents import (
    TEXT_IDENTITY,
    Piece,
    Source,
    TextDigest,
    encode,
    first_documents,
    non_empty,
    without_empty,
)
from ray_diloco.data.files import FORMATS, files_identity, files_source, read_files
from ray_diloco.data.functions import called, failed
from ray_diloco.data.hub import hub_source
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def open_source(config: DataConfig) -> Source:
    """The source that `data` describes; reads no document yet.

    Raises:
      DataError: 301 unknown source or a setting missing, 302 no file matches, 309 no such folder; reading it may raise
        303–309 and 311.
      ConfigError: 113 or 122, a builder that cannot be imported.
    """
    if config.builder:
        source = builder_source(config)
    elif config.source in SOURCES:
        source = SOURCES[config.source](config)
    else:
        raise DataError(
            301,
            f"data.source={config.source} is unknown; there are {', '.join(SOURCES)}",
            "choose one, or set data.builder to a function of your own",
        )
    return dataclasses.replace(
        source,
        pieces=lambda: non_empty(_limited(source.pieces(), config), source.title),
        identity=lambda reporter: _limited_identity(source.identity(reporter), config),
    )


def _limited(pieces: Iterator[Piece], config: DataConfig) -> Iterator[Piece]:
    pieces = without_empty(pieces)
    return first_documents(pieces, config.max_documents) if config.max_documents else pieces


def _limited_identity(identity: str, config: DataConfig) -> str:
    # A digest of the documents was made of the limited ones.
    if not config.max_documents or identity.startswith(TEXT_IDENTITY):
        return identity
    return key_of(identity, config.max_documents)


def stdlib_source(config: DataConfig) -> Source:
    """The `.py` files of the running interpreter's standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _library_files(root)
    return Source(
        title=f"standard library of Python {platform.python_version()} ({root})",
        pieces=lambda: read_files(files, FORMATS["text"]),
        identity=lambda reporter: files_identity(files, cache_folder(config.cache), reporter),
        total_bytes=sum(path.stat().st_size for path in files),
    )


def _library_files(root: Path) -> list[Path]:
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    # Distributions link some modules to places that need not exist.
    return [Path(name) for name in sorted(found) if os.path.isfile(name)]


def builder_source(config: DataConfig) -> Source:
    """Documents that the user's `data.builder` yields.

    The contract: `function(config: DataConfig)` returns an iterable of `str`, the same documents in the same order at
    every call.  If the iterable has a `str` attribute `identity` that changes whenever its documents do, that keys the
    cache; otherwise the documents themselves are read and digested at every start.

    Raises:
      ConfigError: 113 or 122, the function cannot be imported.  Reading it may raise DataError 311.
    """
    path = str(config.builder)
    function = import_function(path, "data.builder")
    return Source(
        title=f"data.builder={path}",
        pieces=lambda: _built(function, config),
        identity=lambda reporter: _built_identity(function, config, reporter),
    )


def _built(function: Callable[[DataConfig], object], config: DataConfig) -> Iterator[Piece]:
    path = str(config.builder)
    documents = called(function, config, "data.builder", path)
    if isinstance(documents, str | bytes) or not hasattr(documents, "__iter__"):
        raise DataError(
            311,
            f"data.builder={path} returned {type(documents).__name__}, not an iterable of documents",
            "return or yield one str per document",
        )
    iterator = iter(documents)
    while True:
        try:
            document = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # a user's generator may fail in any way
            raise failed("data.builder", path, error) from error
        if not isinstance(document, str):
            raise DataError(
                311,
                f"data.builder={path} yielded {type(document).__name__} {document!r:.60}, not str",
                "yield one str per document",
            )
        yield Piece(document, True)


def _built_identity(function: Callable[[DataConfig], object], config: DataConfig, reporter: Reporter) -> str:
    identity = getattr(called(function, config, "data.builder", str(config.builder)), "identity", None)
    if isinstance(identity, str):
        return f"builder-{config.builder}-{identity}"
    title = f"data.builder={config.builder}"
    digest = TextDigest()
    reporter.begin("reading the documents of data.builder", None)
    for number, piece in enumerate(_limited(_built(function, config), config)):
        encoded = encode(piece, number, title)
        digest.add(encoded, piece.last)
        reporter.advance(len(encoded))
    reporter.end()
    return digest.identity()


# By `data.source`.
SOURCES: dict[str, Callable[[DataConfig], Source]] = {
    "stdlib": stdlib_source,
    **dict.fromkeys(FORMATS, files_source),
    "hf": hub_source,
}
