"""The fence between drivers: every call to a rank carries its driver's epoch, and those of an older one are refused.

An epoch is a number that each driver of a run takes from the storage when it begins (`CheckpointStore.claim`), one more
than the last.  A driver that Ray took for dead and that lives on, cut off or stopped for a while, can so neither move
an island that its successor has taken over, nor commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_diloco.errors import ClusterError

# Number of the error that says so, for those who catch it.
SUPERSEDED = 224


def fenced(cls: type) -> type:
    """The class with methods that take their caller's `epoch`: the newest wins, what is older is refused.

    Its objects learn of calls that were let in by `admitted()`, if they have such a method.
    """

    def stamped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, epoch: int = 0, **named: Any) -> Any:
            newest = vars(self).get("_epoch", 0)
            if epoch < newest:
                raise superseded(epoch, newest)
            self._epoch = epoch
            if hasattr(self, "admitted"):
                self.admitted()
            return method(self, *arguments, **named)

        # How Ray runs a method stands in attributes of the function.
        call.__dict__.update(vars(method))
        call.__name__, call.__doc__ = method.__name__, method.__doc__
        return call

    public = {name: stamped(m) for name, m in vars(cls).items() if callable(m) and not name.startswith("_")}
    public.pop("admitted", None)
    return type(cls.__name__, (cls,), public | {"__module__": cls.__module__, "__doc__": cls.__doc__})


def superseded(epoch: int, newest: int) -> ClusterError:
    """RD-224: who calls is not the newest driver any more."""
    return ClusterError(
        224,
        f"a call of the driver of epoch {epoch} came after the driver of epoch {newest} had taken over",
        "this driver ends; its successor goes on",
    )


class Stamped:
    """An actor as one driver speaks to it; `handle` is Ray's."""

    def __init__(self, handle: Any, epoch: int) -> None:
        self.handle, self.epoch = handle, epoch

    def __getattr__(self, method: str) -> StampedMethod:
        return StampedMethod(getattr(self.handle, method), self.epoch)


class StampedMethod:
    """A method of such an actor, used as Ray's are."""

    def __init__(self, method: Any, epoch: int) -> None:
        self._method, self._epoch = method, epoch

    def options(self, **options: Any) -> StampedMethod:
        """The method with other options."""
        return StampedMethod(self._method.options(**options), self._epoch)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        """Calls it."""
        return self._method.remote(*arguments, epoch=self._epoch, **named)
