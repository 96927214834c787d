"""Anchor shards in this process that die at a chosen call, spoken to as Ray actors are."""

import concurrent.futures
from dataclasses import dataclass

from ray.exceptions import ActorDiedError

from ray_diloco.cluster.anchor import RayAnchor
from ray_diloco.cluster.anchor_settings import AnchorSettings
from ray_diloco.cluster.shard import Shard

TWO_VALUES = ("prepare", "current", "published", "mean")


@dataclass(frozen=True)
class Death:
    """Shard number `shard` dies at its `nth` call of a method, before or after it has done it."""

    method: str
    nth: int = 1
    after: bool = False
    shard: int = 1
    silent: bool = False


class Ref:
    """What a call returned; like a reference of Ray's, it can be an argument of the next."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error
        self._found = concurrent.futures.Future()
        if error is not None:
            self._found.set_exception(error)
        elif value is not Silent:
            self._found.set_result(value)

    def future(self):
        return self._found

    def fail(self, error):
        if not self._found.done():
            self._found.set_exception(error)


class Silent:
    """The value of a call that is never answered."""


class Handle:
    """A shard that lives in this process; a successor is born without the deaths of the first."""

    def __init__(self, deaths=()):
        self.shard, self.deaths, self.calls = Shard(), list(deaths), []
        self.dead = self.silent = False
        self.unanswered = []

    def __getattr__(self, method):
        return Method(self, method)

    def gone(self):
        """What is returned from now on."""
        if not self.silent:
            return Ref(error=ActorDiedError())
        self.unanswered.append(Ref(Silent))
        return self.unanswered[-1]

    def end(self):
        self.silent = False
        while self.unanswered:
            self.unanswered.pop().fail(ActorDiedError())


class Method:
    def __init__(self, handle, name):
        self.handle, self.name = handle, name

    def remote(self, *arguments):
        returned = self._called(arguments)
        if self.name not in TWO_VALUES:
            return returned
        if returned.error is not None or returned.value is Silent:
            return [returned, returned]
        stats, payload = returned.value
        # A view of buffers that the shard writes again; Ray would have copied it.
        return [Ref(stats), Ref(payload.copy())]

    def _called(self, arguments):
        handle = self.handle
        handle.calls.append(self.name)
        nth = handle.calls.count(self.name)
        mine = [d for d in handle.deaths if (d.method, d.nth) == (self.name, nth)]
        if any(not d.after for d in mine):
            self._die(mine)
        if handle.dead:
            return handle.gone()
        # What is handed over in a list is there already.
        arguments = [one for a in arguments for one in (a if isinstance(a, list) else [a])]
        broken = next((a.error for a in arguments if isinstance(a, Ref) and a.error), None)
        if broken is not None:
            return Ref(error=broken)
        values = [a.value if isinstance(a, Ref) else a for a in arguments]
        try:
            done = Ref(getattr(handle.shard, self.name)(*values))
        except Exception as error:
            return Ref(error=error)
        if mine:
            self._die(mine)
            return handle.gone()
        return done

    def _die(self, deaths):
        self.handle.dead, self.handle.silent = True, any(d.silent for d in deaths)


class Tape:
    """A journal that keeps events."""

    def __init__(self):
        self.events = []

    def event(self, kind, **fields):
        self.events.append({"event": kind, **fields})

    def kinds(self):
        return [event["event"] for event in self.events]


class World:
    """An anchor whose shards die as they are told: `deaths` strike the first shards, `again[k]` the k-th successor."""

    def __init__(self, channels, deaths=(), again=(), shards=2, anchors=("",), losses=3):
        self.handles, self.ended, self.tape = [], [], Tape()
        first = shards if anchors == ("",) else len(anchors)

        def start(node_id):
            k = len(self.handles)
            mine = [d for d in deaths if d.shard == k] if k < first else again[k - first : k - first + 1]
            self.handles.append(Handle(mine))
            return self.handles[-1]

        def end(handle):
            self.ended.append(handle)
            handle.end()

        settings = AnchorSettings(channels, anchors, shards, 2, False, "", 5.0, alive_s=0.02, losses=losses)
        self.anchor = RayAnchor(settings, start, end)
        self.anchor.tell(self.tape)

    def committed(self):
        """All that the shards have committed, as bytes."""
        found = []
        for keeper in self.anchor._keepers:
            for key, kept in sorted(keeper.handle.shard._kept.items()):
                found.append((key, repr(kept.versions)))
                states = [kept.tensors(), *(kept.state_tensors(s) for s in kept.recipe.state_names)]
                found += [(name, array.tobytes()) for tensors in states for name, array in tensors.items()]
                found += [kept.payload(fragment).tobytes() for fragment in kept.versions]
        return found
