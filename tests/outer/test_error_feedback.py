"""Error feedback of a rank: nothing that an island did is lost, whatever the codec, cut and fate of a message."""

import numpy as np
import pytest
import torch
from feedback_world import LARGE, LAYOUT, META, SMALL, TENSORS, WHOLE, Rank, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import Island, chunk_size, partitions, shards_of

from ray_diloco.outer.codec import Bf16, codec_of
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.layout import Range, intersect, layout_of, total
from ray_diloco.outer.optimizer import Sgd
from ray_diloco.outer.payload import Meta
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shaped import codec_by_name


def run(rank_parts, codec, fates, fragments, shard_count, whole, layout=LAYOUT, seed=0, scale=1.0):
    """Rounds of one island under SGD of rate 1: how far the anchor went, what was done, and what is left."""
    island = Island("i0", layout, rank_parts, whole, feedback=Feedback())
    shards = shards_of(layout, shard_count, fragments, Recipe(Sgd(1.0)))
    start = drawn(99, layout.numel)
    island.write(start)
    for shard in shards:
        shard.found(island.read(shard.ranges))
    island.adopt([shard.payload(p) for shard in shards for p in range(len(fragments))])
    done = np.zeros(layout.numel)
    for version, merged in enumerate(fates):
        x = drawn(seed + version, layout.numel, scale)
        before = torch.from_numpy(island.theta())
        island.write(before - x)
        done += before.numpy().astype(np.float64) - island.theta()
        updates = []
        for shard in shards:
            for p, fragment in enumerate(fragments):
                offer = island.contribute(intersect(fragment, shard.ranges), p, version, 1.0, codec)
                updates.append(shard.prepare(f"r{version}", p, [offer] if merged else (), idle=not merged)[1])
            shard.commit(f"r{version}")
        for rank in island.ranks:
            for fragment in fragments:
                rank.acknowledge(fragment, merged)
        island.adopt(updates)
    left = np.zeros(layout.numel)
    for rank in island.ranks:
        for name, error in rank.state(with_parameters=False).items():
            if name.startswith("error"):
                at = int(name.split("|")[1])
                left[at : at + error.size] = error
    tensors = {name: array for shard in shards for name, array in shard.tensors().items()}
    anchor = np.concatenate([tensors[t.name].reshape(-1) for t in layout.tensors])
    return start.numpy().astype(np.float64) - anchor, done, left


fates = st.lists(st.booleans(), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SMALL + TENSORS),
    partitions(LAYOUT.numel, 3),
    partitions(LAYOUT.numel, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 1024]),
    st.booleans(),
    fates,
)
def test_what_the_anchor_moved_and_what_is_left_is_what_was_done(codec, parts, fragments, count, chunk, whole, fates):
    with chunk_size(chunk):
        went, done, left = run(parts, codec_by_name(*codec), fates, fragments, count, whole)
    np.testing.assert_allclose(went + left, done, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "params"), LARGE)
def test_nothing_is_lost_by_codecs_with_long_units(kind, params):
    layout = layout_of([("w", (300, 1000)), ("b", (7,)), ("v", (60_003,))])
    parts = [(Range(0, 280_001),), (Range(280_001, layout.numel),)]
    went, done, left = run(
        parts, codec_of(kind, params), [True, False, True], [layout.whole], 2, True, layout, scale=1e-2
    )
    np.testing.assert_allclose(went + left, done, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "params"), [c for c in SMALL + TENSORS if c[0] == "fp32" or c[1].get("k") == 100])
def test_a_codec_that_sends_everything_leaves_nothing(kind, params):
    with chunk_size(8):
        rank = Rank(Feedback(0.9))
        for seed in range(2):
            said, _ = rank.say(drawn(seed), codec_by_name(kind, params | {"values": "fp32"} if params else params))
            rank.exchange.acknowledge(WHOLE, True)
            np.testing.assert_allclose(said, drawn(seed), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(rank.error, 0, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize(("kind", "params"), SMALL + TENSORS)
def test_memory_leaks_and_scales_as_it_is_told(kind, params, chunk):
    with chunk_size(chunk):
        rank, e = Rank(Feedback(decay=0.75, scale=0.5)), np.zeros(LAYOUT.numel)
        for seed in range(4):
            x = drawn(seed)
            said, emission = rank.say(x, codec_by_name(kind, params))
            rank.exchange.acknowledge(WHOLE, True)
            e = 0.75 * e + 0.5 * x.numpy() - said
            np.testing.assert_allclose(rank.error, e, rtol=1e-4, atol=1e-5)
            assert emission.squared_norm == pytest.approx(float(x.double().square().sum()), rel=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize(("kind", "params"), SMALL + TENSORS + [("dct", {"block": 4, "k": 3, "values": "sign"})])
def test_one_step_to_infinity_does_not_poison_the_error_memory(kind, params, value):
    with chunk_size(8):
        codec, rank = codec_by_name(kind, params), Rank(Feedback())
        rank.say(drawn(0), codec)
        rank.exchange.acknowledge(WHOLE, True)
        kept = rank.error
        _, emission = rank.say(torch.full((LAYOUT.numel,), value), codec)
        assert not emission.finite
        rank.exchange.acknowledge(WHOLE, False)
        np.testing.assert_array_equal(rank.error, kept)
        said, emission = rank.say(drawn(1), codec)
        assert emission.finite
        assert np.isfinite(said).all() and np.isfinite(rank.error).all()


def test_an_error_that_outgrows_fp32_is_reported():
    rank = Rank(Feedback(scale=1e20))
    _, emission = rank.say(torch.full((LAYOUT.numel,), 1e4), Bf16())
    assert not emission.finite
    assert rank.error.tolist() == [0.0] * LAYOUT.numel


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize(("kind", "params"), SMALL + TENSORS)
def test_a_message_is_as_large_as_its_codec_says(kind, params, chunk):
    with chunk_size(chunk):
        codec, rank = codec_by_name(kind, params), Rank(None)
        for ranges in (WHOLE, (Range(0, 24), Range(29, 50)), (Range(24, 29),)):
            array = rank.exchange.emit(ranges, codec, META).payload
            shapes = [t.shape for t in LAYOUT.tensors if intersect((t.range,), ranges)]
            if kind in ("dct", "low_rank"):
                body, digests = sum(codec.nbytes(s) for s in shapes), -(-sum(map(codec.nbytes, shapes)) // (4 * chunk))
            else:
                body, digests = codec.nbytes(total(ranges)), -(-total(ranges) // chunk)
            head = array.nbytes - body - -(-16 * digests // 64) * 64
            assert head % 64 == 0
            assert 64 < head < 1024


def test_the_same_seed_masks_the_same_elements_on_all_islands_and_others_in_the_next_round():
    with chunk_size(8):
        codec = codec_of("mask", {"p": 0.5, "block": 8, "seed": 3})
        metas = [Meta("contribution", {0: v}, i) for v, i in ((0, "i0"), (0, "i1"), (1, "i0"))]
        sent = [Rank(None).say(torch.ones(LAYOUT.numel), codec, meta=meta)[0] != 0 for meta in metas]
    assert sent[0].tolist() == sent[1].tolist()
    assert sent[0].tolist() != sent[2].tolist()


def test_sparse_rounds_that_keep_everything_are_outer_sgd():
    rank, codec = Rank(Feedback(decay=0.95)), codec_of("topk", {"k": 64, "block": 64})
    with chunk_size(64):
        for seed in range(3):
            said, _ = rank.say(drawn(seed), codec)
            rank.exchange.acknowledge(WHOLE, True)
            np.testing.assert_allclose(said, drawn(seed), rtol=1e-6)
