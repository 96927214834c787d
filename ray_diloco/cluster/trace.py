"""Keeps every decoded contribution and every committed anchor, for people who check the arithmetic.

`trace/round-NNNNNN/{island-<name>,anchor}.safetensors` hold fp32 tensors by name and `round.json` the weights and outer
settings; round 0 is the founding anchor.  An actor of its own does it, so that tensors stay out of the driver.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ray_diloco.cluster.calls import actor
from ray_diloco.outer.layout import Layout


class Tracer:
    """Writes below `folder`, from round `first` on; what is there of such rounds was undone by a crash, and goes."""

    def __init__(self, folder: str, layout: Layout, first: int) -> None:
        self._folder, self._layout = Path(folder), layout
        for undone in self._folder.glob("round-*"):
            if int(undone.name.removeprefix("round-")) >= first:
                shutil.rmtree(undone)

    def write(self, round_: int, name: str, *payloads: np.ndarray) -> None:
        """Decodes payloads that cover the whole layout and writes them as `<name>.safetensors`."""
        from safetensors.numpy import save_file

        folder = self._round(round_)
        partial = folder / f"{name}.partial"
        save_file(decode(self._layout, payloads), partial)
        os.replace(partial, folder / f"{name}.safetensors")

    def describe(self, round_: int, description: Mapping[str, Any]) -> None:
        """Writes `round.json`, the last file of a round."""
        from ray_diloco.observe.lines import replace_text, to_json

        replace_text(self._round(round_) / "round.json", to_json(description, indent=2) + "\n")

    def _round(self, round_: int) -> Path:
        folder = self._folder / f"round-{round_:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def decode(layout: Layout, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by name, fp32, from payloads that together have every element once."""
    import torch

    from ray_diloco.outer.chunks import CHUNK
    from ray_diloco.outer.layout import overlaps
    from ray_diloco.outer.payload import open_payload

    flat, scratch = torch.empty(layout.numel), torch.empty(CHUNK)
    for array in arrays:
        payload = open_payload(array)
        for at, start, numel in overlaps(layout.whole, payload.header.ranges):
            for begin in range(0, numel, CHUNK):
                count = min(CHUNK, numel - begin)
                flat[at + begin : at + begin + count] = payload.read(start + begin, start + begin + count, scratch)
    return {t.name: flat[t.offset : t.offset + t.numel].view(t.shape).numpy() for t in layout.tensors}


TraceActor = actor(Tracer, num_cpus=0)
