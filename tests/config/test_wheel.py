"""What a user of the wheel gets: the package, and below it the group files of conf/."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel and nothing else; built from a copy, so that the tree stays clean."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("ray_diloco", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "README.md").write_text("what the metadata asks for\n")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=source)
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_holds_every_module_and_every_group_file(installed: Path) -> None:
    def files(folder: Path, pattern: str) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob(pattern)}

    assert files(installed / "ray_diloco", "*.py") == files(ROOT / "ray_diloco", "*.py")
    assert files(installed / "ray_diloco/conf", "*.yaml") == files(ROOT / "conf", "*.yaml")
    assert sorted(path.name.split("-")[0] for path in installed.iterdir()) == ["ray_diloco", "ray_diloco"]


def test_the_installed_command_reads_its_own_group_files(installed: Path, tmp_path: Path) -> None:
    printed = run(
        "-m", "ray_diloco.cli", "train", "experiment=demo", "--print-config", cwd=tmp_path, PYTHONPATH=str(installed)
    )
    assert "name: demo" in printed
    where = run(
        "-c",
        "from ray_diloco.config.groups import packaged_conf; print(packaged_conf())",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert where.strip() == str(installed / "ray_diloco" / "conf")
