"""Messages that were sent with error feedback and wait to be heard of."""

import numpy as np
import pytest
from feedback_world import LAYOUT, META, SMALL, TENSORS, WHOLE, Rank, drawn
from outer_world import chunk_size

from ray_diloco.outer.codec import Bf16, codec_of
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.layout import Range
from ray_diloco.outer.shaped import codec_by_name


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


def test_without_feedback_acknowledgements_change_nothing():
    rank = Rank(None)
    rank.say(drawn(0), Bf16())
    rank.exchange.acknowledge(WHOLE, False)
    assert rank.exchange.state(with_parameters=False) == {}
