"""The outer optimisers by name: `(A, o) ← Outer(A, o, Δ)`, on one chunk at a time.

What one is says `optimizer_protocol.py`; they stand in `momentum.py` and `adaptive.py` (../shared/algorithms.md §1,
§2.3, §2.4, §5.1, §5.2, §7.1).  A new one is one class and one line in `OPTIMIZERS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ray_diloco.errors import SyncError
from ray_diloco.outer.adaptive import Adagrad, Adam, AdamW, Sign, Yogi
from ray_diloco.outer.momentum import DelayedNesterov, EmaNesterov, HeavyBall, LookaheadNesterov, Nesterov, Sgd
from ray_diloco.outer.optimizer_protocol import OuterOptimizer

__all__ = [
    "OPTIMIZERS",
    "Adagrad",
    "Adam",
    "AdamW",
    "DelayedNesterov",
    "EmaNesterov",
    "HeavyBall",
    "LookaheadNesterov",
    "Nesterov",
    "OuterOptimizer",
    "Sgd",
    "Sign",
    "Yogi",
    "outer_optimizer",
]

# By `outer.kind`; each takes the keys of the `outer` section that are its own fields.
OPTIMIZERS: dict[str, Callable[..., OuterOptimizer]] = {
    "nesterov": Nesterov,
    "sgd": Sgd,
    "heavy_ball": HeavyBall,
    "lookahead_nesterov": LookaheadNesterov,
    "ema_nesterov": EmaNesterov,
    "delayed_nesterov": DelayedNesterov,
    "adamw": AdamW,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "sign": Sign,
}


def outer_optimizer(kind: str, **settings: Any) -> OuterOptimizer:
    """Builds an outer optimiser from the `outer` section of a configuration; the keys of other kinds are left alone.

    Args:
      kind: key of `OPTIMIZERS`.
      settings: the section; `buffer` is the number of islands where a run has set 0.

    Raises:
      SyncError: RD-415, there is none of that name; RD-433, settings outside their range.
    """
    if kind not in OPTIMIZERS:
        known = ", ".join(sorted(OPTIMIZERS))
        raise SyncError(415, f"there is no outer optimiser {kind!r}", f"use one of {known}")
    own = inspect.signature(OPTIMIZERS[kind]).parameters
    return OPTIMIZERS[kind](**{key: value for key, value in settings.items() if key in own})
