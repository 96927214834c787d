"""A user's own function by import path: `package.module:function`, for `model.`, `data.` and `tokenizer.builder`.

Whatever goes wrong in a user's module becomes an error that names the key, the path and the cause, because from the
outside it looks like a mistake of this package.
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Callable
from typing import Any

from ray_diloco.errors import ConfigError

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def check_import_path(key: str, path: str) -> None:
    """Looks at the form of what a key holds, and imports nothing.

    Raises:
      ConfigError: 113, it is no import path.
    """
    if not _IMPORT_PATH.fullmatch(path):
        raise ConfigError(113, f"{key}={path!r} is not the import path of a function", "write package.module:function")


def import_function(path: str, key: str) -> Callable[..., Any]:
    """Imports the function that a key names.

    Raises:
      ConfigError: 113, the path has another form; 122, its module does not import, or there is no such function in it.
    """
    check_import_path(key, path)
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            122,
            f"{key}={path}: importing {module_name} failed: {type(error).__name__}: {error}",
            "mend the module, or put its folder on PYTHONPATH, on every node",
        ) from error
    try:
        function: Any = operator.attrgetter(name)(module)
    except AttributeError:
        function = None
    if not callable(function):
        public = ", ".join(n for n, value in vars(module).items() if not n.startswith("_") and callable(value))
        raise ConfigError(
            122,
            f"{key}={path}: {module_name} has no function {name!r}; it has: {public or 'none'}",
            f"correct the name after the colon, or define {name} in {module_name}",
        )
    return function  # type: ignore[no-any-return]
