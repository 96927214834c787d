import json
import subprocess
import sys
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


# One set of parameters per behaviour; sizes of units that make short vectors interesting.
VARIANTS = [
    *((name, {}) for name in sorted(CODECS)),
    ("int8", {"block": 64, "rounding": "stochastic", "seed": 3}),
    ("int4", {"block": 8, "rounding": "stochastic", "seed": 3}),
    ("2bit", {"codebook": "bin_mean"}),
    ("1bit", {"codebook": "quantile"}),
    ("topk", {"k": 3, "block": 16, "values": "bf16"}),
    ("topk", {"k": 20, "block": 64, "values": "2bit", "codebook": "bin_mean"}),
    ("mask", {"p": 0.3, "block": 64, "seed": 5, "scaled": 1, "values": "int8"}),
]
variants = pytest.mark.parametrize(("name", "params"), VARIANTS)


def round_trip(codec, values, nonce=0):
    data = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data, nonce=nonce)
    decoded = torch.empty(values.numel())
    codec.decode(data, decoded, nonce=nonce)
    return data, decoded


def normal(numel, seed=1):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_sizes_are_exact_to_the_byte():
    assert [codec_of("fp32").nbytes(n) for n in (0, 1, 7)] == [0, 4, 28]
    assert [codec_of("bf16").nbytes(n) for n in (0, 1, 7)] == [0, 2, 14]
    assert [codec_of("fp16").nbytes(n) for n in (0, 1, 7)] == [0, 2, 14]


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


@given(floats)
def test_fp16_is_idempotent_and_within_its_error(values):
    values = torch.tensor(values, dtype=torch.float32)
    data, once = round_trip(codec_of("fp16"), values)
    assert torch.equal(data, round_trip(codec_of("fp16"), once)[0])
    inside = values.double().clamp(-65504, 65504)
    assert bool(((once.double() - inside).abs() <= (inside.abs() / 2048).clamp_min(2**-25)).all())


def test_fp16_rounds_at_ten_bits_of_fraction_and_saturates():
    values = torch.tensor([0.0, 1 + 1 / 1024, 1 + 1 / 2048, 65504.0, 65520.0, 1e10, -1e10, 2**-24, 1e-9])
    expected = [0.0, 1 + 1 / 1024, 1.0, 65504.0, 65504.0, 65504.0, -65504.0, 2**-24, 0.0]
    assert round_trip(codec_of("fp16"), values)[1].tolist() == expected


@variants
def test_any_runs_of_whole_units_make_the_same_bytes(name, params):
    codec = codec_of(name, params)
    assert codec.name == name
    assert CHUNK % codec.granularity == 0
    unit = codec.granularity
    values = normal(4 * unit + 3)
    whole, decoded = round_trip(codec, values, nonce=7)
    cuts = [0, 2 * unit, 3 * unit, values.numel()]
    runs = [round_trip(codec, values[a:b], nonce=7) for a, b in pairwise(cuts)]
    assert torch.equal(whole, torch.cat([data for data, _ in runs]))
    assert torch.equal(decoded, torch.cat([part for _, part in runs]))
    assert codec.nbytes(values.numel()) == sum(codec.nbytes(b - a) for a, b in pairwise(cuts))


@variants
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 63, 1000])
def test_every_byte_is_written_and_short_vectors_round_trip(name, params, numel):
    codec = codec_of(name, params)
    values = normal(numel)
    codes = []
    for fill in (0, 255):
        data = torch.full((codec.nbytes(numel),), fill, dtype=torch.uint8)
        codec.encode(values, data)
        codes.append(data)
    assert torch.equal(*codes)
    decoded = torch.full((numel,), float("nan"))
    codec.decode(codes[0], decoded)
    assert bool(decoded.isfinite().all())


@variants
def test_the_residual_is_what_the_bytes_do_not_say(name, params):
    codec = codec_of(name, params)
    values = normal(2 * codec.granularity + 1001)
    data, decoded = round_trip(codec, values, nonce=3)
    rest, again = values.clone(), torch.empty_like(data)
    codec.encode_residual(rest, again, nonce=3)
    assert torch.equal(again, data)
    assert torch.equal(rest, values - decoded)


