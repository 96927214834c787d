"""One spelling of a JSON value, so that equal values have equal digests on every machine.

Keys sorted, no spaces, ASCII only, floats in their shortest exact form.  What JSON would change on the way
(keys that are no strings, NaN, infinities, numpy scalars) is refused with the path of the value, because a
manifest whose ledger comes back different from what was saved is a lost run.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any


def canonical_json(value: Any) -> str:
    """The one text of a plain JSON value; tuples count as lists.

    Raises:
      ValueError: a part of `value` is no plain JSON; the message names its path.
    """
    _refuse_unplain(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of the canonical text of a plain JSON value.  Raises ValueError like `canonical_json`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def _refuse_unplain(value: Any, path: str) -> None:
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{path or 'the value'} is {value}, which JSON cannot hold")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{path or 'the value'} has the key {key!r}; JSON keys are strings")
            _refuse_unplain(item, f"{path}.{key}" if path else key)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            _refuse_unplain(item, f"{path}[{index}]")
    else:
        raise ValueError(f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold")
