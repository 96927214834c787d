"""The lines of a round: one for each island that contributed to it, also if it did not live to see the commit."""

import asyncio
import json

import pytest

from ray_diloco.checkpoint.rundir import RunDirectory
from ray_diloco.cluster.books import open_books
from ray_diloco.cluster.journal import JournalSettings, RunJournal
from ray_diloco.config.compose import compose
from ray_diloco.outer.schedule import Due
from ray_diloco.rounds.ports import SHARED, Emission, Offer, Piece, Prepared, Update
from ray_diloco.rounds.timing import Timing

CONFIG = compose(["run.name=journal", "run.rounds=5"]).config


def offer(island, incarnation=0):
    return Offer(island, incarnation, 0, 1, 0, 4, 40, 2.5, Emission((Piece(0, 100, None),), 1.5, True), 3.0)


def lines_after(tmp_path, tell):
    """The lines of islands that a journal has written when `tell(journal)` is over."""
    directory = RunDirectory(tmp_path, "journal")
    directory.make()

    async def once():
        with open_books(CONFIG, directory, None, []) as books:
            tell(RunJournal(books, None, JournalSettings(None, {}, 1.0)))

    asyncio.run(once())
    found = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [line for line in found if line["kind"] == "island"]


def commit(journal, *offers):
    prepared = Prepared("key", {SHARED: Update(0, 1, (Piece(0, 7, None),))}, 1.0, 1.0)
    journal.committed(Due(0, 1), prepared, 0.1, [(o, 1 / len(offers)) for o in offers])


def lose(journal, island, incarnation=0):
    journal.event("island_lost", island=island, incarnation=incarnation, reason="gone")


@pytest.mark.parametrize("first", ["commit", "loss"])
def test_an_island_that_dies_before_it_adopts_has_its_line_all_the_same(tmp_path, first):
    def tell(journal):
        for what in ("commit", "loss") if first == "commit" else ("loss", "commit"):
            commit(journal, offer("i0"), offer("i1")) if what == "commit" else lose(journal, "i1")
        journal.island_round(Due(0, 1), "i0", Timing(4, 40, 2.0))

    by_island = {line["island"]: line for line in lines_after(tmp_path, tell)}
    assert sorted(by_island) == ["i0", "i1"]
    expected = {"round": 1, "steps": 4, "tokens": 40, "loss": 2.5, "pseudo_gradient_norm": 1.5, "bytes_up": 100}
    assert (expected | {"train_s": 3.0, "wait_s": 0.0, "adopt_s": 0.0}).items() <= by_island["i1"].items()


def test_an_island_that_dies_later_has_one_line(tmp_path):
    def tell(journal):
        commit(journal, offer("i0"))
        journal.island_round(Due(0, 1), "i0", Timing(4, 40, 2.0))
        lose(journal, "i0")

    assert [line["loss"] for line in lines_after(tmp_path, tell)] == [2.0]


def test_the_loss_of_an_earlier_incarnation_says_nothing_of_the_present_one(tmp_path):
    def tell(journal):
        lose(journal, "i0", incarnation=0)
        commit(journal, offer("i0", incarnation=1))

    assert lines_after(tmp_path, tell) == []
