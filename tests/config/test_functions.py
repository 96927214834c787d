import sys
from types import ModuleType

import pytest

from ray_diloco.config.functions import import_function
from ray_diloco.errors import ConfigError


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module."""
    module = ModuleType("users_parts")
    module.build = lambda config: []  # type: ignore[attr-defined]
    module.Factory = type("Factory", (), {"make": staticmethod(lambda config: [])})  # type: ignore[attr-defined]
    module.number = 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_parts", module)
    return module


def test_a_function_is_found_by_its_path(users: ModuleType) -> None:
    assert import_function("users_parts:build", "data.builder") is users.build
    assert import_function("users_parts:Factory.make", "data.builder") is users.Factory.make


@pytest.mark.parametrize(
    ("path", "number", "text"),
    [
        ("users_parts", 113, "is not the import path of a function"),
        (":build", 113, "is not the import path of a function"),
        ("not_installed_here:build", 122, "ModuleNotFoundError: No module named 'not_installed_here'"),
        ("users_parts:bulid", 122, "has no function 'bulid'; it has: build, Factory"),
        ("users_parts:number", 122, "has no function 'number'"),
        ("users_parts:Factory.mak", 122, "has no function 'Factory.mak'"),
    ],
)
def test_what_cannot_be_imported_is_an_error_with_key_path_and_cause(
    users: ModuleType, path: str, number: int, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        import_function(path, "data.builder")
    assert caught.value.number == number
    assert "data.builder=" in caught.value.what
    assert text in caught.value.what
