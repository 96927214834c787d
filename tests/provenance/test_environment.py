"""The environment report."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ray_diloco.provenance import canonical_json, environment, environment_report


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_names_the_versions_of_what_is_installed(tmp_path):
    report = environment_report(tmp_path)
    assert report["versions"]["numpy"] == np.__version__
    assert report["versions"]["python"] == platform.python_version()
    assert set(report["versions"]) == {"python", "ray_diloco", "torch", "ray", "deepspeed", "transformers", "numpy"}
    assert report["cpus"] == os.cpu_count()
    canonical_json(report)


def test_a_package_that_is_not_installed_has_no_version(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package-here",))
    assert environment_report(tmp_path)["versions"]["no-such-package-here"] is None


def test_imports_none_of_the_packages_it_names():
    code = (
        "import sys; from ray_diloco.provenance import environment_report as r; r();"
        "print([m for m in ('torch', 'ray', 'deepspeed', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_commit_and_whether_tracked_files_were_modified(repository):
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "code" / "untracked.py").write_text("")
    assert environment.git_state(repository / "code") == {"commit": commit, "modified": False}
    (repository / "code" / "a.py").write_text("x = 2\n")
    assert environment.git_state(repository / "code") == {"commit": commit, "modified": True}


def test_a_folder_that_the_repository_does_not_track_has_no_commit(repository):
    (repository / "venv").mkdir()
    (repository / "venv" / "b.py").write_text("")
    assert environment.git_state(repository / "venv") is None


def test_no_repository_is_no_error(tmp_path):
    assert environment.git_state(tmp_path) is None
    assert environment.git_state(tmp_path / "absent") is None


def test_no_git_is_no_error(monkeypatch, repository):
    monkeypatch.setenv("PATH", str(repository))
    assert environment.git_state(repository) is None


def test_a_git_that_does_not_answer_is_no_error(monkeypatch, repository):
    def slow(*arguments, **options):
        raise subprocess.TimeoutExpired("git", options["timeout"])

    monkeypatch.setattr(subprocess, "run", slow)
    assert environment.git_state(repository) is None
