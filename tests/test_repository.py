"""The shell of the repository: what lies at its top, what its commands are, and what no file of it may hold."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
TOP = {
    ".ci",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "cluster.yaml",
    "conf",
    "constraints.txt",
    "docs",
    "jobs",
    "pyproject.toml",
    "ray_diloco",
    "setup.py",
    "tests",
}
# Written so that no pattern matches this file.
SECRETS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY[-]",
    "an AWS key": r"\bAKI[A][0-9A-Z]{16}\b",
    "a Hugging Face token": r"\bh[f]_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}",
    "a Weights & Biases key": r"(?i)wand[b]_api_key\s*[=:]\s*['\"]?[0-9a-f]{20,}",
    "a password in an address": r"[a-z][a-z0-9+]*://[^/\s:@'\"]+:[^/\s:@'\"]+[@]",
}
INDEXES = {
    "the host of a package index": r"(?i)//[^/\s]*(?:py[p]i|pythonho[s]ted|npm[j]s|download\.py[t]orch|anacon[d]a)",
    "an option that chooses a package index": r"(?i)index[-_]url|find[-_]links",
}
PLACES = {"a folder of one machine": r"(?<![\w.])/(?:roo[t]|wor[k]|home/[a-z]+|tmp/[w])/"}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["dev"]]


def test_the_top_of_the_repository_holds_what_it_should_and_nothing_else() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} == TOP


@pytest.mark.parametrize("what, pattern", [*SECRETS.items(), *INDEXES.items(), *PLACES.items()])
def test_no_file_holds(what: str, pattern: str) -> None:
    texts = {path: path.read_bytes().decode("utf-8", errors="replace") for path in tracked_files()}
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if re.search(pattern, text)] == [], what


@pytest.mark.parametrize(
    "what, text",
    [
        ("a private key", "-----BEGIN RSA PRIVATE " + "KEY-----"),
        ("an AWS key", "AKI" + "A" + "B" * 16),
        ("a Hugging Face token", "hf" + "_" + "a" * 34),
        ("a password in an address", "s3://me:secret" + "@bucket"),
    ],
)
def test_the_scan_for_secrets_finds(what: str, text: str) -> None:
    assert re.search(SECRETS[what], text)


def test_every_python_file_is_short_enough_to_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in tracked_files() if path.suffix == ".py"}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 400} == {}


def test_every_dependency_is_pinned_to_a_version_that_pyproject_allows() -> None:
    versions = pinned()
    for requirement in requirements():
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_the_pins_name_public_versions_only() -> None:
    assert {name: str(version) for name, version in pinned().items() if version.local} == {}


def test_every_dependency_is_imported_by_the_package() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "ray_diloco").rglob("*.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in {Requirement(text).name for text in project["dependencies"]} - {"pyyaml"} | {"yaml"}:
        imported = rf"^\s*(import|from) {name}\b|import_module\(.{name}.\)"
        assert re.search(imported, source, flags=re.MULTILINE), name


def test_every_make_command_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)|^\s*make ([a-z]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    commands = {first or second for first, second in named}
    assert {"train", "test"} <= commands <= targets


def test_the_readme_gives_a_reason_for_every_dependency() -> None:
    first_cells = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    named = {canonicalize_name(name) for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert {canonicalize_name(r.name) for r in requirements()} - named == set()


def test_links_between_pages_lead_somewhere() -> None:
    pages = [path for path in tracked_files() if path.suffix == ".md"]
    for page in pages:
        for target in re.findall(r"\]\((?![a-z]+://|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
