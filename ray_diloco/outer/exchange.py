"""A rank's side of a round: what it holds of the canonical form, and what it sends and adopts.

Source: ../shared/algorithms.md §1 (`Δ = B − θ`, start minus end) and §10.1 (emit, adopt).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ray_diloco.outer.layout import Range


@dataclass(frozen=True)
class Slice:
    """Canonical elements that a rank holds, as memory it can write.

    Attributes:
      range: the elements, in the flat canonical space.
      values: 1-D contiguous fp32 view of them, `range.numel` long, on any device; writing it changes the model.
    """

    range: Range
    values: torch.Tensor
