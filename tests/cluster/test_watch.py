"""How the loss of a rank is found, on virtual time: what it is called, and how long that takes at most."""

import asyncio
import concurrent.futures

import pytest
from ray.exceptions import ActorDiedError

from ray_diloco.cluster.said import Progress
from ray_diloco.cluster.watch import BEAT_S, DIAGNOSIS_S, Watch
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.rounds.ports import IslandLost
from ray_diloco.simulate.clock import run_virtual

HEARTBEAT_S, SILENCE_S, EXCHANGE_S = 3.0, 20.0, 50.0
DEADLINES = DeadlinesConfig(heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S, exchange_s=EXCHANGE_S)


class Rank:
    """Answers heartbeats until it is told otherwise."""

    def __init__(self):
        self.state, self.beats, self.progress = "trains", 0, self

    @property
    def stacks(self):
        # The same mailbox, asked another question.
        return Asked(self)

    def remote(self):
        returned = concurrent.futures.Future()
        if self.state == "died":
            returned.set_exception(ActorDiedError())
        elif self.state != "frozen":
            self.beats += self.state == "trains"
            returned.set_result(Progress(self.beats, self.beats, 9, 1.0, 1.0, sending=self.state == "sends"))
        return type("Ref", (), {"future": lambda self: returned})()


class Asked:
    """What a rank says when it is asked where it stands: nothing, if it does not answer."""

    def __init__(self, rank):
        self.rank = rank

    def remote(self):
        returned = concurrent.futures.Future()
        if self.rank.state not in ("died", "frozen"):
            returned.set_result(f"it {self.rank.state}")
        return type("Ref", (), {"future": lambda self: returned})()


def watched(scenario):
    """Runs `scenario(watch, ranks, work)`; what its calls ended with, and when."""

    async def run():
        ranks = [Rank(), Rank()]
        watch = Watch("eu", ranks, DEADLINES)
        work = asyncio.get_running_loop().create_future()
        acts = asyncio.create_task(scenario(watch, ranks, work))
        try:
            with watch.stepping() as watch.ended:
                return await watch.guarded(work), asyncio.get_running_loop().time()
        except IslandLost as lost:
            return lost, asyncio.get_running_loop().time()
        finally:
            await acts
            watch.end()

    return run_virtual(run())


def becomes(state, at, rank=1):
    async def scenario(watch, ranks, work):
        await asyncio.sleep(at)
        ranks[rank].state = state

    return scenario


@pytest.mark.parametrize(
    ("state", "within_s", "text"),
    [
        ("died", BEAT_S, "rank 1 of eu died"),
        ("frozen", BEAT_S + HEARTBEAT_S, "rank 1 of eu is frozen: its process lives and was silent for"),
        ("idles", SILENCE_S + 2 * BEAT_S, "rank 1 of eu made no step for"),
        ("sends", EXCHANGE_S + 2 * BEAT_S, "rank 1 of eu has been encoding what it sends for"),
    ],
)
def test_what_a_rank_becomes_is_found_within_its_bound(state, within_s, text):
    lost, at = watched(becomes(state, 10.2))
    assert lost.how == {"idles": "stalled", "sends": "stalled"}.get(state, state) and text in str(lost)
    assert 10.2 < at <= 10.2 + within_s + 1e-9
    assert lost.silent_s == pytest.approx(at - 10.0, abs=BEAT_S), "from the last sign of life, or the last step"


def test_of_an_island_that_stalls_those_that_answer_say_where_they_stand():
    lost, _ = watched(becomes("idles", 10.2))
    assert lost.stacks == ("rank 0 of eu\nit trains", "rank 1 of eu\nit idles")
    assert watched(becomes("frozen", 10.2))[0].stacks == ()


def test_ranks_that_beat_are_left_alone_however_long_a_call_takes():
    async def scenario(watch, ranks, work):
        await asyncio.sleep(10_000)
        work.set_result(["done"])

    assert watched(scenario) == (["done"], 10_000)


def test_who_has_ended_may_wait_for_ranks_that_still_send():
    async def scenario(watch, ranks, work):
        watch.ended(0)
        ranks[0].state, ranks[1].state = "idles", "sends"
        await asyncio.sleep(EXCHANGE_S - BEAT_S)
        work.set_result(["sent"])

    assert watched(scenario) == (["sent"], EXCHANGE_S - BEAT_S)


def test_what_each_rank_says_is_passed_on():
    said = []

    async def scenario(watch, ranks, work):
        watch.listener = lambda progress: said.append(progress.beats)
        await asyncio.sleep(3 * SILENCE_S)
        work.set_result([])

    watched(scenario)
    assert said.count(1) == said.count(2) == 2


def test_a_rank_may_idle_while_no_step_is_expected_of_it():
    async def run():
        ranks = [Rank()]
        ranks[0].state = "idles"
        watch = Watch("eu", ranks, DEADLINES)
        await asyncio.sleep(100)
        assert not watch.lost.done()
        ranks[0].state = "died"
        await asyncio.sleep(BEAT_S)
        # Its death is known before anything is asked of it.
        assert watch.lost.done()
        watch.end()

    run_virtual(run())


def test_when_a_rank_dies_and_its_peer_complains_first_the_dead_one_is_named():
    async def scenario(watch, ranks, work):
        await asyncio.sleep(5.1)
        ranks[1].state = "died"
        work.set_exception(IslandLost("rank 0 says: connection closed by peer"))

    lost, at = watched(scenario)
    assert (lost.how, at) == ("died", 5.1) and "rank 1 of eu died" in str(lost)


def test_a_call_that_fails_of_itself_keeps_its_reason():
    async def scenario(watch, ranks, work):
        await asyncio.sleep(5.1)
        ranks[0].state = "frozen"
        work.set_exception(IslandLost("out of memory"))

    lost, at = watched(scenario)
    assert (lost.how, str(lost)) == ("failed", "out of memory")
    assert at == 5.1 + DIAGNOSIS_S
