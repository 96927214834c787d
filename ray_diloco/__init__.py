"""Train language models on islands of compute that are far apart, over ordinary networks, on machines that fail.

    import ray_diloco
    result = ray_diloco.train(["model=tiny", "islands.count=2", "inner.H=20", "run.rounds=5"])

Importing this package imports neither torch nor Ray; the functions do when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_diloco.api import Result, evaluate, generate, train

__all__ = ["Result", "evaluate", "generate", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ray_diloco' has no attribute {name!r}")
    from ray_diloco import api

    return getattr(api, name)
