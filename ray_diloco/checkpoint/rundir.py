"""The folder of a run: where its files lie, and that one driver at a time writes them.

The lock is a file that names its holder (process, host, start time), so that a second driver can say who is in its
way and take over from one that is dead.  A file lock of the system only guards the moment in which that is decided:
it may be missing on network file systems, and it names nobody.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ray_diloco.checkpoint.files import storage_errors
from ray_diloco.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Longest wait for another process that is deciding about a lock, which takes it microseconds.
_GUARD_S = 2.0


@dataclass(frozen=True)
class RunDirectory:
    """The folder `<root>/<name>` of a run.

    Args:
      root: folder of all runs.
      name: name of the run: letters, digits, `.`, `_` and `-`.

    Raises:
      CheckpointError: 531, a name that cannot be a folder's.
    """

    root: Path
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise CheckpointError(
                531,
                f"run.name={self.name!r} cannot be the name of a folder",
                "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )
        # The processes of a run have different working folders.
        object.__setattr__(self, "root", Path(self.root).expanduser().absolute())

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.root / self.name

    @property
    def config(self) -> Path:
        """The resolved configuration (YAML)."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The tape: one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """Metrics: one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the commits, when `run.storage` is this run's own folder."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """What a script reads after the run (JSON)."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """What a person looks at (HTML)."""
        return self.path / "report.html"

    @property
    def export(self) -> Path:
        """The Hugging Face folder."""
        return self.path / "export"

    @property
    def lock_file(self) -> Path:
        """Names the driver that writes here."""
        return self.path / ".lock"

    @property
    def address(self) -> Path:
        """Says where the Ray of a run under way answers."""
        return self.path / ".address"

    @property
    def trace(self) -> Path:
        """Folder of the traced rounds."""
        return self.path / "trace"

    def make(self) -> None:
        """Creates the folder and its parents.  Raises CheckpointError 503 to 506."""
        with storage_errors("create the run directory", str(self.path)):
            self.path.mkdir(parents=True, exist_ok=True)

    def lock(self) -> RunLock:
        """Makes this process the only one that writes here, until it releases the lock or dies.

        A lock whose process on this host is dead is taken over; one of another host never is, because a run may be
        alive there.  A process that holds the lock may take it again; its earlier `RunLock` is void then.

        Raises:
          CheckpointError: 530, another process holds it; 503 to 506, it cannot be written.
        """
        self.make()
        mine = _myself()
        with _decision(self) as descriptor:
            holder = _holder(descriptor)
            if holder is not None and not holder.same_process(mine) and _is_alive(holder):
                raise CheckpointError(
                    530,
                    f"{self.path} is being written by process {holder.pid} on {holder.host} "
                    f"(since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(holder.since))})",
                    f"stop that run, choose another run.name, or remove {self.lock_file} if that host is gone",
                )
            _replace_content(descriptor, json.dumps(asdict(mine)))
        return RunLock(self, mine)


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes a run directory.

    Attributes:
      pid: its process id.
      host: its host.
      boot: that host's boot, "" where unknown; process ids begin anew with each.
      started: start of the process in the clock ticks of that boot, 0 where unknown; tells a reused process id.
      since: when it took the lock, seconds since 1970.
    """

    pid: int
    host: str
    boot: str
    started: int
    since: float

    def same_process(self, other: Holder) -> bool:
        """Whether two locks were taken by one process."""
        return (self.pid, self.host, self.boot, self.started) == (other.pid, other.host, other.boot, other.started)


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds.

    Attributes:
      directory: what it locks.
      holder: this process.
    """

    directory: RunDirectory
    holder: Holder

    def release(self) -> None:
        """Gives the lock back; nothing happens if another process has taken it over."""
        with _decision(self.directory) as descriptor:
            if _holder(descriptor) == self.holder:
                _replace_content(descriptor, "")


@contextmanager
def _decision(directory: RunDirectory) -> Iterator[int]:
    """The opened lock file, while nobody else looks at it."""
    with storage_errors("lock the run directory", str(directory.path)):
        descriptor = os.open(directory.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _guarded(descriptor):
                raise CheckpointError(
                    530,
                    f"another process has been deciding about {directory.lock_file} for {_GUARD_S} s",
                    "see which process has that file open (lsof), and stop it",
                )
            yield descriptor
        finally:
            os.close(descriptor)


def _guarded(descriptor: int) -> bool:
    deadline = time.monotonic() + _GUARD_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            threading.Event().wait(0.01)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # A file system without locks: two drivers that start in the same millisecond are not told apart.
            return True


def _holder(descriptor: int) -> Holder | None:
    try:
        return Holder(**json.loads(os.pread(descriptor, 1 << 16, 0)))
    except (ValueError, TypeError):
        # Empty: released.  Anything else: whoever was writing it died over it.
        return None


def _replace_content(descriptor: int, content: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content.encode(), 0)
    os.fsync(descriptor)


def _myself() -> Holder:
    return Holder(os.getpid(), socket.gethostname(), _boot(), _started(os.getpid()) or 0, time.time())


def _is_alive(holder: Holder) -> bool:
    """False where it is certain that the holder is dead."""
    if holder.host != socket.gethostname():
        return True
    return holder.boot == _boot() and _started(holder.pid) == holder.started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Start of a process in clock ticks (0 where the system does not tell); None if it is dead."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        return 0 if psutil.pid_exists(pid) else None
    return None if state in ("Z", "X") else int(fields[18])
