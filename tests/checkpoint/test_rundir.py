"""The run directory and its lock."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from ray_diloco.checkpoint import rundir
from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.errors import CheckpointError

HOLD = """
import sys
from ray_diloco.checkpoint.rundir import RunDirectory
RunDirectory(sys.argv[1], sys.argv[2]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path, "demo")


@pytest.fixture
def holder(directory):
    """Another process that holds the lock."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory.root), directory.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout.readline().strip() == "locked"
    yield process
    process.kill()
    process.communicate(timeout=30)


def rewrite(directory, **fields):
    content = json.loads(directory.lock_file.read_text())
    directory.lock_file.write_text(json.dumps({**content, **fields}))


def holder_of(lock) -> int:
    return json.loads(lock.directory.lock_file.read_text())["pid"]


def refusal(directory) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        directory.lock()
    assert raised.value.number == 530
    return raised.value


def test_every_file_of_a_run_has_its_place(tmp_path):
    directory = RunDirectory(str(tmp_path), "a-1")
    places = {
        "config": "config.yaml",
        "events": "events.jsonl",
        "metrics": "metrics.jsonl",
        "checkpoints": "checkpoints",
        "summary": "summary.json",
        "report": "report.html",
        "export": "export",
        "trace": "trace",
    }
    for name, place in places.items():
        assert getattr(directory, name) == tmp_path / "a-1" / place


def test_a_relative_root_means_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory("runs", "a")
    monkeypatch.chdir("/")
    assert directory.path == tmp_path / "runs" / "a"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "a b", "a\n", "-a", "x" * 129])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError) as raised:
        RunDirectory(tmp_path, name)
    assert raised.value.number == 531


def test_a_root_that_is_a_file_is_a_numbered_error(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError) as raised:
        RunDirectory(tmp_path / "runs", "a").make()
    assert raised.value.number == 505


def test_a_living_process_keeps_others_out_and_is_named(directory, holder):
    error = refusal(directory)
    assert f"process {holder.pid}" in error.what
    assert str(directory.path) in error.what


def test_the_lock_of_a_process_that_was_killed_is_taken_over(directory, holder):
    holder.kill()
    # Even while nobody has asked for its exit status.
    deadline = time.monotonic() + 30
    while rundir._started(holder.pid) is not None:
        assert time.monotonic() < deadline
    assert holder_of(directory.lock()) == os.getpid()


def test_a_released_lock_is_free(directory):
    directory.lock().release()
    assert directory.lock_file.read_text() == ""
    assert holder_of(directory.lock()) == os.getpid()


def test_a_process_that_reuses_the_number_of_a_dead_one_is_not_its_holder(directory):
    directory.lock()
    rewrite(directory, pid=os.getppid(), started=1)
    assert holder_of(directory.lock()) == os.getpid()


def test_a_lock_from_before_a_reboot_is_taken_over(directory, holder):
    rewrite(directory, boot="another")
    assert holder_of(directory.lock()) == os.getpid()


def test_a_lock_of_another_host_stays_and_the_way_out_is_named(directory):
    directory.lock()
    rewrite(directory, host="elsewhere")
    error = refusal(directory)
    assert "elsewhere" in error.what
    assert str(directory.lock_file) in error.mend


def test_a_lock_that_was_lost_is_not_released_for_its_new_holder(directory):
    lost = directory.lock()
    current = directory.lock()
    lost.release()
    assert holder_of(current) == os.getpid()
    current.release()
    assert directory.lock_file.read_text() == ""


def test_a_lock_that_was_torn_by_a_crash_is_free(directory):
    directory.lock()
    directory.lock_file.write_text('{"pid": 1, "ho')
    assert holder_of(directory.lock()) == os.getpid()


def test_of_many_that_find_a_dead_lock_one_takes_it_over(directory, monkeypatch):
    directory.lock()
    rewrite(directory, pid=2**22 + 1)
    barrier, outcomes, local = threading.Barrier(6), [], threading.local()
    # Threads stand for processes: each has a process id of its own, and all but the first holder live.
    monkeypatch.setattr(rundir.os, "getpid", lambda: local.pid)
    monkeypatch.setattr(rundir, "_started", lambda pid: 7 if pid < 2**22 else None)

    def race(pid):
        local.pid = pid
        barrier.wait(30)
        try:
            outcomes.append(directory.lock().holder.pid)
        except CheckpointError as error:
            outcomes.append(error.number)

    threads = [threading.Thread(target=race, args=(1000 + number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes)[:5] == [530] * 5
    assert sorted(outcomes)[5] == json.loads(directory.lock_file.read_text())["pid"]


def test_a_process_that_never_stops_deciding_is_no_reason_to_wait_for_ever(directory, monkeypatch):
    directory.make()
    monkeypatch.setattr(rundir, "_GUARD_S", 0.05)
    with open(directory.lock_file, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refusal(directory)
    directory.lock()
