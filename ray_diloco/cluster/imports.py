"""A user's own modules in the processes of a run: what can be imported where it was started, can be in its ranks.

Ray gives its workers the folders of the script that called `ray.init`; a run may be started from elsewhere, or later.
On other machines the folders have to exist: by `ray job submit --working-dir`, a shared disk or an installed package.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable


def own_folders() -> tuple[str, ...]:
    """The import folders of this process that do not belong to its Python installation, absolute, in order."""
    installed = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))
    folders = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return tuple(f for f in folders if os.path.isdir(f) and not any(_within(f, root) for root in installed))


def add_folders(folders: Iterable[str]) -> None:
    """Makes folders importable here, behind what is importable already; those that are not on this machine are not."""
    known = {os.path.abspath(entry) for entry in sys.path}
    sys.path.extend(f for f in folders if os.path.abspath(f) not in known and os.path.isdir(f))


def _within(folder: str, root: str) -> bool:
    return os.path.commonpath((folder, os.path.abspath(root))) == os.path.abspath(root)
