import psutil

from ray_diloco.cluster.traffic import Counted, Interface, Traffic


def test_what_machines_counted_before_they_were_first_heard_is_not_of_the_run():
    traffic = Traffic()
    for sent, received in ((1000, 500), (1010, 530), (1200, 600)):
        traffic.heard("a", Counted(sent, received))
    traffic.heard("b", Counted(70, 7))
    traffic.heard("b", None)
    traffic.heard("b", Counted(75, 17))
    assert traffic.total == Counted(200 + 5, 100 + 10) and traffic.machines == 2


def test_two_ranks_of_a_machine_count_once():
    traffic = Traffic()
    for sent in (100, 100, 150, 150):
        traffic.heard("a", Counted(sent, 0))
    assert traffic.total == Counted(50, 0) and traffic.machines == 1


def test_a_machine_that_speaks_to_itself_only_counts_nothing():
    traffic = Traffic()
    traffic.heard("a", Interface("127.0.0.1").counted())
    assert traffic.machines == 0 and traffic.total == Counted(0, 0)


def test_the_interface_is_the_one_that_has_the_address(monkeypatch):
    loopback = psutil.net_if_addrs()["lo"]
    here = [entry._replace(address="192.0.2.7") for entry in loopback]
    monkeypatch.setattr("ray_diloco.inner.environment.socket.socket", Routed)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": loopback, "wan0": here})
    zero = psutil.net_io_counters()
    monkeypatch.setattr(
        psutil, "net_io_counters", lambda **_: {"wan0": zero._replace(bytes_sent=11, bytes_recv=22), "lo": zero}
    )
    assert Interface("192.0.2.7").counted() == Counted(11, 22)
    gone = Interface("192.0.2.7")
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: {"lo": zero})
    assert gone.counted() is None


class Routed:
    """A socket that is routed over 192.0.2.7."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, _):
        pass

    def getsockname(self):
        return ("192.0.2.7", 1)
