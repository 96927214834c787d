"""Error feedback of a rank: nothing that an island did is lost, whatever the codec, cut and fate of a message."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import Island, anchor_payload, chunk_size, partitions, shards_of

# Imported before chunks are made small, as they keep their size.
import ray_diloco.outer.quantise
import ray_diloco.outer.sparse  # noqa: F401
from ray_diloco.outer.codec import Bf16, Fp32, codec_of
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.exchange import Exchange, Slice
from ray_diloco.outer.layout import Range, intersect, layout_of, total
from ray_diloco.outer.optimizer import Sgd
from ray_diloco.outer.payload import Meta, open_payload
from ray_diloco.outer.selection import Selection
from ray_diloco.outer.shaped import codec_by_name
from ray_diloco.outer.step import Recipe

LAYOUT = layout_of([("w", (4, 6)), ("b", (5,)), ("v", (3, 7)), ("s", ())])
WHOLE = LAYOUT.whole
META = Meta("contribution", {0: 0}, "i0")

# Codecs whose units are as short as the chunks of these tests, and those that take whole tensors.
SMALL = [
    ("fp32", {}),
    ("bf16", {}),
    ("fp16", {}),
    ("int8", {"block": 8}),
    ("int8", {"block": 8, "rounding": "stochastic"}),
    ("int4", {"block": 4}),
    ("topk", {"k": 1, "block": 4}),
    ("topk", {"k": 3, "block": 8, "values": "bf16"}),
    ("mask", {"p": 0.4, "block": 8}),
]
TENSORS = [
    ("dct", {"block": 4, "k": 3}),
    ("dct", {"block": 8, "k": 100, "values": "bf16"}),
    ("low_rank", {"rank": 1}),
    ("low_rank", {"rank": 2, "values": "bf16"}),
]
# Those whose units are as long as a chunk of the real size.
LARGE = [("int8_bin_mean", {}), ("e3m0", {}), ("2bit", {}), ("2bit", {"codebook": "bin_mean"}), ("1bit", {}),
         ("1bit", {"codebook": "quantile"}), ("mask", {"p": 0.01})]  # fmt: skip


def drawn(seed, numel=LAYOUT.numel, scale=1.0):
    return torch.from_numpy(scale * np.random.default_rng(seed).standard_normal(numel)).float()


class Rank:
    """A rank that holds everything and emits some of it."""

    def __init__(self, feedback, emits=WHOLE, layout=LAYOUT, start=None):
        self.theta = torch.zeros(layout.numel)
        self.exchange = Exchange(layout, [Slice(layout.whole[0], self.theta)], emits, feedback=feedback)
        self.start = np.zeros(layout.numel) if start is None else start
        self.layout = layout
        self.reset()

    def reset(self):
        self.exchange.adopt([anchor_payload(self.start, self.layout.whole)])

    def say(self, x, codec, ranges=None, meta=META):
        """Emits `x`, and adopts the anchor again."""
        self.theta.sub_(x)
        emission = self.exchange.emit(ranges or self.exchange.emits, codec, meta)
        sent = emission.payload.copy()
        self.reset()
        return decoded(sent), emission

    @property
    def error(self):
        state = self.exchange.state(with_parameters=False)
        found = sorted((int(k.split("|")[1]), v) for k, v in state.items() if k.startswith("error"))
        return np.concatenate([v for _, v in found])


def decoded(array):
    """What a message says, element by element."""
    payload = open_payload(array)
    values = torch.empty(payload.numel)
    if payload.dense:
        from ray_diloco.outer import chunks

        for start in range(0, payload.numel, chunks.CHUNK):
            stop = min(start + chunks.CHUNK, payload.numel)
            values[start:stop] = payload.read(start, stop, torch.empty(stop - start))
    else:
        for at, shape, data, nonce in payload.read_tensors():
            payload.shaped_codec.decode(data, shape, values[at : at + int(np.prod(shape))], nonce)
    return values.numpy().astype(np.float64)


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


@pytest.mark.parametrize(("kind", "params"), SMALL + TENSORS)
def test_a_message_that_was_not_merged_is_put_back_as_it_said(kind, params):
    with chunk_size(8):
        rank = Rank(Feedback())
        rank.say(drawn(0), codec_by_name(kind, params))
        rank.exchange.acknowledge(WHOLE, True)
        kept = rank.error
        said, _ = rank.say(drawn(1), codec_by_name(kind, params))
        left = rank.error
        rank.exchange.acknowledge(WHOLE, False)
        np.testing.assert_array_equal(rank.error, (left + said.astype(np.float32)).astype(np.float32))
        np.testing.assert_allclose(rank.error, kept + drawn(1).numpy(), rtol=1e-4, atol=1e-5)


def test_signs_of_coefficients_are_put_back_with_their_sizes():
    rank, codec = Rank(Feedback()), Dct(block=8, k=2, values="sign")
    said, _ = rank.say(drawn(0), codec)
    assert np.abs(said).max() > 0
    rank.exchange.acknowledge(WHOLE, False)
    np.testing.assert_allclose(rank.error, drawn(0), rtol=1e-4, atol=1e-5)


def test_acknowledgements_are_heard_in_the_order_of_the_emissions():
    with chunk_size(8):
        codec, rank = codec_of("topk", {"k": 1, "block": 4}), Rank(Feedback())
        first, _ = rank.say(drawn(0), codec)
        second, _ = rank.say(drawn(1), codec)
        left = rank.error
        rank.exchange.acknowledge(WHOLE, False)
        np.testing.assert_allclose(rank.error, left + first, rtol=1e-6, atol=1e-7)
        rank.exchange.acknowledge(WHOLE, True)
        np.testing.assert_allclose(rank.error, left + first, rtol=1e-6, atol=1e-7)
        # Both have been heard of.
        rank.exchange.acknowledge(WHOLE, False)
        np.testing.assert_allclose(rank.error, left + first, rtol=1e-6, atol=1e-7)
        assert np.abs(first - second).max() > 0.1


def test_many_emissions_may_be_on_their_way():
    with chunk_size(8):
        codec, rank = codec_of("topk", {"k": 1, "block": 4}), Rank(Feedback())
        said = [rank.say(drawn(seed), codec)[0] for seed in range(9)]
        left = rank.error
        for k in range(9):
            rank.exchange.acknowledge(WHOLE, k != 2)
        np.testing.assert_allclose(rank.error, left + said[2], rtol=1e-6, atol=1e-7)


def test_who_joins_anew_puts_back_all_that_it_has_not_heard_of():
    with chunk_size(8):
        codec, rank = codec_of("topk", {"k": 1, "block": 4}), Rank(Feedback())
        one, other = (Range(0, 20),), (Range(20, LAYOUT.numel),)
        for seed in range(3):
            rank.theta.sub_(drawn(seed))
            for ranges in (one, other):
                rank.exchange.emit(ranges, codec, META)
            rank.reset()
        kept = rank.error[20:]
        rank.exchange.give_up(one)
        np.testing.assert_allclose(rank.error[:20], sum(drawn(seed) for seed in range(3))[:20], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(rank.error[20:], kept)
        # What comes next is heard of as if nothing had been before.
        before = rank.error
        rank.theta.sub_(drawn(7))
        rank.exchange.emit(one, codec, META)
        rank.exchange.acknowledge(one, False)
        np.testing.assert_allclose(rank.error[:20], before[:20] + drawn(7).numpy()[:20], rtol=1e-5, atol=1e-6)


def test_fragments_and_shards_are_heard_of_one_by_one():
    with chunk_size(8):
        codec, rank = codec_of("topk", {"k": 1, "block": 4}), Rank(Feedback())
        one, other = (Range(0, 20),), (Range(20, LAYOUT.numel),)
        parts = [(Range(0, 9),), (Range(9, 20),)]
        x = drawn(0)
        rank.theta.sub_(x)
        for ranges in (*parts, other):
            rank.exchange.emit(ranges, codec, META)
        rank.exchange.acknowledge(one, False)
        np.testing.assert_allclose(rank.error[:20], x[:20], rtol=1e-6, atol=1e-7)
        assert np.abs(rank.error[20:] - x[20:].numpy()).max() > 0.1
        rank.exchange.acknowledge(other, False)
        np.testing.assert_allclose(rank.error, x, rtol=1e-6, atol=1e-7)


def test_what_is_put_back_does_not_change_with_the_memory_of_the_message():
    rank, codec = Rank(Feedback()), Bf16()
    rank.theta.sub_(drawn(0))
    first = rank.exchange.emit(WHOLE, codec, META).payload
    rank.exchange.emit(WHOLE, codec, META)
    assert first.ctypes.data == rank.exchange.emit(WHOLE, codec, META).payload.ctypes.data
    rank.exchange.acknowledge(WHOLE, False)
    said, _ = Rank(Feedback()).say(drawn(0), codec)
    assert np.abs(rank.error - said).max() < 0.05


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


@pytest.mark.parametrize(("kind", "params"), [SMALL[5], SMALL[6], TENSORS[0], TENSORS[2]])
def test_error_memory_and_what_codecs_keep_survive_a_restart_bit_by_bit(kind, params):
    emits = (Range(0, 24), Range(29, LAYOUT.numel))
    with chunk_size(8):
        codec = codec_by_name(kind, params)
        one, other = Rank(Feedback(), emits), Rank(Feedback(), emits)
        for seed in range(2):
            one.say(drawn(seed), codec)
            one.exchange.acknowledge(WHOLE, True)
        state = one.exchange.state(with_parameters=False)
        assert other.exchange.load_state(state, None)
        assert other.error.tobytes() == one.error.tobytes()
        for array in state.values():
            array.fill(7)
        for seed in range(2, 4):
            said = [rank.say(drawn(seed), codec)[0] for rank in (one, other)]
            assert said[0].tobytes() == said[1].tobytes()
            assert other.error.tobytes() == one.error.tobytes()


@pytest.mark.parametrize(
    "emits", [(Range(0, 24),), (Range(0, 30),), (Range(0, 24), Range(29, 40)), (Range(0, 20), Range(29, 51)), WHOLE]
)
def test_the_memory_of_another_cut_is_not_taken_up(emits):
    saved = Rank(Feedback(), (Range(0, 24), Range(29, LAYOUT.numel)))
    saved.say(drawn(0), codec_of("topk", {"k": 1, "block": 4096}))
    other = Rank(Feedback(), emits)
    other.say(drawn(1), codec_of("topk", {"k": 1, "block": 4096}))
    before = other.error
    assert not other.exchange.load_state(saved.exchange.state(with_parameters=False), None)
    np.testing.assert_array_equal(other.error, before)


def test_feedback_without_saved_memory_does_not_fit_and_the_reverse_does():
    plain, rank = Rank(None), Rank(Feedback())
    assert not rank.exchange.load_state(plain.exchange.state(with_parameters=False), None)
    assert plain.exchange.load_state(rank.exchange.state(with_parameters=False), None)
    assert not plain.exchange.load_state({}, {0: 3})


def test_factors_of_another_rank_are_begun_anew():
    one, other = Rank(None), Rank(None)
    one.say(drawn(0), codec_by_name("low_rank", {"rank": 2}))
    assert other.exchange.load_state(one.exchange.state(with_parameters=False), None)
    fresh, _ = Rank(None).say(drawn(1), codec_by_name("low_rank", {"rank": 1}))
    said, _ = other.say(drawn(1), codec_by_name("low_rank", {"rank": 1}))
    assert said.tobytes() == fresh.tobytes()


def test_who_forgets_begins_as_one_that_has_sent_nothing():
    for kind, params in (SMALL[6], TENSORS[2]):
        with chunk_size(8):
            codec, rank = codec_by_name(kind, params), Rank(Feedback())
            rank.say(drawn(0), codec)
            rank.exchange.forget()
            rank.exchange.acknowledge(WHOLE, False)
            assert rank.error.tolist() == [0.0] * LAYOUT.numel
            assert rank.say(drawn(1), codec)[0].tobytes() == Rank(Feedback()).say(drawn(1), codec)[0].tobytes()


def test_without_feedback_acknowledgements_change_nothing():
    rank = Rank(None)
    rank.say(drawn(0), Bf16())
    rank.exchange.acknowledge(WHOLE, False)
    assert rank.exchange.state(with_parameters=False) == {}


def test_random_fragments_have_no_feedback():
    rank = Rank(Feedback())
    with pytest.raises(ValueError, match="random fragments go with neither"):
        rank.exchange.emit(WHOLE, Fp32(), META, Selection("bernoulli", 0.5, 0, 0))


# Sizes and seeds


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
