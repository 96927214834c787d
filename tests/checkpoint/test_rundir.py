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
from ray_diloco.checkpoint.rundir import RunDirectory, write_json_atomic
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


def refusal(directory, **options) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        directory.lock(**options)
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
    }
    for name, place in places.items():
        assert getattr(directory, name) == tmp_path / "a-1" / place
    assert directory.trace(12) == tmp_path / "a-1" / "trace" / "round-000012"


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


def test_the_lock_of_a_process_that_was_killed_is_taken_over_and_said_so(directory, holder):
    holder.kill()
    # Even while nobody has asked for its exit status.
    deadline = time.monotonic() + 30
    while rundir._started(holder.pid) is not None:
        assert time.monotonic() < deadline
    assert directory.lock().taken_from.pid == holder.pid


def test_a_released_lock_is_free(directory):
    lock = directory.lock()
    assert lock.taken_from is None
    lock.release()
    rewritten = directory.lock_file.read_text()
    assert rewritten == ""
    assert directory.lock().taken_from is None


def test_a_process_that_reuses_the_number_of_a_dead_one_is_not_its_holder(directory):
    directory.lock()
    rewrite(directory, pid=os.getppid(), started=1)
    assert directory.lock().taken_from.started == 1


def test_a_lock_from_before_a_reboot_is_taken_over(directory, holder):
    rewrite(directory, boot="another")
    assert directory.lock().taken_from.boot == "another"


def test_a_lock_of_another_host_stays_until_it_is_silent_for_as_long_as_was_said(directory):
    directory.lock()
    rewrite(directory, host="elsewhere")
    assert "elsewhere" in refusal(directory).what
    refusal(directory, stale_after_s=60)
    an_hour_ago = time.time() - 3600
    os.utime(directory.lock_file, (an_hour_ago, an_hour_ago))
    refusal(directory)
    assert directory.lock(stale_after_s=60).taken_from.host == "elsewhere"


def test_renewing_shows_life_and_tells_when_the_lock_was_lost(directory):
    lock = directory.lock()
    os.utime(directory.lock_file, (0, 0))
    assert lock.renew()
    assert directory.lock_file.stat().st_mtime > 0
    rewrite(directory, host="elsewhere")
    assert not lock.renew()


def test_a_lock_that_was_lost_is_not_released_for_its_new_holder(directory):
    lost = directory.lock()
    current = directory.lock()
    lost.release()
    assert current.renew()
    current.release()
    assert not current.renew()


def test_a_lock_that_was_torn_by_a_crash_is_free(directory):
    directory.lock()
    directory.lock_file.write_text('{"pid": 1, "ho')
    assert directory.lock().taken_from is None


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


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"rounds": 3, "loss": 1.5})
    assert json.loads(path.read_text()) == {"rounds": 3, "loss": 1.5}

    def broken(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(CheckpointError) as raised:
        write_json_atomic(path, {"rounds": 4})
    assert raised.value.number == 504
    assert json.loads(path.read_text())["rounds"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