@variants
def test_error_feedback_sends_everything_in_the_end(name, params):
    codec = codec_of(name, params)
    sent, left, total = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)
    for k in range(5):
        x = normal(1000, seed=k)
        total += x
        left += x
        data, decoded = torch.empty(codec.nbytes(1000), dtype=torch.uint8), torch.empty(1000)
        codec.encode_residual(left, data, nonce=k)
        codec.decode(data, decoded, nonce=k)
        sent += decoded
    torch.testing.assert_close((sent + left).double(), total, atol=2e-5, rtol=0)


@variants
def test_zeros_stay_zeros(name, params):
    codec = codec_of(name, params)
    assert round_trip(codec, torch.zeros(1001))[1].eq(0).all()


@variants
def test_one_element_and_equal_elements_stay_finite(name, params):
    codec = codec_of(name, params)
    for value in (1.5, -3e-41, 2e37, 1e-30):
        for numel in (1, 77):
            _, decoded = round_trip(codec, torch.full((numel,), value))
            assert bool(decoded.isfinite().all())


@variants
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_breaks_nothing(name, params, bad):
    codec = codec_of(name, params)
    for values in (torch.full((300,), bad), torch.cat([normal(150), torch.tensor([bad]), normal(149)])):
        before = values.clone()
        data, decoded = round_trip(codec, values)
        assert data.numel() == codec.nbytes(300)
        assert decoded.numel() == 300
        assert torch.equal(values.view(torch.int32), before.view(torch.int32))
        codec.encode_residual(values, data)


@variants
def test_header_fields_build_the_same_codec(name, params):
    codec = codec_of(name, params)
    again = codec_of(codec.name, json.loads(json.dumps(dict(codec.params))))
    assert (again.name, again.params) == (codec.name, codec.params)
    assert torch.equal(round_trip(codec, normal(500))[0], round_trip(again, normal(500))[0])


def test_traits_say_what_a_checker_needs():
    assert codec_of("fp32").plain
    assert codec_of("fp32").traits.lossless
    lossy = [codec_of(name) for name in CODECS if name != "fp32"]
    assert not any(codec.plain or codec.traits.lossless for codec in lossy)
    assert [codec.name for codec in lossy if codec.traits.shared_seed] == ["mask"]
    assert [codec.name for codec in lossy if codec.traits.linear] == ["mask"]


def test_unknown_codecs_and_parameters_are_refused():
    with pytest.raises(SyncError, match="RD-404: there is no codec 'int9'"):
        codec_of("int9")
    with pytest.raises(SyncError, match="RD-404: codec 'bf16' does not take"):
        codec_of("bf16", {"block": 4})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("int8", {"block": 3}),
        ("int8", {"block": 0}),
        ("int8", {"block": 64.0}),
        ("int4", {"rounding": "up"}),
        ("2bit", {"codebook": "guess"}),
        ("1bit", {"codebook": ""}),
        ("e3m0", {"block": 64}),
        ("topk", {"k": 0}),
        ("topk", {"k": 65, "block": 64}),
        ("topk", {"block": 100}),
        ("topk", {"values": "topk"}),
        ("topk", {"values": "fp32", "codebook": "quantile"}),
        ("mask", {"p": 0.0}),
        ("mask", {"p": 1.5}),
        ("mask", {"p": "much"}),
    ],
)
def test_parameters_that_cannot_be_are_refused(name, params):
    with pytest.raises(SyncError, match="RD-404"):
        codec_of(name, params)


def test_another_process_makes_the_same_bytes_and_reads_them():
    code = """
import sys, torch
from ray_diloco.outer.codec import codec_of
name, params, numel = eval(sys.stdin.readline())
codec = codec_of(name, params)
data = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(1)), data, nonce=9)
decoded = torch.empty(numel)
codec.decode(data, decoded, nonce=9)
print(data.numpy().tobytes().hex(), decoded.numpy().tobytes().hex())
"""
    for name, params in [("topk", {"k": 9, "block": 64, "values": "2bit"}), ("mask", {"p": 0.1, "block": 256})]:
        done = subprocess.run(
            [sys.executable, "-c", code], input=repr((name, params, 1000)), capture_output=True, text=True, timeout=300
        )
        data, decoded = round_trip(codec_of(name, params), normal(1000), nonce=9)
        expected = f"{data.numpy().tobytes().hex()} {decoded.numpy().tobytes().hex()}"
        assert done.stdout.strip() == expected, done.stderr


def test_the_mathematics_starts_without_numba():
    code = "import sys; from ray_diloco.outer.codec import codec_of; codec_of('bf16'); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
