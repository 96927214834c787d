import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_configuration_error_has_one_line_on_the_page_and_every_line_an_error() -> None:
    raised = set()
    for file in (ROOT / "ray_diloco").rglob("*.py"):
        raised |= set(re.findall(r"ConfigError\(\s*(1\d\d),", file.read_text(encoding="utf-8")))
    listed = re.findall(r"^\| RD-(1\d\d) \|", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(raised) == listed
