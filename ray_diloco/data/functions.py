"""A user's own function by import path: `package.module:function`, for `data.builder` and `tokenizer.builder`.

Whatever goes wrong in a user's module or function becomes an error that names the configuration key, the path and the
cause, because from the outside it looks like a mistake of this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ray_diloco.errors import DataError


def import_function(path: str, key: str) -> Callable[..., Any]:
    """Imports the function that configuration key `key` names.

    Raises:
      DataError: 310, the path has another form, its module does not import, or there is no such function in it.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise DataError(310, f"{key}={path} is not of the form package.module:function", "write it like my.data:build")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise DataError(
            310,
            f"{key}={path}: importing {module_name} failed: {type(error).__name__}: {error}",
            "mend the module, or put its folder on PYTHONPATH",
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        public = ", ".join(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
        raise DataError(
            310,
            f"{key}={path}: {module_name} has no function {name!r}; it has: {public or 'none'}",
            f"correct the name after the colon, or define {name} in {module_name}",
        )
    return function


def called(function: Callable[..., Any], argument: object, key: str, path: str) -> Any:
    """What a user's function returns; raises DataError 311 for whatever it raises."""
    try:
        return function(argument)
    except Exception as error:  # a user's function may fail in any way
        raise failed(key, path, error) from error


def failed(key: str, path: str, error: Exception) -> DataError:
    """The error for a user's function that raised."""
    return DataError(
        311, f"{key}={path} raised {type(error).__name__}: {error}", "mend the function; the cause is in the log"
    )
