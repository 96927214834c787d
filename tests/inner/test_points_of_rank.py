"""Progress points of a rank in its engine: what goes on from one ends with the bits of what was never interrupted."""

from concurrent.futures import ThreadPoolExecutor

import little_ranks
import numpy as np
import pytest
import torch
from torch import nn

from ray_diloco.blocks import channels_of, cuts_of
from ray_diloco.checkpoint.points import Mark
from ray_diloco.cluster.exchanges import Exchanges
from ray_diloco.cluster.points import Keeping, RankPoints, recover
from ray_diloco.cluster.storage import Storage
from ray_diloco.config.compose import compose
from ray_diloco.inner.rank import InnerRank
from ray_diloco.outer.payload import Meta

STEPS, EVERY = 7, 3


@pytest.fixture(autouse=True)
def as_before():
    linear, threads = nn.functional.linear, torch.get_num_threads()
    yield
    nn.functional.linear = linear
    torch.set_num_threads(threads)


class Little:
    """A rank on the little model that stands at an anchor; `keeping` names its segment."""

    def __init__(self, folder, *settings, stage=0, precision="fp32", epoch=1, start=10):
        config = compose([*settings, "inner.H=7"]).config
        self.inner = InnerRank(little_ranks.settings(stage, precision, 0, 1))
        self.exchanges = Exchanges(self.inner, channels_of(config))
        self.exchanges.connect(cuts_of(channels_of(config), self.inner.layout))
        self.writer = ThreadPoolExecutor(1)
        self.points = RankPoints(self.inner, self.exchanges, self.writer)
        mark = Mark(epoch, 1, start, STEPS, ((0, 28),), ((0, 1, 0, 0),))
        self.keeping = Keeping(Storage(str(folder)), mark, EVERY)

    def stand_at(self, rank):
        anchor = rank.exchanges.main.read(rank.inner.emits, Meta("anchor", {0: 1}, "", 0)).copy()
        self.exchanges.join([0], [anchor])
        return self

    def train(self, until=STEPS, taken=0):
        start = self.keeping.mark.start_step
        earlier = self.points.begin(taken)

        def on_step(step, loss):
            self.points.passed(self.keeping, step - start + 1, STEPS, loss)
            self.points.written()
            return step - start + 1 == until

        batches = lambda k: little_ranks.tokens(start + k).reshape(2, 2, little_ranks.SEQUENCE)  # noqa: E731
        return self.inner.train(start, STEPS, batches, on_step, earlier=earlier)

    @property
    def theta(self):
        return torch.cat([s.values.clone() for s in self.inner.slices])

    async def ask(self, method, *arguments):
        name = {"look_for_points": "look", "read_point": "read", "take_up_point": "take_up"}[method]
        return [getattr(self.points, name)(*arguments)]

    def recover(self, beyond=0, anchored=True):
        import asyncio

        return asyncio.run(recover(self.ask, self.keeping, beyond, anchored))


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (1, "bf16")])
def test_a_segment_that_is_gone_on_with_ends_as_one_that_was_not_interrupted(tmp_path, stage, precision):
    feedback = ("codec.up.kind=int4", "codec.up.feedback=true")
    engine = {"stage": stage, "precision": precision}
    whole = Little(tmp_path, *feedback, **engine)
    whole.stand_at(whole)
    start = Little(tmp_path, **engine)
    expected = whole.train()
    lost = Little(tmp_path / "b", *feedback, **engine).stand_at(start)
    lost.train(until=5)
    lost.writer.shutdown()
    new = Little(tmp_path / "b", *feedback, **engine).stand_at(start)
    assert new.recover().steps == 3
    report = new.train(taken=3)
    assert torch.equal(new.theta, whole.theta)
    assert torch.equal(new.exchanges.main.base, whole.exchanges.main.base)
    assert (report.steps, report.tokens, report.loss_mean) == (expected.steps, expected.tokens, expected.loss_mean)
    assert report.seconds > 0 and report.skipped == 0
    for name, values in whole.inner.inner_state().items():
        assert np.array_equal(new.inner.inner_state()[name], values)


def test_the_newest_whole_point_counts_and_why_another_does_not_is_said(tmp_path):
    one = Little(tmp_path)
    one.stand_at(one)
    assert (one.recover().steps, one.recover().reason) == (0, ""), "there is none"
    one.train()
    before = one.theta
    two = Little(tmp_path).stand_at(Little(tmp_path))
    folder = tmp_path / "points" / one.inner.settings.island
    assert sorted(path.name for path in folder.iterdir()) == [
        f"r00000-s{step:09d}.{kind}" for step in (13, 16) for kind in ("json", "safetensors")
    ]
    assert two.recover(beyond=6).reason == "it had got no further than the one before it"
    newest = folder / "r00000-s000000016.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    assert two.recover().steps == 3, "the newest one is torn"
    (folder / "r00000-s000000013.json").write_text('{"done": 3')
    assert two.recover().reason == "the file of rank 0 is not whole"
    assert torch.equal(one.theta, before)


def test_points_of_other_work_another_driver_or_another_anchor_are_not_taken_up(tmp_path):
    one, start = Little(tmp_path), Little(tmp_path)
    one.stand_at(start)
    one.train()
    other = Little(tmp_path, start=20).stand_at(start)
    assert other.recover().reason == "its point is of other work"
    later = Little(tmp_path, epoch=2).stand_at(start)
    assert later.recover(anchored=False).reason == "its point was made under another driver"
    assert later.recover(anchored=True).steps == 6, "it stands at the same anchor"
    moved = Little(tmp_path, epoch=2).stand_at(one)
    theta = moved.theta
    assert moved.recover(anchored=True).reason == "its point began from another anchor"
    coded = Little(tmp_path, "codec.up.kind=int4", "codec.up.feedback=true").stand_at(start)
    assert coded.recover().reason == "its point does not fit what its ranks hold"
    assert torch.equal(moved.theta, theta)


def test_a_storage_that_fails_costs_the_point_and_is_told(tmp_path):
    (tmp_path / "points").write_text("a file in the way")
    one = Little(tmp_path)
    one.stand_at(one)
    assert one.train().steps == STEPS
    assert one.points.end().startswith("a progress point could not be written: cannot write a progress point of")
    assert one.points.end() == ""


def test_an_island_takes_up_what_all_of_its_ranks_have():
    import asyncio

    asked = []

    async def ask(method, keeping=None, *arguments):
        asked.append((method, *arguments))
        if method == "look_for_points":
            return [([100, 200], ""), ([100, 300], "")]
        return ["", ""] if method == "read_point" else [True, True]

    assert asyncio.run(recover(ask, None, 0, False)).steps == 100
    assert asked == [("look_for_points", False), ("read_point", 100, False), ("take_up_point",)]
