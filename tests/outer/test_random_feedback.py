"""Error feedback of random fragments: what is drawn goes through the memory, what is not drawn waits where it is."""

import numpy as np
import pytest
import torch
from feedback_world import LAYOUT, META, SMALL, WHOLE, Rank, decoded, drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import Island, chunk_size, partitions

from ray_diloco.outer.codec import Fp32, codec_of
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.layout import Range, intersect, shard_ranges
from ray_diloco.outer.optimizer import Sgd
from ray_diloco.outer.payload import Meta
from ray_diloco.outer.random_fragments import Draw
from ray_diloco.outer.recipe import Recipe
from ray_diloco.outer.shard import AnchorShard, Contribution

HALF = Draw("bernoulli", 0.5, 7)
DRAWS = [HALF, Draw("partitioned", 0.25, 3), Draw("bernoulli", 1.0, 1)]


def at_of(draw, version):
    return draw.of(version).packed(WHOLE)


def said_by(rank, x, codec, version, draw=HALF):
    """Moves by −x, emits what is drawn and begins at zero again; what the message says."""
    rank.theta.sub_(x)
    emission = rank.exchange.emit(WHOLE, codec, Meta("contribution", {0: version}, "i0"), draw.of(version))
    said = np.zeros(LAYOUT.numel)
    said[at_of(draw, version)] = decoded(emission.payload)
    rank.reset()
    return said, emission


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SMALL),
    st.sampled_from(DRAWS),
    partitions(LAYOUT.numel, 3),
    st.integers(1, 3),
    st.sampled_from([8, 16, 1024]),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_what_the_anchor_moved_and_what_is_left_or_waits_is_what_was_done(
    codec, draw, parts, count, chunk, whole, fates
):
    with chunk_size(chunk):
        codec = codec_of(*codec)
        island = Island("i0", LAYOUT, parts, whole, feedback=Feedback())
        ranges = shard_ranges(LAYOUT, count)
        shards = [AnchorShard(LAYOUT, kept, [LAYOUT.whole], Recipe(Sgd(1.0)), draw=draw) for kept in ranges]
        start = drawn(99)
        island.write(start)
        for shard in shards:
            shard.found(island.read(shard.ranges))
        island.adopt([shard.payload(0) for shard in shards])
        done = np.zeros(LAYOUT.numel)
        for version, merged in enumerate(fates):
            before = island.theta()
            island.write(torch.from_numpy(before) - drawn(version))
            done += before.astype(np.float64) - island.theta()
            updates = []
            for shard in shards:
                meta = Meta("contribution", {0: version}, "i0")
                sent = [
                    r.emit(intersect(shard.ranges, r.emits), codec, meta, draw.of(version)).payload
                    for r in island.ranks
                ]
                offers = [Contribution("i0", 1.0, version, tuple(sent))] if merged else ()
                updates.append(shard.prepare(f"r{version}", 0, offers, idle=not merged)[1])
                shard.commit(f"r{version}")
            for rank in island.ranks:
                rank.acknowledge(LAYOUT.whole, merged)
            island.adopt(updates)
    left = np.zeros(LAYOUT.numel)
    for rank in island.ranks:
        for name, error in rank.state(with_parameters=False).items():
            at = int(name.split("|")[1])
            left[at : at + error.size] = error
    # θ stands where the anchor is, less what was not drawn since it moved there.
    went = start.numpy().astype(np.float64) - island.theta()
    np.testing.assert_allclose(went + left, done, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize("draw", DRAWS, ids=str)
@pytest.mark.parametrize(("kind", "params"), SMALL)
def test_memory_leaks_and_scales_only_where_an_element_is_drawn(kind, params, draw, chunk):
    with chunk_size(chunk):
        rank, e = Rank(Feedback(decay=0.75, scale=0.5)), np.zeros(LAYOUT.numel)
        for version in range(5):
            x, at = drawn(version), at_of(draw, version)
            said, emission = said_by(rank, x, codec_of(kind, params), version, draw)
            rank.exchange.acknowledge(WHOLE, True)
            e[at] = 0.75 * e[at] + 0.5 * x.numpy()[at] - said[at]
            np.testing.assert_allclose(rank.error, e, rtol=1e-4, atol=1e-5)
            assert emission.squared_norm == pytest.approx(float(x.double()[at].square().sum()), rel=1e-4)


@pytest.mark.parametrize(("kind", "params"), SMALL)
def test_what_was_not_merged_is_put_back_where_it_was_drawn(kind, params):
    with chunk_size(8):
        rank, codec = Rank(Feedback()), codec_of(kind, params)
        said_by(rank, drawn(0), codec, 0)
        # Two are under way, and of the first one hears after another draw.
        first, _ = said_by(rank, drawn(1), codec, 1)
        said_by(rank, drawn(2), codec, 2)
        rank.exchange.acknowledge(WHOLE, True)
        left = rank.error
        rank.exchange.acknowledge(WHOLE, False)
        np.testing.assert_array_equal(rank.error, (left.astype(np.float32) + first.astype(np.float32)))
        elsewhere = np.setdiff1d(np.arange(LAYOUT.numel), at_of(HALF, 1))
        np.testing.assert_array_equal(rank.error[elsewhere], left[elsewhere])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_drawn_element_that_is_not_finite_does_not_poison_the_memory(value):
    with chunk_size(8):
        rank, codec = Rank(Feedback()), codec_of("topk", {"k": 1, "block": 4})
        said_by(rank, drawn(0), codec, 0)
        kept, x = rank.error, drawn(1)
        x[int(at_of(HALF, 1)[3])] = value
        said, emission = said_by(rank, x, codec, 1)
        assert not emission.finite and np.isfinite(said).all()
        rank.exchange.acknowledge(WHOLE, True)
        rank.exchange.acknowledge(WHOLE, False)
        assert np.isfinite(rank.error).all()
        # Of the chunk in which it lies nothing was said, and nothing was taken from the memory.
        bad = at_of(HALF, 1)[:8]
        np.testing.assert_array_equal(rank.error[bad], kept[bad])


def test_a_restored_rank_goes_on_with_the_memory_of_the_lost_one():
    codec, lost = codec_of("int4", {"block": 4}), Rank(Feedback())
    for version in range(3):
        said_by(lost, drawn(version), codec, version)
        lost.exchange.acknowledge(WHOLE, True)
    successor = Rank(Feedback())
    assert successor.exchange.load_state(lost.exchange.state(with_parameters=False), None)
    for version in range(3, 6):
        one, _ = said_by(lost, drawn(version), codec, version)
        other, _ = said_by(successor, drawn(version), codec, version)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(lost.error, successor.error)


def test_a_fragment_of_which_nothing_is_drawn_changes_nothing():
    rank, draw = Rank(Feedback()), Draw("bernoulli", 2.0**-30, 0)
    assert at_of(draw, 0).size == 0
    rank.exchange.emit((Range(0, 5),), Fp32(), META, draw.of(0))
    rank.exchange.acknowledge(WHOLE, False)
    assert not rank.error.any()


def test_random_fragments_do_not_go_with_codecs_of_whole_tensors():
    rank = Rank(Feedback())
    with pytest.raises(ValueError, match="random fragments do not go with codecs of whole tensors"):
        rank.exchange.emit(WHOLE, Dct(block=8, k=2), META, HALF.of(0))
