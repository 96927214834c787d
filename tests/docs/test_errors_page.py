"""`docs/errors.md` against the code: every number that can be raised has one line there, one family and one meaning."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ray_diloco import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
FAMILIES = {
    "ConfigError": 1,
    "ClusterError": 2,
    "InfeasibleError": 2,
    "DataError": 3,
    "SyncError": 4,
    "CheckpointError": 5,
    "CommittedError": 5,
    "SecurityError": 6,
    "InnerError": 7,
    "MeetingError": 7,
}


class Raised(NamedTuple):
    """A number in the code: who is called with it, and in which part of the package."""

    number: int
    call: str
    part: str
    where: str


def raised() -> list[Raised]:
    return [found for path in sorted((ROOT / "ray_diloco").rglob("*.py")) for found in _raised_in(path)]


def _raised_in(path: Path) -> Iterator[Raised]:
    """Numbers that stand first in a call of an error or of a private helper, or are named by a constant of storage."""
    relative = path.relative_to(ROOT / "ray_diloco")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        where = f"{relative}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            number, name = _number(node.args[0]), node.func.id
            if number and (name.endswith("Error") or name.startswith("_")):
                yield Raised(number, name, relative.parts[0], where)
        elif isinstance(node, ast.Assign) and node in tree.body and relative.parts[0] == "checkpoint":
            number = _number(node.value)
            if number:
                yield Raised(number, "CheckpointError", relative.parts[0], where)


def _number(node: ast.expr) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and 100 <= value < 800 else None


def listed() -> list[int]:
    return [int(number) for number in re.findall(r"^\| RD-(\d{3}) \|", PAGE, re.MULTILINE)]


def test_every_number_in_the_code_has_one_line_on_the_page_and_every_line_a_number() -> None:
    assert sorted({found.number for found in raised()}) == listed()


def test_the_numbers_of_a_family_are_raised_by_its_errors_only() -> None:
    known = [found for found in raised() if found.call in FAMILIES]
    assert len(known) > 150, "the scan finds what is raised"
    assert [found for found in known if found.number // 100 != FAMILIES[found.call]] == []
    assert {name for name in vars(errors) if name.endswith("Error")} == {*FAMILIES, "DilocoError"}


def test_no_number_has_two_meanings_in_two_parts_of_the_package() -> None:
    parts = Counter(number for number, _ in {(found.number, found.part) for found in raised()})
    shared = [found for found in raised() if parts[found.number] > 1]
    assert shared == []


def test_the_page_says_with_which_code_each_number_leaves() -> None:
    said: dict[int, dict[int, int]] = {}
    for family, codes in re.findall(r"^\| (?:\[)?(\d)xx.*\| ([^|]+) \|$", PAGE, re.MULTILINE):
        default, *exceptions = codes.split("; ")
        said[int(family)] = {0: int(default)}
        for exception in exceptions:
            numbers, code = exception.split(": ")
            said[int(family)] |= {int(number): int(code) for number in re.split(", | and ", numbers)}
    for found in raised():
        if found.call in FAMILIES:
            family = said[found.number // 100]
            code = family.get(found.number, family[0])
            assert getattr(errors, found.call).exit_code == code, found


def test_numbers_that_a_docstring_or_a_page_names_exist() -> None:
    exist = set(listed())
    for path in [*(ROOT / "ray_diloco").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        named = {int(number) for number in re.findall(r"RD-(\d{3})\b", path.read_text(encoding="utf-8"))}
        assert named - exist == set(), path
