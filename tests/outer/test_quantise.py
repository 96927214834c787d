"""The quantisers against plain numpy, bit for bit, and against what algorithms.md says of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.outer.codec import codec_of
from ray_diloco.outer.quantise import UNIT

f32 = np.float32
LANES = 64
BOUNDED = st.floats(-(2.0**60), 2.0**60, width=32)
vectors = st.lists(BOUNDED, min_size=1, max_size=70).map(lambda v: np.array(v, f32))


def encode(codec, values, nonce=0):
    data = torch.empty(codec.nbytes(values.size), dtype=torch.uint8)
    codec.encode(torch.from_numpy(values.copy()), data, nonce)
    return data.numpy()


def decode(codec, data, numel):
    decoded = torch.empty(numel)
    codec.decode(torch.from_numpy(data), decoded)
    return decoded.numpy()


def round_trip(codec, values, nonce=0):
    return decode(codec, encode(codec, values, nonce), values.size)


def normal(numel, seed=1):
    return np.random.default_rng(seed).standard_normal(numel, dtype=f32)


def units(values, unit):
    return [values[i : i + unit] for i in range(0, values.size, unit)]


def pack(codes, bits):
    """Byte i: code i in its lowest bits, code i + q above it, and so on; q is the number of bytes."""
    parts = 8 // bits
    q = -(-codes.size // parts)
    padded = np.zeros(parts * q, np.uint8)
    padded[: codes.size] = codes
    return np.bitwise_or.reduce([padded[j * q : (j + 1) * q] << (bits * j) for j in range(parts)]).astype(np.uint8)


def fp32_bytes(*numbers):
    return np.array(numbers, f32).view(np.uint8)


def linear_reference(values, levels, bits):
    a = np.abs(values).max()
    up = f32(2.0**64) if a < f32(2.0**-64) else f32(1.0)
    inverse = f32(levels) / (a * up) if a > 0 else f32(0.0)
    q = np.rint(values * up * inverse)
    decoded = a * (q * f32(1.0 / levels))
    codes = q.astype(np.int8).view(np.uint8) if bits == 8 else (q + 8).astype(np.uint8)
    if bits == 4 and codes.size % 2:
        codes = np.append(codes, np.uint8(8))
    return np.concatenate([fp32_bytes(a), pack(codes, bits)]), decoded


@np.errstate(over="ignore")
def e3m0_reference(values, stride=1):
    magnitude = np.abs(values)
    sample = magnitude[::stride] if magnitude[::stride].any() else magnitude
    nonzero = np.sort(sample[sample > 0])
    s = nonzero[(nonzero.size - 1) // 2] if nonzero.size else f32(0.0)
    up = f32(2.0**64) if s < f32(2.0**-64) else f32(1.0)
    borders = np.maximum(s * up * np.array([0.125, 0.375, 0.75, 1.5, 3.0, 6.0, 12.0], f32), f32(2.0**-149))
    e = (magnitude[:, None] * up >= borders).sum(1)
    levels = np.minimum(np.append(f32(0.0), s * np.array([0.25, 0.5, 1, 2, 4, 8, 16], f32)), np.finfo(f32).max)
    codes = e + 8 * ((values < 0) & (e > 0))
    return np.concatenate([fp32_bytes(s), pack(codes, 4)]), np.where(values < 0, -levels[e], levels[e]).astype(f32)


def lane_sums(values, groups, number):
    """Sum of each group: element i goes to lane i mod LANES, four rows of lanes at a time while there are four, added
    in the precision of the values as (r0 + r1) + (r2 + r3), all else in float64; in the end the lanes in order."""
    whole = values.size // (4 * LANES) * (4 * LANES)
    lanes = np.zeros((number, LANES))
    for group in range(number):
        rows = np.where(groups == group, values, values.dtype.type(0))[:whole].reshape(-1, 4, LANES)
        for r0, r1, r2, r3 in rows:
            lanes[group] += (r0 + r1) + (r2 + r3)
    rest = np.arange(whole, values.size)
    np.add.at(lanes, (groups[rest], rest % LANES), values[rest].astype(np.float64))
    return np.cumsum(lanes, axis=1)[:, -1]


def quarter_sums(values, codes):
    """As `lane_sums` for two bits, but the four rows are those of the quarters that a byte holds."""
    n, q = values.size, -(-values.size // 4)
    whole = max(n - 3 * q, 0) // LANES * LANES
    lanes = np.zeros((4, LANES))
    for group in range(4):
        masked = np.where(codes == group, values, f32(0))
        p0, p1, p2, p3 = (masked[part * q : part * q + whole] for part in range(4))
        for row in ((p0 + p1) + (p2 + p3)).reshape(-1, LANES):
            lanes[group] += row
    for part in range(4):
        rest = np.arange(part * q + whole, min((part + 1) * q, n))
        np.add.at(lanes, (codes[rest], (rest - part * q) % LANES), values[rest].astype(np.float64))
    return np.cumsum(lanes, axis=1)[:, -1]


def mean_and_sigma(values):
    d = values.astype(np.float64) - np.float64(values[0])
    nothing = np.zeros(values.size, int)
    mean = lane_sums(d, nothing, 1)[0] / values.size
    return np.float64(values[0]) + mean, np.sqrt(max(lane_sums(d * d, nothing, 1)[0] / values.size - mean * mean, 0.0))


def means(sums, codes):
    counts = np.bincount(codes, minlength=sums.size)
    return np.where(counts > 0, sums / np.maximum(counts, 1), 0.0).astype(f32)


def bin_mean8_reference(values):
    mean, sigma = mean_and_sigma(values)
    low, inverse = mean - 3.0 * sigma, 256.0 / (6.0 * sigma) if sigma > 0 else 0.0
    if 2.0**-100 < sigma < 2.0**120:
        codes = np.clip((values - f32(low)) * f32(inverse), f32(0), f32(255)).astype(np.uint8)
    else:
        codes = np.clip((values.astype(np.float64) - low) * inverse, 0, 255).astype(np.uint8)
    sums = np.zeros((256, 4))
    np.add.at(sums, (codes, np.arange(values.size) % 4), values.astype(np.float64))
    book = means((sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3]), codes)
    return np.concatenate([fp32_bytes(*book), codes]), book[codes]


def codebook_reference(values, bits, codebook):
    parts = 2**bits
    if codebook == "quantile":
        stride = values.size // 2048 | 1
        ordered = np.sort(values[::stride])
        borders = np.array([ordered[ordered.size * j // parts] for j in range(1, parts)])
    else:
        mean, sigma = mean_and_sigma(values)
        borders = np.array([mean + sigma * (6.0 * j / parts - 3.0) for j in range(1, parts)]).astype(f32)
    codes = (values[:, None] >= borders).sum(1)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = quarter_sums(values, codes) if bits == 2 else lane_sums(values, codes, parts)
    if not np.isfinite(sums).all():
        sums = np.array([np.cumsum(values[codes == c], dtype=np.float64)[-1:].sum() for c in range(parts)])
    book = means(sums, codes)
    return np.concatenate([fp32_bytes(*book), pack(codes, bits)]), book[codes]


REFERENCES = {
    ("int8", ("block", 32)): (32, lambda x: linear_reference(x, 127, 8)),
    ("int8", ("block", 4096)): (4096, lambda x: linear_reference(x, 127, 8)),
    ("int4", ("block", 16)): (16, lambda x: linear_reference(x, 7, 4)),
    ("int4", ("block", 128)): (128, lambda x: linear_reference(x, 7, 4)),
    ("e3m0", None): (UNIT, lambda x: e3m0_reference(x, x.size // 4096 | 1)),
    ("e3m0", ("scale", "median")): (UNIT, e3m0_reference),
    ("int8_bin_mean", None): (UNIT, bin_mean8_reference),
    ("2bit", ("codebook", "quantile")): (UNIT, lambda x: codebook_reference(x, 2, "quantile")),
    ("2bit", ("codebook", "bin_mean")): (UNIT, lambda x: codebook_reference(x, 2, "bin_mean")),
    ("1bit", ("codebook", "quantile")): (UNIT, lambda x: codebook_reference(x, 1, "quantile")),
    ("1bit", ("codebook", "bin_mean")): (UNIT, lambda x: codebook_reference(x, 1, "bin_mean")),
}
references = pytest.mark.parametrize("key", REFERENCES, ids=str)


def check(key, values):
    codec = codec_of(key[0], dict([key[1]] if key[1] else []))
    unit, reference = REFERENCES[key]
    data, decoded = (np.concatenate(part) for part in zip(*map(reference, units(values, unit)), strict=True))
    got = encode(codec, values)
    np.testing.assert_array_equal(got, data)
    np.testing.assert_array_equal(decode(codec, got, values.size), decoded)


@references
@given(vectors)
@settings(deadline=None, max_examples=60)
def test_short_vectors_equal_plain_numpy_bit_for_bit(key, values):
    check(key, values)


@references
@pytest.mark.parametrize("scale", [1.0, 2.0**-70, 3e-39, 1e30, 5e37])
def test_more_than_a_unit_equals_plain_numpy_bit_for_bit(key, scale):
    values = normal(UNIT + 4099) * f32(scale)
    values[::5] = 0
    check(key, values)


def test_sizes_are_those_of_the_formulas():
    d = 2 * UNIT + 5
    assert codec_of("int8").nbytes(d) == d + 4 * (2 * UNIT // 4096 + 1)
    assert codec_of("int4").nbytes(d) == (2 * UNIT // 2 + 3) + 4 * (2 * UNIT // 128 + 1)
    assert codec_of("e3m0").nbytes(d) == 2 * UNIT // 2 + 3 + 3 * 4
    assert codec_of("int8_bin_mean").nbytes(d) == d + 3 * 1024
    assert codec_of("2bit").nbytes(d) == 2 * UNIT // 4 + 2 + 3 * 16
    assert codec_of("1bit").nbytes(d) == 2 * UNIT // 8 + 1 + 3 * 8


@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", 14)])
@given(vectors)
@settings(deadline=None)
def test_linear_codecs_are_within_half_a_step(name, steps, values):
    codec = codec_of(name, {"block": 16})
    error = np.abs(round_trip(codec, values).astype(np.float64) - values)
    for part, wrong in zip(units(values, 16), units(error, 16), strict=True):
        assert wrong.max() <= np.abs(part).max() / steps * (1 + 1e-4) + 2.0**-149


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(vectors)
@settings(deadline=None)
def test_linear_codecs_are_odd_keep_the_largest_and_are_idempotent(name, values):
    codec = codec_of(name, {"block": 16})
    once = round_trip(codec, values)
    np.testing.assert_array_equal(round_trip(codec, -values), -once)
    np.testing.assert_array_equal(round_trip(codec, once), once)
    for part, decoded in zip(units(values, 16), units(once, 16), strict=True):
        assert np.abs(decoded).max() == np.abs(part).max()


def test_int8_by_hand():
    values = np.array([127.0, -127.0, 1.0, 0.4, -2.5, 3.5, 0.0, 63.0], f32)
    codec = codec_of("int8", {"block": 8})
    data = encode(codec, values)
    assert data[:4].view(f32)[0] == 127.0
    assert data[4:].view(np.int8).tolist() == [127, -127, 1, 0, -2, 4, 0, 63]


def test_int4_by_hand():
    codec = codec_of("int4", {"block": 4})
    data = encode(codec, np.array([7.0, -3.0, 2.4, -7.0, 1.0], f32))
    assert data[:4].view(f32)[0] == 7.0
    assert data[4:6].tolist() == [(2 + 8) << 4 | (7 + 8), (-7 + 8) << 4 | (-3 + 8)]
    assert data[6:10].view(f32)[0] == 1.0
    assert data[10:].tolist() == [8 << 4 | 15]


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
def test_stochastic_rounding_is_unbiased(name, levels):
    values = np.array([1.0, 0.3, -0.77, 0.001, 0.5, -0.0305, 0.0, -1.0], f32)
    total, draws = np.zeros(8), 4000
    codec = codec_of(name, {"block": 8, "rounding": "stochastic", "seed": 11})
    for nonce in range(draws):
        decoded = round_trip(codec, values, nonce)
        assert np.abs(decoded - values).max() <= (1 + 1e-5) / levels
        total += decoded
    # Six standard errors of a mean of numbers that are a step apart.
    assert np.abs(total / draws - values).max() <= 6 * 0.5 / levels / np.sqrt(draws)


def test_stochastic_rounding_depends_on_seed_nonce_and_block_and_on_nothing_else():
    values = normal(4096)
    made = [
        encode(codec_of("int4", {"rounding": "stochastic", "seed": seed}), values, nonce).tobytes()
        for seed, nonce in [(0, 0), (0, 1), (1, 0), (0, 0)]
    ]
    assert made[0] == made[3]
    assert len(set(made)) == 3


def test_neighbouring_blocks_do_not_round_alike():
    codec = codec_of("int8", {"block": 64, "rounding": "stochastic"})
    values = np.full((2, 64), 0.5, f32)
    values[0, 0], values[1, 0] = 127.0, 127.5
    rounded = round_trip(codec, values.ravel()).reshape(2, 64)[:, 1:] > 0
    assert 16 < (rounded[0] != rounded[1]).sum() < 47


def test_e3m0_has_fifteen_values_and_gives_the_nearest():
    values = np.linspace(-40, 40, 8001).astype(f32)
    values = np.append(values, np.full(8001, 2.0, f32))
    decoded = round_trip(codec_of("e3m0"), values)
    levels = [sign * 2.0 * 2.0 ** (e - 3) for e in range(1, 8) for sign in (-1, 1)] + [0.0]
    assert sorted(set(decoded.tolist())) == sorted(levels)
    nearest = np.abs(values[:, None] - np.array(levels)).min(1)
    np.testing.assert_array_equal(np.abs(values - decoded), nearest.astype(f32))
    inside = (np.abs(values) >= 0.5) & (np.abs(values) <= 32)
    assert (np.abs(values - decoded)[inside] <= np.abs(values[inside]) / 3 * (1 + 1e-6)).all()


@pytest.mark.parametrize("numel", [1, 2, 3, 101, 4096, 70001, UNIT])
@pytest.mark.parametrize("kind", ["normal", "cubed", "few values", "zeros and one", "two sizes", "ascending"])
def test_the_scale_of_e3m0_is_the_exact_median_of_what_is_not_zero(numel, kind):
    values = normal(numel)
    if kind == "cubed":
        values = values**7
    elif kind == "few values":
        values = np.rint(values)
    elif kind == "zeros and one":
        values[1:] = 0
    elif kind == "two sizes":
        values[::2] *= f32(1e20)
    elif kind == "ascending":
        values = np.sort(values)
    scale = encode(codec_of("e3m0", {"scale": "median"}), values)[:4].view(f32)[0]
    nonzero = torch.from_numpy(values[values != 0]).abs()
    assert scale == (nonzero.median().item() if nonzero.numel() else 0.0)


@given(vectors, st.integers(-40, 40))
@settings(deadline=None)
def test_e3m0_is_odd_and_equivariant_under_powers_of_two(values, power):
    values = values[np.abs(values) > 2.0**-60] if (np.abs(values) > 2.0**-60).any() else np.ones(1, f32)
    codec = codec_of("e3m0")
    once = round_trip(codec, values)
    np.testing.assert_array_equal(round_trip(codec, -values), -once)
    factor = f32(2.0**power)
    np.testing.assert_array_equal(round_trip(codec, values * factor), once * factor)


def test_e3m0_is_idempotent_on_what_it_makes_of_a_normal_vector():
    codec = codec_of("e3m0")
    once = round_trip(codec, normal(UNIT))
    np.testing.assert_array_equal(round_trip(codec, once), once)


CODEBOOKS = [
    ("int8_bin_mean", {}),
    ("2bit", {"codebook": "quantile"}),
    ("2bit", {"codebook": "bin_mean"}),
    ("1bit", {"codebook": "quantile"}),
    ("1bit", {"codebook": "bin_mean"}),
]


@pytest.mark.parametrize(("name", "params"), CODEBOOKS)
@given(vectors)
@settings(deadline=None, max_examples=50)
def test_codebooks_of_means_keep_the_sum(name, params, values):
    decoded = round_trip(codec_of(name, params), values)
    scale = np.abs(values.astype(np.float64)).sum()
    assert abs(decoded.astype(np.float64).sum() - values.astype(np.float64).sum()) <= 1e-6 * scale + 1e-37


@pytest.mark.parametrize(("name", "params"), CODEBOOKS)
def test_equal_elements_are_exact(name, params):
    for value in (0.1, -7e-41, 3e38):
        values = np.full(1001, value, f32)
        np.testing.assert_array_equal(round_trip(codec_of(name, params), values), values)


@pytest.mark.parametrize(("name", "params"), CODEBOOKS[1:])
def test_small_codebooks_are_idempotent_on_what_they_make_of_a_normal_vector(name, params):
    codec = codec_of(name, params)
    once = round_trip(codec, normal(10000))
    np.testing.assert_allclose(round_trip(codec, once), once, rtol=1e-6)


def test_bin_mean_of_eight_bits_is_within_a_bin_inside_three_sigma():
    values = normal(50000) * f32(0.01) + f32(3.0)
    decoded = round_trip(codec_of("int8_bin_mean"), values)
    sigma = values.astype(np.float64).std()
    inside = np.abs(values - values.astype(np.float64).mean()) < (3 - 6 / 256) * sigma
    assert np.abs(decoded - values)[inside].max() <= 6 * sigma / 256 * 1.0001
    assert len(set(decoded.tolist())) <= 256


def test_quantile_codebooks_fill_their_parts_equally():
    for name, parts in [("2bit", 4), ("1bit", 2)]:
        decoded = round_trip(codec_of(name, {"codebook": "quantile"}), normal(UNIT) ** 3)
        _, counts = np.unique(decoded, return_counts=True)
        assert counts.size == parts
        assert np.abs(counts / UNIT - 1 / parts).max() < 0.05


def test_two_bits_by_hand():
    data = encode(codec_of("2bit"), np.array([4.0, 1.0, 3.0, 2.0, 8.0, 5.0, 7.0, 6.0, 8.0], f32))
    # Ranks 9 j // 4 of 1 2 3 4 5 6 7 8 8 are 3, 5, 7: parts {1 2} from below 3, {3 4}, {5 6}, {7 8 8}.
    assert data[:16].view(f32).tolist() == [1.5, 3.5, 5.5, f32(23.0 / 3.0)]
    # q = 3: bytes of elements (0, 3, 6), (1, 4, 7), (2, 5, 8).
    assert data[16:].tolist() == [1 | 0 << 2 | 3 << 4, 0 | 3 << 2 | 2 << 4, 1 | 2 << 2 | 3 << 4]
