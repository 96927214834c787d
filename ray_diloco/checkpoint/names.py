"""Names of the folders and files of a commit, as they lie in the storage of a run."""

from __future__ import annotations

import re
from urllib.parse import quote

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
WHOLE = re.compile(r"round-(\d{6,})")
PARTIAL = re.compile(r"round-(\d{6,})\.partial")
# Shorter than a file name may be, because a writer appends to it until the file is whole.
TENSOR_FILE = re.compile(r"[\w~%+-][\w~%+.-]{0,180}\.safetensors", re.ASCII)


def whole_folder(round: int) -> str:
    """Folder of a commit, relative to the storage."""
    return f"{FOLDER}/round-{round:06d}"


def partial_folder(round: int) -> str:
    """Folder in which a commit grows until a rename makes it whole."""
    return f"{whole_folder(round)}.partial"


def anchor_filename(shard: int, shards: int) -> str:
    """File of an anchor shard's parameters; keys are tensor names."""
    return f"anchor-{shard:05d}-of-{shards:05d}.safetensors"


def outer_filename(shard: int, shards: int) -> str:
    """File of an anchor shard's outer state; keys are `momentum.<tensor name>`."""
    return f"outer-{shard:05d}-of-{shards:05d}.safetensors"


def inner_filename(island: str, rank: int) -> str:
    """File of one rank's inner optimiser state."""
    return f"inner-{quote(island, safe='')}-r{rank:05d}.safetensors"
