"""What an island makes of the failures of its ranks; ranks are stand-ins here, no Ray is started."""

import asyncio

import pytest

from ray_diloco.cluster import island
from ray_diloco.cluster.calls import ActorFailed
from ray_diloco.cluster.island import FleetSettings, RayIsland
from ray_diloco.cluster.storage import Storage
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.errors import InnerError, MeetingError, SyncError
from ray_diloco.rounds.ports import IslandLost


def adopt_with(error, monkeypatch):
    async def answers(calls, what, deadline_s, heard):
        raise error

    monkeypatch.setattr(island, "answers", answers)
    settings = FleetSettings("run", Storage("nowhere"), False, DeadlinesConfig(), lambda: None, None)
    asyncio.run(RayIsland("i1", 0, [], None, settings).join([]))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ActorFailed("the process died"), "the process died"),
        (
            SyncError(404, "a payload has another digest", "send it again"),
            "adopting the anchor on i1 failed: a payload",
        ),
        (MeetingError(740, "rank 1 of 2 did not come", "see the other"), "rank 1 of 2 did not come"),
    ],
)
def test_trouble_of_its_own_costs_the_island_not_the_run(error, reason, monkeypatch):
    with pytest.raises(IslandLost, match=reason):
        adopt_with(error, monkeypatch)


def test_what_the_user_must_mend_is_not_tried_again(monkeypatch):
    with pytest.raises(InnerError, match="RD-708"):
        adopt_with(InnerError(708, "the builder failed", "mend it"), monkeypatch)
