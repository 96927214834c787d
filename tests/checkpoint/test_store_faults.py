"""Crashes, damaged files and failing storages: the previous commit or the new one, never anything else."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import uuid

import fsspec
import numpy as np
import pytest
from commits import anchor, commit, number_of, write
from fsspec.implementations.memory import MemoryFileSystem
from storage_doubles import FailingFiles, PowerLost, SimulatedDisk, flip_byte

from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import CheckpointError


def whole(store: CheckpointStore) -> int:
    """Round of the newest commit, all of its bytes checked against the values it must have."""
    manifest = store.newest(full=True)
    for name, array in store.load(manifest):
        assert np.array_equal(array, anchor(manifest.round)[name])
    assert manifest.ledger == {"credited": [[0, manifest.round * 8]]}
    return manifest.round


def survivors(atomic_folders: bool, before, action):
    """Runs `action` on the disk that `before` prepared, cutting the power at each point; yields what may be found."""
    point = 0
    while True:
        disk = SimulatedDisk(atomic_folders)
        before(CheckpointStore("disk", disk))
        disk.points, disk.crash_at = 0, point
        finished = False
        try:
            action(CheckpointStore("disk", disk))
            finished = True
        except PowerLost:
            pass
        for found in disk.after_power_loss():
            yield CheckpointStore("disk", found), finished
        if finished:
            assert point > 3
            return
        point += 1


@pytest.mark.parametrize("atomic_folders", [True, False], ids=["disk", "remote"])
def test_power_cut_at_any_point_of_a_commit_leaves_the_old_or_the_new_one(atomic_folders):
    outcomes = set()
    for store, finished in survivors(atomic_folders, lambda s: commit(s, 1), lambda s: commit(s, 2)):
        newest = whole(store)
        assert newest in ((2,) if finished else (1, 2))
        outcomes.add((newest, finished))
        # The run goes on from there, whatever the crash left behind.
        store.discard_after(newest)
        commit(store, newest + 1)
        assert whole(store) == newest + 1
    assert outcomes >= {(1, False), (2, True)}


@pytest.mark.parametrize("atomic_folders", [True, False], ids=["disk", "remote"])
def test_power_cut_at_any_point_of_the_founding_commit_leaves_nothing_or_all(atomic_folders):
    for store, finished in survivors(atomic_folders, lambda s: None, lambda s: commit(s, 0)):
        found = store.survey()
        if finished or found.manifest is not None:
            assert whole(store) == 0
        else:
            store.discard_after(-1)
            commit(store, 0)
            assert whole(store) == 0


def test_power_cut_while_a_damaged_commit_is_replaced_leaves_the_good_one_before_it_or_the_new_one():
    def damaged(store):
        commit(store, 1)
        commit(store, 2)
        store._files.write("checkpoints/round-000002/outer-00000-of-00002.safetensors", [b"torn"])
        store._files.sync_folder("checkpoints/round-000002")

    for store, finished in survivors(True, damaged, lambda s: commit(s, 2)):
        assert whole(store) in ((2,) if finished else (1, 2))


@pytest.mark.parametrize("atomic_folders", [True, False], ids=["disk", "remote"])
def test_power_cut_while_old_commits_are_removed_never_touches_the_newest(atomic_folders):
    def before(store):
        for round in range(3):
            commit(store, round)
        write(store, 1) if atomic_folders else None

    for store, _ in survivors(atomic_folders, before, lambda s: s.prune(keep_last=1)):
        assert whole(store) == 2
        store.prune(keep_last=1)
        assert store.rounds() == [2]


@pytest.mark.parametrize("atomic_folders", [True, False], ids=["disk", "remote"])
def test_power_cut_while_newer_rounds_are_discarded_leaves_a_beginning_of_the_history(atomic_folders):
    def before(store):
        for round in (1, 2, 3):
            commit(store, round)

    for store, finished in survivors(atomic_folders, before, lambda s: s.discard_after(1)):
        newest = whole(store)
        assert newest in ((1,) if finished else (1, 2, 3))
        assert store.broken_link(store.newest()) is None


@pytest.mark.parametrize("torn", [False, True])
def test_an_operation_that_fails_at_any_point_of_a_commit_costs_that_commit_only(tmp_path, torn):
    steps = FailingFiles(tmp_path / "count")
    commit(CheckpointStore("count", steps), 1)
    assert len(steps.done) > 10

    for fail_at in range(len(steps.done)):
        root = tmp_path / f"{torn}-{fail_at}"
        commit(CheckpointStore(str(root)), 0)
        failing = FailingFiles(root, error=lambda: OSError(errno.ENOSPC, "full"), fail_at=fail_at, torn=torn)
        store = CheckpointStore(str(root), failing)
        assert number_of(commit, store, 1) == 504
        # The same process goes on: it abandons the round and commits the next one.
        assert whole(store) in (0, 1)
        assert not list(root.rglob("*.tmp"))
        store.abandon(1)
        commit(store, 2)
        assert whole(CheckpointStore(str(root))) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


DAMAGES = [
    ("manifest.json", truncate, 510),
    ("manifest.json", lambda path: path.write_text(path.read_text().replace('"step": 100', '"step": 101')), 512),
    ("manifest.json", lambda path: path.unlink(), 508),
    ("manifest.json", lambda path: path.write_bytes(b""), 508),
    ("anchor-00001-of-00002.safetensors", truncate, 514),
    ("anchor-00001-of-00002.safetensors", lambda path: path.write_bytes(b""), 514),
    ("anchor-00001-of-00002.safetensors", lambda path: path.unlink(), 513),
    ("outer-00000-of-00002.safetensors", lambda path: path.write_bytes(path.read_bytes() * 2), 514),
    ("inner-i0-r00001.safetensors", lambda path: path.unlink(), 513),
]


@pytest.mark.parametrize(("name", "damage", "number"), DAMAGES)
def test_a_damaged_commit_is_passed_over_and_said_so(tmp_path, name, damage, number):
    store = CheckpointStore(str(tmp_path))
    for round in range(3):
        commit(store, round)
    damage(tmp_path / "checkpoints" / "round-000002" / name)
    survey = store.survey()
    assert survey.manifest.round == 1
    assert [(s.round, s.number) for s in survey.skipped] == [(2, number)]
    assert survey.skipped[0].reason


@pytest.mark.parametrize("position", [0, 40, -1])
def test_a_flipped_byte_is_found_by_the_full_survey_and_before_the_first_tensor_is_handed_out(tmp_path, position):
    store = CheckpointStore(str(tmp_path))
    commit(store, 1)
    manifest = commit(store, 2)
    flip_byte(tmp_path / "checkpoints" / "round-000002" / "anchor-00000-of-00002.safetensors", position)
    assert store.newest().round == 2
    survey = store.survey(full=True)
    assert survey.manifest.round == 1
    assert [(s.round, s.number) for s in survey.skipped] == [(2, 515)]
    with pytest.raises(CheckpointError, match=r"anchor-00000-of-00002\.safetensors of round 2") as raised:
        next(store.load(manifest, ["head"]))
    # A damaged header may be found while it is read, before the digest is.
    assert raised.value.number in (515, 516, 517)
    assert [name for name, _ in store.load(manifest, kind="outer")]


def test_a_flipped_byte_on_a_remote_storage_is_found():
    filesystem = MemoryFileSystem()
    root = f"/{uuid.uuid4().hex}"
    store = CheckpointStore(f"memory:/{root}")
    manifest = commit(store, 1)
    path = f"{root}/checkpoints/round-000001/anchor-00000-of-00002.safetensors"
    content = bytearray(filesystem.cat_file(path))
    content[-1] ^= 1
    filesystem.pipe_file(path, bytes(content))
    assert number_of(lambda: list(store.load(manifest))) == 515
    assert number_of(store.verify, manifest) == 515


def test_commits_without_a_good_one_are_no_place_to_found_a_run(tmp_path):
    store = CheckpointStore(str(tmp_path))
    commit(store, 0)
    commit(store, 1)
    for round in range(2):
        truncate(tmp_path / "checkpoints" / f"round-00000{round}" / "outer-00000-of-00002.safetensors")
    assert number_of(store.newest) == 522
    assert number_of(store.commit, write(store, 2)) == 522


def test_the_manifest_of_another_round_is_passed_over(tmp_path):
    store = CheckpointStore(str(tmp_path))
    commit(store, 1)
    shutil.copytree(tmp_path / "checkpoints" / "round-000001", tmp_path / "checkpoints" / "round-000007")
    assert store.newest().round == 1
    assert [s.round for s in store.survey().skipped] == [7]


def test_strange_things_beside_the_commits_are_left_alone(tmp_path):
    store = CheckpointStore(str(tmp_path))
    commit(store, 0)
    for name in ("round-1", "round-000003.old", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "round-000009").write_text("a file")
    assert store.newest().round == 0
    commit(store, 1)
    store.prune(keep_last=1)
    assert (tmp_path / "checkpoints" / "round-000003.old").is_dir()
    assert store.rounds() == [1, 9]


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (PermissionError(errno.EACCES, "denied"), 503),
        (OSError(errno.EROFS, "read-only"), 503),
        (OSError(errno.ENOSPC, "full"), 504),
        (OSError(errno.EDQUOT, "quota"), 504),
        (FileNotFoundError(errno.ENOENT, "absent"), 505),
        (OSError(errno.EIO, "disk"), 506),
        (TimeoutError("slow"), 506),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 506),
    ],
)
def test_a_failing_storage_has_a_numbered_error(tmp_path, error, number):
    def raises():
        return error

    store = CheckpointStore(str(tmp_path), FailingFiles(tmp_path, error=raises, fail_at=0))
    with pytest.raises(CheckpointError) as raised:
        write(store, 0)
    assert raised.value.number == number
    assert "anchor-00000-of-00002.safetensors" in raised.value.what
    assert str(tmp_path) in raised.value.what


def test_a_parent_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    store = CheckpointStore(str(tmp_path / "file" / "storage"))
    with pytest.raises(CheckpointError, match="file") as raised:
        write(store, 0)
    assert raised.value.number == 505


@contextlib.contextmanager
def bound_by_permissions(folder):
    """The superuser is not: as such, the test goes on as nobody, to whom the folder is given."""
    if os.geteuid() != 0:
        yield
        return
    nobody = 65534
    os.chown(folder, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_without_permission_is_a_numbered_error():
    # pytest's own folders belong to whoever runs it, and nobody else may pass through them.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, bound_by_permissions(folder):
        os.chmod(folder, 0o500)
        assert number_of(write, CheckpointStore(folder), 0) == 503
        os.chmod(folder, 0o700)


# Linux alone has a device that is always full; elsewhere the doubles above stand for it.
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full_is_a_numbered_error(tmp_path, monkeypatch):
    real = open

    def full(path, mode, **options):
        return real("/dev/full", "wb", **options) if "x" in mode else real(path, mode, **options)

    monkeypatch.setattr("ray_diloco.checkpoint.files.open", full, raising=False)
    assert number_of(write, CheckpointStore(str(tmp_path)), 0) == 504


def test_an_unknown_protocol_and_a_missing_package_are_told_apart(monkeypatch):
    assert number_of(CheckpointStore, "nosuchthing://bucket/run") == 501
    known = {"class": "no_such_package_here.Files", "err": "Install no_such_package_here"}
    monkeypatch.setitem(sys.modules["fsspec.registry"].known_implementations, "needsmore", known)
    with pytest.raises(CheckpointError, match="no_such_package_here") as raised:
        CheckpointStore("needsmore://bucket/run")
    assert raised.value.number == 502


class ClientError(Exception):
    """As clients of object stores have them: no OSError."""


class Unreachable(MemoryFileSystem):
    """A remote storage that answers the first requests only."""

    protocol = "unreachable"
    cachable = False
    down = False

    def info(self, path, **options):
        if self.down:
            raise ClientError("503 slow down")
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        if self.down:
            raise ClientError("503 slow down")
        return super().ls(path, detail, **options)


def test_a_storage_that_does_not_answer_is_no_reason_to_take_an_older_commit(monkeypatch):
    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    store = CheckpointStore(f"unreachable://{uuid.uuid4().hex}")
    commit(store, 0)
    commit(store, 1)
    assert store.newest().round == 1
    monkeypatch.setattr(Unreachable, "down", True)
    with pytest.raises(CheckpointError, match="503 slow down") as raised:
        store.newest()
    assert raised.value.number == 506


def test_no_bucket_is_a_numbered_error_and_is_not_created(monkeypatch):
    def no_bucket(self, path, mode="rb", **options):
        raise FileNotFoundError("The specified bucket does not exist")

    monkeypatch.setattr(MemoryFileSystem, "_open", no_bucket)
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(CheckpointError, match="bucket") as raised:
        write(store, 0)
    assert raised.value.number == 505


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from commits import commit, number_of
from ray_diloco.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1])
for round in range(10_000):
    commit(store, round)
    store.prune(keep_last=2)
    print(round, flush=True)
"""


@pytest.mark.parametrize("commits", [1, 4, 9])
def test_kill_9_of_a_writer_leaves_a_whole_commit(tmp_path, commits):
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), here, root], stdout=subprocess.PIPE, text=True
    )
    printed = [process.stdout.readline() for _ in range(commits)]
    process.kill()
    rest = process.communicate(timeout=30)[0].split()
    last = int([*printed, *rest][-1])
    store = CheckpointStore(str(tmp_path))
    assert whole(store) in (last, last + 1)
    newest = store.newest().round
    commit(store, newest + 1)
    store.prune(keep_last=1)
    assert store.rounds() == [newest + 1]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"round-{newest + 1:06d}"]
