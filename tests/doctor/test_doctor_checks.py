"""The checks, on machines that are made up."""

import dataclasses

import pytest

from ray_diloco.config.compose import compose
from ray_diloco.doctor.facts import Addresses, Facts, Tcp
from ray_diloco.doctor.machine import (
    Needs,
    check_compilers,
    check_disk,
    check_gpus,
    check_memory,
    check_shm,
    needs_of,
)
from ray_diloco.doctor.network import (
    Measured,
    Reach,
    check_addresses,
    check_clocks,
    check_link,
    check_reach,
    window_limit_mbit,
)
from ray_diloco.doctor.record import Check, exit_code, passed, show_checks
from ray_diloco.doctor.versions import PACKAGES, Matrix, check_same_versions, check_versions, matrix
from ray_diloco.planning.memory import Memory

GB = 10**9
TESTED = Matrix(dict.fromkeys(PACKAGES, "2.0.1"), dict.fromkeys(PACKAGES, "1.9"))
HERE = Facts(
    "us",
    "us",
    "3.11.7",
    dict.fromkeys((*PACKAGES, "ray_diloco"), "2.0.1"),
    {"gcc": "/usr/bin/gcc"},
    4,
    8 * GB,
    {"/runs": 100 * GB, "/cache": GB},
    4 * GB,
    None,
    Addresses("10.1.0.1", "10.1.0.1", "10.1.0.1", interface="wg0"),
)
NEEDS = Needs(2 * GB, GB, {"/runs": 3 * GB, "/cache": 0})


def with_packages(**versions):
    return dataclasses.replace(HERE, packages={**HERE.packages, **versions})


def at(**addresses):
    return dataclasses.replace(HERE, addresses=dataclasses.replace(HERE.addresses, **addresses))


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("2.0.1", "pass", "as tested"),
        ("2.0.1+cu128", "pass", "as tested"),
        ("2.1.0", "warn", "torch 2.1.0 is not the tested 2.0.1"),
        ("1.8.9", "fail", "torch 1.8.9 is older than 1.9"),
        (None, "fail", "torch is not installed"),
    ],
)
def test_a_version_is_as_tested_or_another_or_too_old(version, status, words):
    (check,) = check_versions(with_packages(torch=version), TESTED)
    assert (check.status, words in check.said) == (status, True)
    assert status == "pass" or check.mend == 'pip install "torch==2.0.1"'


def test_the_matrix_of_this_installation_knows_what_was_tested():
    known = matrix()
    assert known.tested["ray"].startswith("2.") and "torch" in known.oldest


def test_nodes_have_to_have_the_ray_of_the_one_who_asks():
    (check,) = check_same_versions([with_packages(ray="2.0.0")], HERE)
    assert check.status == "fail" and "ray 2.0.0 there and 2.0.1 here" in check.said
    assert '"ray==2.0.1"' in check.mend
    assert check_same_versions([HERE], HERE)[0].status == "pass"


def test_patch_releases_of_python_may_differ_and_others_not():
    assert check_same_versions([dataclasses.replace(HERE, python="3.11.9")], HERE)[0].status == "pass"
    assert check_same_versions([dataclasses.replace(HERE, python="3.12.1")], HERE)[0].status == "fail"


def test_room_is_compared_with_what_a_run_needs():
    assert check_memory(HERE, NEEDS).status == "pass"
    assert check_memory(HERE, dataclasses.replace(NEEDS, memory=9 * GB)).status == "fail"
    assert check_shm(HERE, NEEDS).status == "pass"
    small = check_shm(dataclasses.replace(HERE, shm_free=64_000_000), NEEDS)
    assert small.status == "warn" and "remount,size=1145M" in small.mend
    assert check_shm(dataclasses.replace(HERE, shm_free=None), NEEDS).status == "warn"


def test_every_folder_that_is_written_has_a_line():
    assert [check.status for check in check_disk(HERE, NEEDS)] == ["pass", "pass"]
    full = dataclasses.replace(HERE, disk_free={"/runs": GB, "/cache": None})
    assert [check.status for check in check_disk(full, NEEDS)] == ["fail", "fail"]


def test_a_compiler_is_needed_only_where_something_asks_for_one():
    assert check_compilers(HERE, NEEDS).status == "pass"
    asks = dataclasses.replace(NEEDS, compiler="model.compile=true")
    assert check_compilers(HERE, asks).status == "fail"
    assert check_compilers(dataclasses.replace(HERE, compilers={"g++": "/usr/bin/g++"}), asks).status == "pass"


def test_accelerators_are_needed_only_where_ranks_ask_for_some():
    asks = dataclasses.replace(NEEDS, gpus=1.0)
    assert check_gpus(HERE, NEEDS).status == "pass"
    assert check_gpus(dataclasses.replace(HERE, gpus=()), asks).status == "fail"
    assert check_gpus(dataclasses.replace(HERE, gpus=("H100", "H100")), asks).status == "pass"


