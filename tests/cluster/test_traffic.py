import psutil

from ray_diloco.cluster.traffic import Counted, Interface, Traffic
from ray_diloco.observe.narration import narrate


def heard(*said):
    traffic = Traffic()
    for counted in said:
        traffic.hear(counted and Counted(*counted))
    return traffic.sent, traffic.received, traffic.machines


def test_what_machines_counted_before_they_were_first_heard_is_not_of_the_run():
    assert heard(("a", 1000, 500), ("a", 1010, 530), ("b", 70, 7), None, ("a", 1200, 600), ("b", 75, 17)) == (
        205,
        110,
        2,
    )


def test_two_ranks_of_a_machine_count_once():
    assert heard(("a", 100, 0), ("a", 100, 0), ("a", 150, 0), ("a", 150, 0)) == (50, 0, 1)


def test_an_interface_that_is_made_anew_counts_from_nothing():
    assert heard(("a", 1000, 900), ("a", 1100, 950), ("a", 30, 20), ("a", 50, 21)) == (150, 71, 1)


def test_a_machine_that_speaks_to_itself_only_counts_nothing():
    assert Interface("127.0.0.1").counted() is None and heard(None) == (0, 0, 0)


def test_the_interface_is_the_one_that_has_the_address(monkeypatch):
    given = {"wan0": psutil.net_io_counters()._replace(bytes_sent=11, bytes_recv=22)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: given)
    for name in ("wan0", "wan0:1"):
        monkeypatch.setattr("ray_diloco.cluster.traffic.interface_towards", lambda _, name=name: name)
        interface = Interface("192.0.2.7")
        assert interface.counted() == Counted("192.0.2.7", 11, 22)
    given.clear()
    assert interface.counted() is None


def test_counting_never_harms_a_rank(monkeypatch):
    def refused(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr("ray_diloco.cluster.traffic.interface_towards", lambda _: "wan0")
    interface = Interface("192.0.2.7")
    monkeypatch.setattr(psutil, "net_io_counters", refused)
    assert interface.counted() is None
    monkeypatch.setattr("ray_diloco.cluster.traffic.interface_towards", refused)
    assert Interface("192.0.2.7").counted() is None


def test_what_was_counted_is_told_with_its_unit():
    said = narrate({"event": "network_counted", "bytes_sent": 50_130_000, "bytes_received": 1, "machines": 2})
    assert said == "the network of 2 machines carried 50.1 MB, with all that is no payload"
