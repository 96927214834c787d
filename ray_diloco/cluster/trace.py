"""Keeps every decoded contribution and every committed anchor, for people who check the arithmetic.

`trace/round-NNNNNN/{island-<name>,anchor}.safetensors` hold fp32 tensors by name and `round.json` the weights and outer
settings; round 0 is the founding anchor.  Further fragments have folders `round-NNNNNN-fragment-PPP`.  An actor of its
own does it, so that tensors stay out of the driver.
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
            if int(undone.name.split("-")[1]) > first:
                shutil.rmtree(undone)

    def write(self, round_: str, name: str, *payloads: np.ndarray) -> None:
        """Decodes payloads and writes the tensors that they have whole as `<name>.safetensors`."""
        from safetensors.numpy import save_file

        folder = self._round(round_)
        partial = folder / f"{name}.partial"
        save_file(decode(self._layout, payloads), partial)
        os.replace(partial, folder / f"{name}.safetensors")

    def describe(self, round_: str, description: Mapping[str, Any]) -> None:
        """Writes `round.json`, the last file of a round."""
        from ray_diloco.observe.lines import replace_text, to_json

        replace_text(self._round(round_) / "round.json", to_json(description, indent=2) + "\n")

    def _round(self, round_: str) -> Path:
        folder = self._folder / round_
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def decode(layout: Layout, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by name, fp32, of which payloads have every element; what a selection leaves out is 0."""
    import torch

    from ray_diloco.outer.means import decoded

    flat, known = torch.zeros(layout.numel), torch.zeros(layout.numel, dtype=torch.bool)
    for array in arrays:
        for at, values in decoded(array):
            flat[at : at + values.numel()] = values
            known[at : at + values.numel()] = True
    spans = ((t, slice(t.offset, t.offset + t.numel)) for t in layout.tensors)
    return {t.name: flat[span].view(t.shape).numpy() for t, span in spans if bool(known[span].all())}


TraceActor = actor(Tracer, num_cpus=0)
