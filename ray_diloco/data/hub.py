"""Documents in a Hugging Face dataset: by name on the hub, or a local folder (of data files, or from `save_to_disk`).

`data.streaming` reads rows as they arrive instead of storing the dataset first; both give the same documents.  Without
a network, set HF_HUB_OFFLINE=1: what an earlier run has stored is used, anything else is an error at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ray_diloco.config.schema import DataConfig
from ray_diloco.data.cache import cache_folder, files_digest, key_of
from ray_diloco.data.documents import Piece, Source
from ray_diloco.data.files import missing_column, text_of
from ray_diloco.data.progress import Reporter
from ray_diloco.errors import DataError

_ROWS = 256
# What `save_to_disk` writes beside the data.
_SAVED = ("state.json", "dataset_dict.json")
# In the names of what its transports raise without a network.
_UNREACHABLE = ("Offline", "Connect", "Timeout")


def hub_source(config: DataConfig) -> Source:
    """The split `data.split` of the dataset `data.dataset`.

    Raises:
      DataError: 301 no dataset given, 309 its folder does not exist.
    """
    if not config.dataset:
        raise DataError(
            301,
            "data.source=hf needs data.dataset, which is not set",
            "set data.dataset to a dataset's name on the hub or to a local folder",
        )
    folder = Path(config.dataset).expanduser()
    if not folder.is_dir() and config.dataset.startswith(("/", ".", "~")):
        raise DataError(309, f"data.dataset={config.dataset}: there is no such folder", "correct the path")
    dataset = _Dataset(config, folder if folder.is_dir() else None)
    return Source(
        title=f"dataset {config.dataset}, split {config.split}", pieces=dataset.pieces, identity=dataset.identity
    )


class _Dataset:
    """One state of a dataset: its builder is made once, so that a commit on the hub meanwhile changes nothing."""

    def __init__(self, config: DataConfig, folder: Path | None) -> None:
        self._config = config
        self._folder = folder

    def identity(self, reporter: Reporter) -> str:
        config = self._config
        settings = (config.dataset_config, config.split, config.text_column)
        if self._folder is None:
            # The hash is the commit of the dataset's repository.
            return key_of("hub", config.dataset, self._builder.config.name, self._builder.hash, *settings)
        files = sorted(path for path in self._folder.rglob("*") if path.is_file())
        names = [path.relative_to(self._folder).as_posix() for path in files]
        return key_of("folder", names, files_digest(files, cache_folder(config.cache), reporter), *settings)

    def pieces(self) -> Iterator[Piece]:
        column, place = self._config.text_column, f"dataset {self._config.dataset}"
        try:
            rows = self._rows()
            columns = rows.column_names or list(next(iter(rows), {column: ""}))
            if column not in columns:
                raise missing_column(place, column, columns)
            for batch in rows.select_columns([column]).iter(batch_size=_ROWS):
                for value in batch[column]:
                    yield Piece(text_of(value, place, column), True)
        except DataError:
            raise
        except Exception as error:  # the library raises whatever its transports and parsers raise
            raise _unloadable(self._config, error) from error

    @cached_property
    def _builder(self) -> Any:
        """A `datasets.DatasetBuilder`."""
        import datasets

        path = str(self._config.dataset) if self._folder is None else str(self._folder)
        try:
            return datasets.load_dataset_builder(path, self._config.dataset_config)
        except Exception as error:  # as above
            raise _unloadable(self._config, error) from error

    def _rows(self) -> Any:
        """A `datasets.Dataset` or `IterableDataset`."""
        if self._folder is not None and any((self._folder / name).exists() for name in _SAVED):
            return _saved_rows(self._folder, self._config.split)
        if self._config.streaming:
            return self._builder.as_streaming_dataset(split=self._config.split)
        self._builder.download_and_prepare()
        return self._builder.as_dataset(split=self._config.split)


def _saved_rows(folder: Path, split: str) -> Any:
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, dict):
        # A dataset saved alone keeps the name of its split; made from memory it has none.
        saved = {str(saved.split or "train"): saved}
    if split not in saved:
        raise DataError(309, f"{folder} has no split {split!r}; splits: {', '.join(saved)}", "set data.split to one")
    return saved[split]


def _unloadable(config: DataConfig, error: Exception) -> DataError:
    what = f"cannot load {config.dataset} (split {config.split}): {type(error).__name__}: {error}"
    mend = "check data.dataset, data.dataset_config and data.split"
    if isinstance(error, ConnectionError) or any(sign in type(error).__name__ for sign in _UNREACHABLE):
        offline = os.environ.get("HF_HUB_OFFLINE")
        mend = (
            "HF_HUB_OFFLINE is set: unset it, or run once with a network so that the dataset is stored"
            if offline not in (None, "", "0")
            else "check the network, HF_ENDPOINT and the name; or store the dataset and set data.dataset to its folder"
        )
    return DataError(309, " ".join(what.split()), mend)
