"""Calls of a user's own functions, `data.builder` and `tokenizer.builder`: whatever they raise becomes one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_diloco.errors import DataError


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
