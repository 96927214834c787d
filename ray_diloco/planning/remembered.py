"""Small measurements that later commands read: speeds of the code, steps of runs, links between regions.

JSON files below the cache folder.  A file that cannot be read counts as empty and one that cannot be written is left:
whatever stands there can be measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ray_diloco.data.cache import cache_folder

FOLDER = "planning"


def recall(cache: str | None, name: str) -> dict[str, Any]:
    """What is remembered under a name, by key."""
    try:
        found = json.loads(_path(cache, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(cache: str | None, name: str, entries: dict[str, Any]) -> None:
    """Adds entries to what is remembered under a name; the file is replaced in one move."""
    path = _path(cache, name)
    content = recall(cache, name) | entries
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(draft, path)


def _path(cache: str | None, name: str) -> Path:
    return cache_folder(cache) / FOLDER / f"{name}.json"
