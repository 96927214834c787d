"""Calls of a driver that has been succeeded are refused; those of the newest one are let in."""

import inspect
from unittest.mock import MagicMock as Mock

import pytest
import ray

from ray_diloco.cluster.fence import Stamped, fenced
from ray_diloco.cluster.job import RankJob
from ray_diloco.cluster.misfortune import NO_FAULTS
from ray_diloco.cluster.rank import Rank
from ray_diloco.errors import ClusterError
from ray_diloco.inner import batches


class Counter:
    """Adds up."""

    def __init__(self, start):
        self.total, self.heard = start, 0

    def admitted(self):
        self.heard += 1

    def add(self, amount, *, twice=False):
        """Adds."""
        self.total += amount * (1 + twice)
        return self.total

    @ray.method(num_returns=2, concurrency_group="control")
    def both(self):
        return self.total, self._half()

    def _half(self):
        return self.total / 2


class Handle:
    """A handle of Ray's that calls at once."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(method), "options": lambda self, **_: self})()


def test_the_newest_epoch_is_let_in_and_older_ones_are_refused():
    counter = fenced(Counter)(10)
    old, new = Stamped(Handle(counter), 1), Stamped(Handle(counter), 2)
    assert old.add.remote(1) == 11
    assert new.add.remote(1, twice=True) == 13
    with pytest.raises(ClusterError, match="RD-224: a call of the driver of epoch 1 came after the driver of epoch 2"):
        old.add.remote(1)
    assert new.both.options(num_returns=2).remote() == (13, 6.5)
    assert (counter.total, counter.heard) == (13, 3), "a refused call does nothing and is not heard"


def test_two_objects_have_a_fence_each():
    cls = fenced(Counter)
    first, second = cls(0), cls(0)
    first.add(1, epoch=7)
    assert second.add(1, epoch=1) == 1


def test_a_fenced_class_is_to_ray_what_the_class_was():
    cls = fenced(Counter)
    assert (cls.__name__, cls.__doc__) == ("Counter", "Adds up.")
    assert vars(cls.both) == vars(Counter.both) != {}
    assert cls.add.__doc__ == "Adds."
    assert all(
        parameter.kind != parameter.POSITIONAL_ONLY for parameter in inspect.signature(cls.add).parameters.values()
    )


def test_every_call_to_a_rank_is_fenced():
    cls = fenced(Rank)
    public = {name for name, member in vars(Rank).items() if callable(member) and not name.startswith("_")}
    assert public - {"admitted"} <= vars(cls).keys()


def test_a_segment_ends_when_another_driver_is_heard(monkeypatch):
    """A round may take an hour, and the next driver goes on from a commit or a progress point, whatever comes of it."""
    rank, heard, done = fenced(Rank)(RankJob(*[Mock()] * 7, faults=NO_FAULTS), 0), {3: 7}, []
    monkeypatch.setattr(batches, "Batches", Mock())
    rank._exchanges, rank._blocks, rank._points = Mock(), Mock(), Mock()
    rank._points.end.return_value = ""

    class Inner:
        settings = Mock(world=1, sequence_length=1)

        def train(self, start, steps, batches, on_step, seconds, earlier):
            for step in range(start, start + steps):
                done.append(step)
                if step in heard:
                    rank.progress(epoch=heard[step])
                if on_step(step, 0.0):
                    break
            return Mock(steps=len(done), skipped=0, tokens=0, loss_mean=0.0, seconds=0.0)

    rank._inner = Inner()
    rank._job.channels[0].H = 10
    assert rank.train(0, 10, (), epoch=6).report.steps == 4 and done == [0, 1, 2, 3]
    assert rank.train(0, 3, (), epoch=7).report.steps == 7, "its own heartbeats end nothing"
    # Nor is anything encoded for the driver before: an error memory would take it for sent.
    heard[3] = 8
    with pytest.raises(ClusterError, match="epoch 7 came after the driver of epoch 8"):
        rank.train(0, 10, (), emits=[(0, 4)], epoch=7)
    assert not rank._exchanges.begin.called
