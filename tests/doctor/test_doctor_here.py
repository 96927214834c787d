"""The doctor on this machine, on real sockets, folders and data."""

import json
import socket

import pytest

from ray_diloco.cli import main
from ray_diloco.config.compose import compose
from ray_diloco.doctor import local, places
from ray_diloco.doctor.facts import gather
from ray_diloco.doctor.sockets import Listener, rate_mbit, round_trip_s, try_to_reach


def test_a_listener_answers_and_is_measured():
    with Listener("127.0.0.1") as listener:
        assert try_to_reach("a", "b", "127.0.0.1", listener.port).error == ""
        assert 0 < round_trip_s("127.0.0.1", listener.port) < 5
        assert rate_mbit("127.0.0.1", listener.port, 2, 0.05) > 0


def test_a_closed_port_is_said_to_be_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert try_to_reach("a", "b", "127.0.0.1", port).error == "Connection refused"


def test_facts_are_those_of_this_machine(tmp_path):
    facts = gather("here", ["numpy", "no-such-package"], [str(tmp_path / "not" / "yet")])
    assert facts.packages["numpy"] and facts.packages["no-such-package"] is None
    assert facts.cpus > 0 and facts.memory_free > 0 and facts.disk_free[str(tmp_path / "not" / "yet")] > 0


def test_storage_is_written_read_and_left_as_it_was(tmp_path):
    check = places.check_storage(str(tmp_path))
    assert check.status == "pass" and list(tmp_path.iterdir()) == []
    assert places.check_storage("/proc/no/such").status == "fail"
    unknown = places.check_storage("nosuch://bucket")
    assert unknown.status == "fail" and unknown.mend


def test_commits_go_where_a_run_would_write_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local.storage_of(compose(["run.root=~/runs"]).config) == f"{tmp_path}/runs"
    assert local.storage_of(compose(["run.root=~/runs", "run.storage=~/kept"]).config) == f"{tmp_path}/kept"
    assert local.storage_of(compose(["run.storage=s3://bucket/runs"]).config) == "s3://bucket/runs"


def test_the_first_document_of_each_data_is_tokenised(tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    both = ["islands.names=[eu,us]", f"islands.eu.data={tmp_path / 'a.txt'}", "islands.us.data=stdlib"]
    checks = places.check_data(compose(["islands.count=2", *both]).config)
    assert [(check.where, check.status) for check in checks] == [("eu", "pass"), ("us", "pass")]
    assert "13 characters are 13 tokens of 258" in checks[0].said


def test_data_that_is_not_there_fails_with_what_mends_it(tmp_path):
    (check,) = places.check_data(compose(["data=text", f"data.path={tmp_path}/none.txt"]).config)
    assert check.status == "fail" and check.mend


@pytest.fixture
def small(monkeypatch):
    """The model is looked at elsewhere."""
    monkeypatch.setattr(local, "needs_here", lambda config: (None, []))


def test_the_command_says_all_of_it_and_leaves_with_0(small, tmp_path, capsys):
    arguments = ["doctor", "outer.momentum=0.5", f"run.root={tmp_path}/runs", f"data.cache={tmp_path}/cache"]
    assert main([*arguments, "--json"]) == 0
    names = {check["name"] for check in json.loads(capsys.readouterr().out)}
    assert {"versions", "processors", "addresses", "ports", "storage", "data"} <= names


def test_the_command_leaves_with_3_where_something_fails(small, tmp_path, capsys):
    assert main(["doctor", "outer.momentum=0.5", "run.root=/proc/runs", f"data.cache={tmp_path}"]) == 3
    assert "FAIL storage" in capsys.readouterr().out


def test_a_model_that_cannot_be_built_is_a_line(tmp_path):
    config = compose(["model.architecture=nosuch", f"data.cache={tmp_path}"]).config
    needs, (check,) = local.needs_here(config)
    assert needs is None and check.status == "fail" and check.mend


def test_a_cluster_that_nobody_named_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert main(["doctor", "--cluster", "outer.momentum=0.5"]) == 4
    assert capsys.readouterr().err.startswith("RD-240")
