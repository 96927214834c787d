"""What an island's ranks are asked before answers have come back; ranks are stand-ins here, no Ray is started."""

import asyncio
import concurrent.futures

import pytest
from ray.exceptions import ActorDiedError

from ray_diloco.cluster.ahead import WITHIN_A_CALL, Ahead, brought, handed_over
from ray_diloco.cluster.island import FleetSettings, RayIsland
from ray_diloco.cluster.said import EmitStats, Trained
from ray_diloco.cluster.storage import Storage
from ray_diloco.config.schema import DeadlinesConfig
from ray_diloco.rounds.ports import IslandLost, Lease, Piece, Report, Update, Work

WORK = Work(1, 0, 5, Lease(0, "", ()), emits=((0, 3, 1),))
UPDATE = Update(0, 4, (Piece(0, 8, "the anchor"),))


class Answer:
    """Stands for a reference to what a call returns."""

    def __init__(self):
        self._future = concurrent.futures.Future()

    def future(self):
        return self._future


class Rank:
    """Writes down what it is asked; answers are given by the test."""

    def __init__(self):
        self.asked, self.answers = [], {}

    def __getattr__(self, method):
        return Method(self, method)

    def gives(self, method, value):
        (self.answers[method].set_exception if isinstance(value, Exception) else self.answers[method].set_result)(value)


class Method:
    def __init__(self, rank, name):
        self.rank, self.name = rank, name

    def options(self, **options):
        return self

    def remote(self, *arguments, **named):
        self.rank.asked.append(self.name)
        answer = Answer()
        self.rank.answers[self.name] = answer.future()
        return [answer, "payload"] if self.name == "emit" or self.emits(arguments) else answer

    def emits(self, arguments):
        return self.name == "train" and arguments[-1]


def sail(scenario):
    async def run():
        rank = Rank()
        settings = FleetSettings("run", Storage("nowhere"), False, DeadlinesConfig(), lambda: None, None)
        island = RayIsland("eu", 0, [rank], None, settings)
        island._shards = 1
        await scenario(island, rank)

    asyncio.run(run())


async def begun(coroutine):
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task


TRAINED = Trained(Report(5, 40, 2.0, 1.5, send_s=0.5), (EmitStats((8,), 9.0, True),))


def test_an_emission_is_part_of_the_training_before_it():
    async def scenario(island, rank):
        training = await begun(island.train(WORK))
        rank.gives("train", TRAINED)
        report = await training
        assert (report.seconds, report.send_s) == (1.5, 0.5)
        emission = await island.emit(0, 3, 1)
        assert (rank.asked, emission.norm, emission.nbytes) == (["train"], 3.0, 8)
        assert emission.pieces[0].handle == "payload"
        # Of another base, it is another emission.
        again = await begun(island.emit(0, 4, 2))
        assert rank.asked == ["train", "emit"]
        again.cancel()

    sail(scenario)


def test_training_is_asked_for_before_the_adoption_has_come_back():
    async def scenario(island, rank):
        await island.adopt((UPDATE,), {0: True})
        training = await begun(island.train(WORK))
        assert rank.asked == ["adopt", "train"]
        rank.gives("train", TRAINED)
        rank.gives("adopt", None)
        assert (await training).adopt_s >= 0.0
        assert await island.settled() == 0.0

    sail(scenario)


def test_all_islands_of_a_round_are_told_to_adopt_before_the_books_of_the_first_are_kept():
    said = []

    async def adopts(rank, settings):
        await RayIsland("eu", 0, [rank], None, settings).adopt((UPDATE,), {0: True})
        said.append([r.asked for r in ranks])

    ranks = [Rank(), Rank()]

    async def scenario(island, rank):
        await asyncio.gather(*(adopts(r, island._settings) for r in ranks))

    sail(scenario)
    assert said[0] == [["adopt"], ["adopt"]]


def test_an_adoption_that_fails_fails_what_comes_after_it():
    async def scenario(island, rank):
        await island.adopt((UPDATE,), {0: True})
        training = await begun(island.train(WORK))
        rank.gives("adopt", ActorDiedError())
        with pytest.raises(IslandLost, match="adopting the anchor on eu failed") as lost:
            await training
        assert lost.value.how == "died"

    sail(scenario)


def test_an_anchor_is_sent_once_to_each_other_machine():
    ranks = [Rank() for _ in range(4)]
    Ahead().fetch(ranks, ["here", "there", "there", "far"], "payload", "here")
    assert [rank.asked for rank in ranks] == [[], ["fetch"], [], ["fetch"]]


def test_a_call_waits_for_no_payload_but_small_ones_travel_within_it():
    small, large = Piece(0, WITHIN_A_CALL, "a"), Piece(1, WITHIN_A_CALL + 1, "b")
    assert handed_over([]) == [] and handed_over([small, small]) == ["a", "a"]
    assert handed_over([large]) == [["b"]] and handed_over([small, large]) == [["a", "b"]]


def test_what_is_not_handed_over_is_there_already():
    assert brought(("x", "y")) == ("x", "y") and brought(()) == ()
