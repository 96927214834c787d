"""The digest of an anchor: one number by which runs, resumes and replays are compared."""

from __future__ import annotations

import hashlib

import numpy as np

from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.reader import absent
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.checkpoint.tensors import byte_views


def anchor_digest(store: CheckpointStore, manifest: Manifest) -> str:
    """SHA-256 (hex) over the canonical anchor: little-endian fp32, in the order of the layout, tensor by tensor.

    Raises:
      CheckpointError: 513 to 517, a file is damaged, or a tensor is missing or not as the layout says.
    """
    digest = hashlib.sha256()
    shapes = dict(manifest.layout)
    for name, array in store.load(manifest, shapes):
        if array.shape != shapes[name] or array.dtype != np.float32:
            found = f"tensor {name!r} is {array.dtype} {array.shape}; the layout says float32 {shapes[name]}"
            raise absent(manifest, "anchor", found)
        for view in byte_views(array):
            digest.update(view)
    return digest.hexdigest()
