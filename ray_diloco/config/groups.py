"""Group files: `model=tiny` is `conf/model/tiny.yaml`, or a folder, hub name or file where the group allows it.

A file is looked for in the folder of `--conf-dir`, then in `./conf` of the current folder, then in the `conf` that
comes with the package, so users add groups of their own beside their work.  A file of `model`, `data` or `tokenizer`
holds keys of that section; one of `algorithm` holds sections, because a method is a setting of many blocks, and so does
one of `overlay`, which is laid over any method (`algorithm=diloco overlay=robust`).
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_diloco.config.keys import leaves, nearest
from ray_diloco.config.tree import Leaf, Tree
from ray_diloco.config.yamlfile import Document, KeyPath, read_file
from ray_diloco.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """A part of the configuration that is chosen by name.

    Attributes:
      default: the file that is read when nobody chooses.
      defining: keys of the section that a choice sets or resets; the others outlive it.
      inline: keys that define the section without a file (`model.architecture=gpt2 model.config.n_layer=2`).
    """

    default: str
    defining: tuple[str, ...]
    inline: tuple[str, ...]


GROUPS: dict[str, Group] = {
    "model": Group(
        "tiny", ("name", "architecture", "config", "pretrained", "builder"), ("pretrained", "builder", "architecture")
    ),
    "data": Group(
        "stdlib",
        ("name", "source", "path", "dataset", "dataset_config", "split", "text_column", "streaming", "max_documents",
         "builder"),
        ("builder", "source"),
    ),
    "tokenizer": Group("bytes", ("name", "vocab_size", "builder"), ("builder", "name")),
    "algorithm": Group("diloco", ("name",), ()),
    "overlay": Group("none", ("name",), ()),
}  # fmt: skip

# Groups whose files hold sections.  The order is that of `GROUPS`: an overlay lies over the algorithm.
OF_BLOCKS = ("algorithm", "overlay")

# What the endings of local files say about their form; any other is read as text.
SOURCE_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet", ".csv": "csv"}

_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*$")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


@dataclass(frozen=True)
class Search:
    """Where group files are looked for; `labels` are the names of these folders in messages."""

    folders: tuple[Path, ...]
    labels: tuple[str, ...]

    def find(self, group: str, name: str) -> tuple[Path, str] | None:
        """The file of a group, and how to call it, or None."""
        if not _NAME.match(name):
            return None
        for folder, label in zip(self.folders, self.labels, strict=True):
            path = folder / group / f"{name}.yaml"
            if path.is_file():
                return path, f"{label}/{group}/{name}.yaml"
        return None

    def names(self, group: str) -> list[str]:
        """Every name that `find` knows, sorted."""
        return sorted({path.stem for folder in self.folders for path in (folder / group).glob("*.yaml")})

    def read(self, group: str, name: str, where: str, hint: str = "") -> tuple[Document, str]:
        """Content and label of a group file.

        Raises:
          ConfigError: 102 if there is none of that name; 105 or 106 if it cannot be read.
        """
        found = self.find(group, name)
        if found is None:
            names = self.names(group)
            close = nearest(name, names)
            meant = f"did you mean {group}={close}? " if close else ""
            raise ConfigError(
                102, f"{where}: there is no {group} {name!r}", f"{meant}choices: {', '.join(names) or 'none'}{hint}"
            )
        path, label = found
        return read_file(path), label


def packaged_conf() -> Path:
    """The `conf` folder of this package: inside it when installed, beside it in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def search_path(conf_dir: str | None) -> Search:
    """The folders of the module docstring.

    Raises:
      ConfigError: 105 if `conf_dir` is no folder.
    """
    folders, labels = [Path("conf"), packaged_conf()], ["conf", "conf"]
    if conf_dir is not None:
        if not Path(conf_dir).is_dir():
            raise ConfigError(105, f"--conf-dir {conf_dir} is no folder", "give a folder with model/, data/, … in it")
        folders.insert(0, Path(conf_dir))
        labels.insert(0, conf_dir.rstrip("/"))
    return Search(tuple(folders), tuple(labels))


def group_leaves(search: Search, group: str, value: str, origin: str, where: str) -> Tree:
    """What the choice `group=value` sets, by key.

    Raises:
      ConfigError: 101 or 103 for a wrong key in the group file, 102 for an unknown name, 105 or 106 for its reading.
    """
    if search.find(group, value) is None and (special := _special(group, value, where)) is not None:
        return {(group, key): Leaf(setting, origin, where) for key, setting in special.items()}
    document, label = search.read(group, value, where, _HINTS.get(group, ""))
    at: KeyPath = () if group in OF_BLOCKS else (group,)
    found: Tree = {(group, "name"): Leaf(value, label, label)}
    for name, below in document.values.items():
        if not at and name in GROUPS:
            raise ConfigError(101, f"{label}: a file of {group} sets blocks, not {name!r}", f"take {name!r} out of it")
        line = f"{label}:{document.lines.get((name,), 1)}"
        for path, setting in leaves(below, (*at, name), line):
            found[path] = Leaf(setting, label, f"{label}:{document.lines.get(path[len(at) :], 1)}")
    return found


_HINTS = {
    "model": "; or the folder of a pretrained model, or model.pretrained=<hub name>",
    "data": "; or the path of a file, or a glob in quotes",
    "tokenizer": "; or the folder of a tokenizer, or tokenizer.name=<hub name>",
}


def _special(group: str, value: str, where: str) -> dict[str, Any] | None:
    """Settings for a value that names a folder, file or hub entry instead of a group file."""
    path = Path(value).expanduser()
    if group == "model" and path.is_dir():
        return {"name": path.resolve().name, "pretrained": value}
    if group == "tokenizer" and (path.is_dir() or _HUB_NAME.match(value)):
        return {"name": value}
    if group == "data":
        return _local_files(value, where)
    return None


def _local_files(value: str, where: str) -> dict[str, Any] | None:
    """Source and path for a comma-separated list of existing files or globs."""
    patterns = [Path(part.strip()).expanduser() for part in value.split(",")]
    if not all(any(Path(hit).is_file() for hit in glob.iglob(str(p), recursive=True)) for p in patterns):
        return None
    sources = sorted({SOURCE_BY_SUFFIX.get(pattern.suffix.lower(), "text") for pattern in patterns})
    if len(sources) > 1:
        raise ConfigError(
            102, f"{where}: files of different forms ({', '.join(sources)}) in one source", "give files of one form"
        )
    return {"name": sources[0], "source": sources[0], "path": value}
