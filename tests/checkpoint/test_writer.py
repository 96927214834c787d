"""The background writer."""

import threading

from ray_diloco.checkpoint.writer import BackgroundWriter

PATIENCE_S = 30


def test_a_write_runs_in_another_thread_and_its_value_is_collected_once():
    writer = BackgroundWriter()
    assert writer.start("round 3", threading.get_ident)
    assert writer.wait(PATIENCE_S)
    (result,) = writer.collect()
    assert result.label == "round 3"
    assert result.value != threading.get_ident()
    assert result.error is None
    assert result.seconds >= 0
    assert writer.collect() == []


def test_a_second_write_is_refused_until_the_first_has_ended():
    writer, go_on, calls = BackgroundWriter(), threading.Event(), []
    assert writer.start("first", lambda: go_on.wait(PATIENCE_S))
    assert writer.busy
    assert not writer.start("second", lambda: calls.append("second"))
    assert not writer.wait(0)
    assert writer.collect() == []
    go_on.set()
    assert writer.wait(PATIENCE_S)
    assert not writer.busy
    assert writer.start("third", lambda: calls.append("third"))
    assert writer.wait(PATIENCE_S)
    assert calls == ["third"]
    assert [result.label for result in writer.collect()] == ["first", "third"]


def test_a_failed_write_is_a_value_and_the_next_one_runs():
    writer, error = BackgroundWriter(), OSError("full")

    def fails():
        raise error

    for write in (fails, lambda: "written"):
        assert writer.start("x", write)
        assert writer.wait(PATIENCE_S)
    failed, written = writer.collect()
    assert failed.error is error
    assert failed.value is None
    assert written.value == "written"


def test_a_write_that_tries_to_leave_the_process_does_not_block_the_writer():
    writer = BackgroundWriter()

    def leaves():
        raise SystemExit(3)

    assert writer.start("x", leaves)
    assert writer.wait(PATIENCE_S)
    assert isinstance(writer.collect()[0].error, SystemExit)


def test_of_many_threads_that_start_a_write_one_wins():
    writer, go_on, barrier = BackgroundWriter(), threading.Event(), threading.Barrier(8)
    started = []

    def race():
        barrier.wait(PATIENCE_S)
        started.append(writer.start("x", lambda: go_on.wait(PATIENCE_S)))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    go_on.set()
    assert sorted(started) == [False] * 7 + [True]
    assert writer.wait(PATIENCE_S)
    assert len(writer.collect()) == 1
