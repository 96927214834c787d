"""Error memory and what codecs keep, saved and taken up again."""

import numpy as np
import pytest
from feedback_world import LAYOUT, SMALL, TENSORS, WHOLE, Rank, drawn
from outer_world import chunk_size

from ray_diloco.outer.codec import codec_of
from ray_diloco.outer.error_feedback import Feedback
from ray_diloco.outer.layout import Range
from ray_diloco.outer.shaped import codec_by_name


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
