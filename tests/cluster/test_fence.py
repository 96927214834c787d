"""Calls of a driver that has been succeeded are refused; those of the newest one are let in."""

import inspect

import pytest
import ray

from ray_diloco.cluster.fence import Stamped, fenced
from ray_diloco.cluster.rank import Rank
from ray_diloco.errors import ClusterError


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
