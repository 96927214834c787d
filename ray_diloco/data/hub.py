"""Documents in a Hugging Face dataset: by name on the hub, or a local folder (of data files, or from `save_to_disk`).

`data.streaming` reads rows as they arrive instead of storing the dataset first; both give the same documents.  Without
a network, set HF_HUB_OFFLINE=1: what an earlier run has stored is used, anything else is an error at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray_diloco.config.schema import DataConfig
from ray_diloco.data.cache import cache_folder, files_digest, key_of
from ray_diloco.data.documents import Piece, Source
from ray_diloco.data.files import missing_column, text_of
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

_ROWS = 256


def hub_source(config: DataConfig) -> Source:
    """The split `data.split` of the dataset `data.dataset`.

    Raises:
      DataError: 301 no dataset given, 309 its folder does not exist.
    """
    if not config.dataset:
        raise DataError(
            301,
            "data.source=hf needs data.dataset, which is not set",
            "set data.dataset to a dataset's name on the hub or to a local folder.",
        )
    folder = Path(config.dataset).expanduser()
    if not folder.is_dir() and config.dataset.startswith(("/", ".", "~")):
        raise DataError(309, f"data.dataset={config.dataset}: there is no such folder", "correct the path.")
    return Source(
        title=f"dataset {config.dataset}, split {config.split}",
        pieces=lambda: _pieces(config),
        identity=lambda reporter: _identity(config, reporter),
    )


def _identity(config: DataConfig, reporter: Reporter) -> str:
    settings = (config.dataset_config, config.split, config.text_column)
    folder = _folder(config)
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        return key_of("folder", names, files_digest(files, cache_folder(config.cache), reporter), *settings)
    import datasets

    try:
        builder = datasets.load_dataset_builder(str(config.dataset), config.dataset_config)
    except Exception as error:  # the library raises whatever its transports raise
        raise _unloadable(config, error) from error
    # The hash holds the commit of the dataset's repository.
    return key_of("hub", config.dataset, builder.config.name, builder.hash, *settings)


def _pieces(config: DataConfig) -> Iterator[Piece]:
    place = f"dataset {config.dataset}"
    try:
        rows = _load(config)
        columns = rows.column_names or list(next(iter(rows), {config.text_column: ""}))
        if config.text_column not in columns:
            raise missing_column(place, config.text_column, columns)
        for batch in rows.select_columns([config.text_column]).iter(batch_size=_ROWS):
            for value in batch[config.text_column]:
                yield Piece(text_of(value, place, config.text_column), True)
    except DataError:
        raise
    except Exception as error:  # the library raises whatever its transports and parsers raise
        raise _unloadable(config, error) from error


def _load(config: DataConfig) -> Any:
    """A `datasets.Dataset` or `IterableDataset`."""
    import datasets

    folder = _folder(config)
    if folder is None or not ((folder / "state.json").exists() or (folder / "dataset_dict.json").exists()):
        path = str(config.dataset) if folder is None else str(folder)
        return datasets.load_dataset(path, config.dataset_config, split=config.split, streaming=config.streaming)
    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, dict):
        # A dataset saved alone keeps the name of its split, or has none.
        saved = {str(saved.split or config.split): saved}
    if config.split not in saved:
        raise DataError(
            309,
            f"data.dataset={config.dataset} has no split {config.split!r}; splits: {', '.join(saved)}",
            "set data.split to one.",
        )
    return saved[config.split]


def _folder(config: DataConfig) -> Path | None:
    folder = Path(str(config.dataset)).expanduser()
    return folder if folder.is_dir() else None


def _unloadable(config: DataConfig, error: Exception) -> DataError:
    what = f"cannot load {config.dataset} (split {config.split}): {type(error).__name__}: {error}"
    mend = "check data.dataset, data.dataset_config and data.split."
    if isinstance(error, ConnectionError) or "Offline" in type(error).__name__:
        offline = os.environ.get("HF_HUB_OFFLINE")
        mend = (
            "HF_HUB_OFFLINE is set: unset it, or run once with a network so that the dataset is stored."
            if offline not in (None, "", "0")
            else "check the network, HF_ENDPOINT and the name; or store the dataset and set data.dataset to its folder."
        )
    return DataError(309, " ".join(what.split()), mend)
