"""Compiles loops over elements that torch cannot fuse: quantise, pack, select, and their way back.

One pass each over memory that stays in the cache, no temporaries of the tensor's size.  What made them fast
(../shared/numbers.md, "Codecs"): magnitudes are compared as integers, every block is a slice of its own, rounding is an
addition, and a byte's parts come from parts of the unit that lie far apart, not from neighbours.  No `fastmath`: the
same input gives the same bytes on every machine, and equals the plain numpy of `tests/outer/test_quantise.py`.
"""

# A kernel and all that it calls lie in one file, for numba's cache on disk does not notice that a function of another
# file has changed.  The few functions that two families need are there twice; a test compares the copies.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(inline: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """numba's decorator, with its cache on disk; without the cache where there is no place for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        options: dict[str, Any] = {"nogil": True, "inline": "always" if inline else "never"}
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return decorate
