"""A relay that dies has a successor; relays are stand-ins here, no Ray is started."""

import asyncio

import pytest
from mortal_shards import Ref
from ray.exceptions import ActorDiedError, RayError

from ray_diloco.blocks import channels_of, cuts_of
from ray_diloco.cluster import relay, whereabouts
from ray_diloco.cluster.relay import ATTEMPTS, Relays
from ray_diloco.cluster.whereabouts import Whereabouts
from ray_diloco.config.schema import Config
from ray_diloco.errors import ClusterError
from ray_diloco.outer.layout import layout_of
from ray_diloco.rounds.ports import SHARED, Emission, Movement, Offer, Piece, Step

LAYOUT = layout_of([("w", (4,))])
CHANNELS = channels_of(Config())


class Mortal(Relays):
    """Relays of which the first so many die over their first round."""

    def __init__(self, deaths, error=None):
        super().__init__(CHANNELS[0], 5.0, "site")
        self.left, self.started, self.error = deaths, 0, error or ActorDiedError()

    def _worker(self, region):
        if region not in self._workers:
            self.started += 1
            self._workers[region] = self
        return self

    @property
    def merge(self):
        return self

    def remote(self, *arguments):
        self.left -= 1
        return [Ref(error=self.error), Ref(error=self.error)] if self.left >= 0 else [Ref(7), Ref("merged")]


def merged(relays):
    offers = [
        (Offer(island, 0, 0, 1, 0, 1, 8, 1.0, Emission((Piece(0, 4, Ref()),), 1.0, True), region="eu"), 0.5)
        for island in ("a", "b")
    ]
    movement = Movement(SHARED, tuple(offers))
    step = Step("1.0:a,b", 0, 1, 0, (movement,))
    (cut,) = cuts_of(CHANNELS, LAYOUT)
    return asyncio.run(relays.merged(step, movement, 1, LAYOUT, cut))


@pytest.mark.parametrize("deaths", [0, 1, ATTEMPTS - 1])
def test_a_relay_that_dies_has_a_successor_that_merges_the_same(deaths):
    relays = Mortal(deaths)
    ((offer, factor),) = merged(relays).contributions
    assert (offer.island, factor, offer.emission.nbytes) == ("eu", 1.0, 7)
    assert relays.started == deaths + 1


@pytest.mark.parametrize(
    ("deaths", "error", "started"), [(ATTEMPTS, None, ATTEMPTS), (1, RayError("out of memory"), 1)]
)
def test_relays_that_die_again_and_again_and_those_that_fail_alive_end_the_run(deaths, error, started):
    relays = Mortal(deaths, error)
    with pytest.raises(ClusterError, match="RD-223: the relay of eu failed"):
        merged(relays)
    assert relays.started == started


def test_a_relay_starts_on_a_node_that_the_label_of_the_run_puts_into_the_region(monkeypatch):
    started = []

    class Actor:
        @staticmethod
        def options(**where):
            started.append(where)
            return Actor

        @staticmethod
        def remote(*_):
            return Actor()

    elsewhere = {"Alive": True, "Labels": {"ray.io/availability-region": "eu", "site": "us"}}
    monkeypatch.setattr(relay, "RelayActor", Actor)
    monkeypatch.setattr(whereabouts, "nodes", lambda: [elsewhere])
    Relays(CHANNELS[0], 5.0, Whereabouts("site"))._worker("eu")
    monkeypatch.setattr(whereabouts, "nodes", lambda: [elsewhere, {"Alive": True, "Labels": {"site": "eu"}}])
    Relays(CHANNELS[0], 5.0, Whereabouts("site"))._worker("eu")
    assert started == [{}, {"label_selector": {"site": "eu"}}]
