"""An anchor shard that dies at any point of a round has a successor with the same bits, and the run never knows."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from mortal_shards import Death, Ref, World

from ray_diloco.blocks import channels_of
from ray_diloco.cluster.storage import Storage
from ray_diloco.cluster.store import RayStore, StoreSettings
from ray_diloco.config.schema import Config
from ray_diloco.errors import CheckpointError, ClusterError, SyncError
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.layout import intersect, layout_of, shard_ranges
from ray_diloco.outer.payload import Meta, Writer
from ray_diloco.rounds.ports import SHARED, Emission, Movement, Offer, Piece, Snapshot, Step

LAYOUT = layout_of([("w", (6, 5)), ("b", (7,)), ("head", (4, 3))])
CHANNELS = channels_of(Config())
ROUNDS = 4
# The round whose commit is durable; what came after it has to be told again.
DURABLE = 2


def pieces(meta, seed, parts=2):
    values = np.random.default_rng(seed).standard_normal(LAYOUT.numel).astype(np.float32)
    found = []
    for k, ranges in enumerate(shard_ranges(LAYOUT, parts)):
        mine = intersect(LAYOUT.whole, ranges)
        writer = Writer(Fp32(), mine, meta)
        writer.put(0, torch.from_numpy(np.concatenate([values[r.start : r.stop] for r in mine])))
        payload = writer.seal(meta)
        found.append(Piece(k, payload.nbytes, Ref(payload)))
    return tuple(found)


def step_of(round_, parts=2, anchors=(SHARED,)):
    def offer(island, k):
        emission = Emission(pieces(Meta("contribution", {0: round_ - 1}, island), 10 * round_ + k, parts), 1.0, True)
        return Offer(island, 0, 0, round_, round_ - 1, 4, 128, 1.0, emission)

    offers = [(offer(island, k), 0.5) for k, island in enumerate(("i0", "i1"))]
    movements = tuple(Movement(anchor, tuple(offers)) for anchor in anchors)
    return Step(f"{round_}.0:i0/0/{round_},i1/0/{round_}", 0, round_, round_ - 1, movements)


def told():
    """The round is written down."""
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def store_of(world, folder, epoch=None):
    settings = StoreSettings("r", "", {}, 2, 0, 5.0, {}, epoch)
    return RayStore(Storage(str(folder)), None, world.anchor, world.tape, settings)


async def sail(world, folder, rounds=ROUNDS, anchors=(SHARED,), durable=DURABLE):
    """A run: founded, `rounds` rounds, one durable commit."""
    anchor, store = world.anchor, store_of(world, folder)
    parts = 2 if anchors == (SHARED,) else 1
    await anchor.start(LAYOUT, ["n0", "n1"], None, store.storage)
    await anchor.found(pieces(Meta("parameters"), 0, parts))
    sent = []
    for r in range(1, rounds + 1):
        prepared = await anchor.prepare(step_of(r, parts, anchors))
        await anchor.commit(prepared.key)
        sent.append([p.handle.value.tobytes() for u in prepared.updates.values() for p in u.pieces])
        if r == durable:
            await store.save(Snapshot(r, 4 * r, {0: r}, {}, {}), {}, told())
    sent.append([p.handle.value.tobytes() for u in await anchor.current("i0") for p in u.pieces])
    return sent, store


def run(folder, *deaths, again=(), **settings):
    world = World(CHANNELS, deaths, again, anchors=settings.get("anchors", (SHARED,)))
    sent, store = asyncio.run(sail(world, folder, **settings))
    return world, sent, store


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run(tmp_path_factory.mktemp("straight"))


CALLS = [("build", 1), ("found", 1), ("save", 1), ("saved", 1), ("current", 1)]
CALLS += [(method, n) for method in ("prepare", "commit") for n in range(1, ROUNDS + 1)]
POINTS = [Death(m, n, after) for m, n in CALLS for after in (False, True)]


@pytest.mark.parametrize("death", POINTS, ids=lambda d: f"{'after' if d.after else 'before'}-{d.method}-{d.nth}")
def test_a_shard_dies_at_any_point_and_the_run_has_the_same_bits(death, straight, tmp_path):
    world, sent, store = run(tmp_path, death)
    _, expected, stored = straight
    assert sent == expected
    assert world.committed() == straight[0].committed()
    assert [kind for kind in world.tape.kinds() if kind != "checkpoint_written"] == [
        "anchor_shard_lost",
        "anchor_shard_replaced",
    ]
    assert store.newest.round == DURABLE
    assert [e.sha256 for e in store.newest.files] == [e.sha256 for e in stored.newest.files]


@pytest.mark.parametrize("death", [Death(m, 1, after) for m in ("build", "load") for after in (False, True)], ids=repr)
def test_a_shard_that_dies_while_a_commit_is_taken_up_has_a_successor(death, straight, tmp_path):
    _, _, store = run(tmp_path)

    def begun(*deaths):
        world = World(CHANNELS, deaths)
        asyncio.run(world.anchor.start(LAYOUT, ["n0", "n1"], store.newest, store.storage))
        return world

    world = begun(death)
    assert world.committed() == begun().committed()
    assert world.tape.kinds() == ["anchor_shard_lost", "anchor_shard_replaced"]


def test_shards_that_die_over_and_over_while_they_start_end_the_run(tmp_path):
    world = World(CHANNELS, [Death("build", 1)], [Death("build", 1)] * 9, losses=3)
    with pytest.raises(ClusterError, match="RD-221: the anchor did not start: an anchor shard failed") as error:
        asyncio.run(world.anchor.start(LAYOUT, ["n0", "n1"], None, Storage(str(tmp_path))))
    assert error.value.mend


def test_both_shards_die_at_once(straight, tmp_path):
    world, sent, _ = run(tmp_path, Death("commit", 3, shard=0), Death("commit", 3, after=True))
    assert sent == straight[1] and len(world.handles) == 4


def test_a_successor_dies_over_what_it_is_told(straight, tmp_path):
    world, sent, _ = run(tmp_path, Death("prepare", 4), again=[Death("commit", 1)])
    assert sent == straight[1] and world.tape.kinds().count("anchor_shard_lost") == 2


def test_shards_that_die_again_and_again_end_the_run(tmp_path):
    with pytest.raises(ClusterError, match="RD-222: an anchor shard failed while preparing round 4") as error:
        run(tmp_path, Death("prepare", 4), again=[Death("commit", 1)] * 9)
    assert "the same command again" in error.value.mend


def test_a_shard_that_is_silent_is_ended_and_replaced(straight, tmp_path):
    world, sent, _ = run(tmp_path, Death("prepare", 3, silent=True))
    assert sent == straight[1]
    assert set(world.ended) == {world.handles[1]}
    assert [e["how"] for e in world.tape.events if e["event"] == "anchor_shard_lost"] == ["frozen"]


@pytest.mark.parametrize("dead", [None, 0, 1])
def test_a_commit_goes_to_shards_after_what_islands_were_told_but_before_anything_they_ask(dead, tmp_path):
    world, seen = World(CHANNELS), {}

    async def asks_at_once():
        anchor = world.anchor
        await anchor.start(LAYOUT, ["n0", "n1"], None, Storage(str(tmp_path)))
        await anchor.found(pieces(Meta("parameters"), 0))
        prepared = await anchor.prepare(step_of(1))
        swap = asyncio.ensure_future(anchor.commit(prepared.key))
        await asyncio.sleep(0)
        seen["before"] = [handle.calls.count("commit") for handle in world.handles]
        if dead is not None:
            world.handles[dead].dead = True
        current = await anchor.current("i0")
        seen["versions"] = [update.version for update in current]
        seen["sent"] = [p.handle.value.tobytes() for update in current for p in update.pieces]
        seen["prepared"] = [p.handle.value.tobytes() for p in prepared.updates[SHARED].pieces]
        await swap

    asyncio.run(asks_at_once())
    assert seen["before"] == [0, 0] and seen["versions"] == [1] and seen["sent"] == seen["prepared"]
    assert all(keeper.handle.calls.count("commit") == 1 for keeper in world.anchor._keepers)
    assert world.tape.kinds().count("anchor_shard_replaced") == (dead is not None)


def test_a_failure_of_a_living_shard_is_no_death(tmp_path):
    world = World(CHANNELS)

    async def commit_what_nobody_prepared():
        await sail(world, tmp_path)
        await world.anchor.commit("9.0:i0/0/9")

    with pytest.raises(SyncError, match="RD-423"):
        asyncio.run(commit_what_nobody_prepared())
    assert "anchor_shard_lost" not in world.tape.kinds()


def test_anchors_of_their_own_have_successors_too(tmp_path):
    names = ("i0", "i1")
    _, expected, _ = run(tmp_path / "straight", anchors=names)
    for k, (method, after) in enumerate([("prepare", False), ("commit", False), ("commit", True), ("saved", False)]):
        world, sent, store = run(tmp_path / str(k), Death(method, 1, after, shard=0), anchors=names)
        assert sent == expected and store.newest.round == DURABLE
        assert "anchor_shard_replaced" in world.tape.kinds()


def test_what_is_kept_for_successors_is_what_no_durable_commit_holds(tmp_path):
    world = World(CHANNELS)
    kept = []

    async def rounds():
        anchor = world.anchor
        await anchor.start(LAYOUT, ["n0"], None, Storage(str(tmp_path)))
        store = store_of(world, tmp_path)
        await anchor.found(pieces(Meta("parameters"), 0))
        for r in (1, 2):
            await anchor.prepare(step_of(r))
            kept.append(anchor.kept_bytes)
            await anchor.commit(step_of(r).key)
        refused = step_of(3)
        await anchor.prepare(refused)
        await anchor.abort(refused.key)
        kept.append(anchor.kept_bytes)
        saving = asyncio.ensure_future(store.save(Snapshot(2, 8, {0: 2}, {}, {}), {}, told()))
        await asyncio.sleep(0)
        # The next round is under way while the commit is written.
        await anchor.prepare(step_of(3))
        await saving
        kept.append(anchor.kept_bytes)

    asyncio.run(rounds())
    one = kept[0]
    assert one == sum(p.nbytes for offer, _ in step_of(1).movements[0].contributions for p in offer.emission.pieces)
    assert kept == [one, 2 * one, 2 * one, one]


def test_a_write_that_fails_frees_nothing(straight, tmp_path):
    """The storage is no folder at first; the shard that dies later still begins at the founding parameters."""
    (tmp_path / "checkpoints").write_text("in the way")
    world, sent, store = run(tmp_path, Death("prepare", 4))
    assert sent == straight[1]
    assert store.newest is None and "checkpoint_failed" in world.tape.kinds()


def test_a_driver_that_has_been_succeeded_cannot_commit_and_ends(tmp_path):
    world = World(CHANNELS)

    async def commit_when_another_has_taken_over():
        await sail(world, tmp_path / "elsewhere")
        store = store_of(world, tmp_path, epoch=1)
        store.store.epochs.claim()
        store.store.epochs.claim()
        await store.save(Snapshot(4, 16, {0: 4}, {}, {}), {}, told())

    with pytest.raises(CheckpointError, match="RD-565: this driver is of epoch 1, and one of epoch 2 has taken over"):
        asyncio.run(commit_when_another_has_taken_over())
    assert "checkpoint_failed" not in world.tape.kinds(), "it is no fault of the storage"


class SlowStorage:
    """A storage whose files are not written before somebody lets them."""

    def __init__(self, folder):
        self._storage, self.free = Storage(str(folder)), threading.Event()

    def open(self):
        store = self._storage.open()
        write = store.write_tensors

        def slow(*arguments, **named):
            assert self.free.wait(60)
            return write(*arguments, **named)

        store.write_tensors = slow
        return store


def test_a_slow_storage_gets_what_was_committed_then_while_rounds_go_on(straight, tmp_path):
    world, slow = World(CHANNELS), SlowStorage(tmp_path)

    async def rounds():
        anchor = world.anchor
        await anchor.start(LAYOUT, ["n0", "n1"], None, slow)
        await anchor.found(pieces(Meta("parameters"), 0))
        for r in range(1, ROUNDS + 1):
            prepared = await anchor.prepare(step_of(r))
            await anchor.commit(prepared.key)
            if r == DURABLE:
                saving = anchor.save(slow, r, {})
        slow.free.set()
        return await saving

    files = asyncio.run(rounds())
    assert world.committed() == straight[0].committed()
    assert [file.sha256 for file in files] == [file.sha256 for file in straight[2].newest.files]


def test_what_became_of_a_write_is_known_after_others_have_ended(straight, tmp_path):
    """A driver with much to do asks late: the run of ten rounds a second for which it was a KeyError."""
    world, storage = World(CHANNELS), Storage(str(tmp_path))

    async def rounds():
        anchor = world.anchor
        await anchor.start(LAYOUT, ["n0", "n1"], None, storage)
        await anchor.found(pieces(Meta("parameters"), 0))
        prepared = await anchor.prepare(step_of(1))
        await anchor.commit(prepared.key)
        written = []
        for r in range(1, 9):
            written.append(anchor.save(storage, r, {}))
            for keeper in anchor._keepers:
                keeper.handle.shard._writes[r].exception()
        return [await one for one in written]

    assert [len(files) for files in asyncio.run(rounds())] == [len(straight[2].newest.files)] * 8