def test_commits_hold_anchor_and_state_and_those_of_each_island():
    config = compose(["islands.count=2"]).config
    needs = needs_of(config, 1_000_000, Memory(10, 20, 30, 40), 3, "/runs", "/cache")
    # fp32 of three vectors for the anchor and each island, and one commit more than are kept.
    assert needs.disk == {"/runs": 3 * 4_000_000 * 3 * 3, "/cache": 0}
    assert needs.memory == 3 * (10 + 20) + 30


def test_addresses_that_agree_are_well():
    (check,) = check_addresses(HERE)
    assert check.status == "pass" and "OS 10.1.0.1, Ray 10.1.0.1, gloo 10.1.0.1" in check.said


@pytest.mark.parametrize(
    ("addresses", "status", "mend"),
    [
        ({"ray": "127.0.0.1"}, "fail", "ray start --node-ip-address 10.1.0.1"),
        ({"ray": "192.168.0.5"}, "warn", "ray start --node-ip-address"),
        ({"route": "", "ray": ""}, "fail", "ip route"),
        ({"gloo_interface": "wg9"}, "fail", "export GLOO_SOCKET_IFNAME=wg0"),
        ({"gloo_interface": "eth0", "gloo": "172.17.0.2"}, "warn", "unset GLOO_SOCKET_IFNAME"),
    ],
)
def test_addresses_that_differ_are_named_with_what_to_set(addresses, status, mend):
    (check,) = check_addresses(at(**addresses))
    assert check.status == status and mend in check.mend


def test_one_machine_alone_needs_no_address():
    assert check_addresses(at(route="", ray="127.0.0.1"), alone=True)[0].status == "pass"


def test_a_port_that_is_closed_one_way_is_one_line():
    well, ill = Reach("us", "eu", "10.2.0.1", 4000), Reach("eu", "us", "10.1.0.1", 4000, "Connection refused")
    assert check_reach([well])[0].status == "pass"
    (check,) = check_reach([well, ill])
    assert (check.status, check.where) == ("fail", "eu to us")
    assert "nc -vz 10.1.0.1 4000" in check.mend


def test_clocks_may_differ_by_less_than_a_second():
    assert check_clocks([("us", 0.2), ("eu", -0.4)])[0].status == "pass"
    ahead, behind = check_clocks([("us", 2.0), ("eu", -90.0)])
    assert (ahead.status, behind.status) == ("warn", "fail") and "90.0 s behind" in behind.said


def test_a_connection_carries_a_window_each_time_there_and_back():
    # Half of 6 MB over 90 ms.
    tcp = Tcp(receive_bytes=6_000_000, send_bytes=4_000_000)
    assert window_limit_mbit(tcp, 0.09) == pytest.approx(3_000_000 * 8 / 0.09 / 1e6)
    assert window_limit_mbit(Tcp(), 0.09) == float("inf")


def test_a_link_that_one_stream_fills_is_well():
    assert check_link(Measured("us", "eu", 0.09, 900.0, 950.0, 4), Tcp(6_000_000, 4_000_000)).status == "pass"


def test_a_stream_that_the_window_holds_back_is_told_the_buffers_it_needs():
    check = check_link(Measured("us", "eu", 0.09, 250.0, 950.0, 4), Tcp(6_000_000, 4_000_000))
    assert check.status == "warn" and "266.7 Mbit/s at this distance" in check.said
    # Twice 950 Mbit/s x 90 ms.
    assert 'net.ipv4.tcp_rmem="4096 131072 21375000"' in check.mend


def test_a_stream_that_something_else_holds_back_is_not_told_of_buffers():
    check = check_link(Measured("us", "eu", 0.09, 40.0, 160.0, 4), Tcp(60_000_000, 60_000_000))
    assert check.status == "warn" and "tcp_rmem" not in check.mend
    assert check.mend.endswith("tcp_congestion_control=bbr")
    check = check_link(Measured("us", "eu", 0.09, 40.0, 160.0, 4), Tcp(60_000_000, 60_000_000, "bbr"))
    assert check.mend == "several connections fill it"


def test_lines_say_where_what_and_how_to_mend_it():
    checks = [passed("disk", "us", "100 GB free"), Check("ports", "us to eu", "fail", "closed", "open them")]
    lines = show_checks(checks).splitlines()
    assert lines[0] == "ok   disk   us: 100 GB free"
    assert lines[1:3] == ["FAIL ports  us to eu: closed", "            mend: open them"]
    assert lines[-1] == "1 passed, 0 warned, 1 failed"
    assert (exit_code(checks), exit_code(checks[:1])) == (3, 0)
