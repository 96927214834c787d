from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import CODECS, codec_of

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)


def round_trip(codec, values):
    data = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    decoded = torch.empty(values.numel())
    codec.decode(data, decoded)
    return data, decoded


def test_sizes_are_exact_to_the_byte():
    assert [codec_of("fp32").nbytes(n) for n in (0, 1, 7)] == [0, 4, 28]
    assert [codec_of("bf16").nbytes(n) for n in (0, 1, 7)] == [0, 2, 14]


@given(floats)
def test_fp32_is_the_bytes_themselves(values):
    values = np.array(values, np.float32)
    data, decoded = round_trip(codec_of("fp32"), torch.from_numpy(values))
    assert data.numpy().tobytes() == values.tobytes()
    assert decoded.numpy().tobytes() == values.tobytes()


def test_bf16_rounds_to_nearest_even_at_seven_bits_of_fraction():
    values = torch.tensor([0.0, 1.0, -1.5, 1 + 1 / 128, 1 + 1 / 256, 1 + 3 / 256, 1 + 1 / 256 + 1e-6])
    expected = [0.0, 1.0, -1.5, 1 + 1 / 128, 1.0, 1 + 4 / 256, 1 + 1 / 128]
    assert round_trip(codec_of("bf16"), values)[1].tolist() == expected


@given(floats)
def test_bf16_is_idempotent_and_within_its_error(values):
    values = torch.tensor([v for v in values if abs(v) < 3e38], dtype=torch.float32)
    data, once = round_trip(codec_of("bf16"), values)
    assert torch.equal(data, round_trip(codec_of("bf16"), once)[0])
    error = (once.double() - values.double()).abs()
    assert bool((error <= values.double().abs() / 256 + 1e-38).all())


@pytest.mark.parametrize("name", sorted(CODECS))
def test_any_runs_of_whole_units_make_the_same_bytes(name):
    codec = codec_of(name)
    assert codec.name == name
    assert CHUNK % codec.granularity == 0
    values = torch.randn(10 * codec.granularity + 3, generator=torch.Generator().manual_seed(1))
    whole, _ = round_trip(codec, values)
    cuts = [0, 4 * codec.granularity, 5 * codec.granularity, values.numel()]
    runs = [round_trip(codec, values[a:b])[0] for a, b in pairwise(cuts)]
    assert torch.equal(whole, torch.cat(runs))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_header_fields_build_the_same_codec(name):
    codec = codec_of(name)
    again = codec_of(codec.name, codec.params)
    assert (again.name, again.params) == (codec.name, codec.params)


def test_traits_say_what_a_checker_needs():
    assert codec_of("fp32").plain
    assert codec_of("fp32").traits.lossless
    assert not codec_of("bf16").plain
    assert not codec_of("bf16").traits.lossless


def test_unknown_codecs_and_parameters_are_refused():
    with pytest.raises(SyncError, match="RD-404: there is no codec 'int9'"):
        codec_of("int9")
    with pytest.raises(SyncError, match="RD-404: codec 'bf16' does not take"):
        codec_of("bf16", {"block": 4})
