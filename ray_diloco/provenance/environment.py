"""What a run ran on: versions, machine and source commit, for manifests and `summary.json`.

Read from package metadata and the operating system, so that the report costs milliseconds and imports none of the
packages it names.  It holds no user names, remotes or environment variables: run directories are shared.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("ray_diloco", "torch", "ray", "deepspeed", "transformers", "numpy")
GIT_TIMEOUT_S = 5.0


def environment_report(source: Path | None = None) -> dict[str, Any]:
    """Describes this process as plain JSON.

    Args:
      source: folder whose git commit is wanted; default: this package's own.

    Returns:
      `versions` (package → version, None where not installed; and python), `platform`, `hostname`, `cpus`
      (processors of the machine), `cpus_usable` (those this process may use) and `git` (`commit`, `modified`; None
      outside a working tree).
    """
    versions: dict[str, str | None] = {name: _version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpus": os.cpu_count(),
        "cpus_usable": _usable_cpus(),
        "git": git_state(source or Path(__file__).resolve().parents[1]),
    }


def processor_name() -> str:
    """Name of the processor, as Linux or Python knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        # Not a Linux.
        return platform.processor() or platform.machine()
    return platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the working tree that keeps `folder`, and whether its tracked files differ from that commit.

    None where git is missing, too slow, or `folder` is not a tracked part of a tree (a package that was installed
    below somebody's repository is not described by that repository's commit).
    """
    if not _git(folder, "ls-files", "."):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    if not commit or changes is None:
        return None
    return {"commit": commit, "modified": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks a report never disturbs a git command that the user runs at the same time.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            env=environment,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _usable_cpus() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
