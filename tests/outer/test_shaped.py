"""Codecs that need the shape of a tensor."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.dct import Dct
from ray_diloco.outer.low_rank import LowRank
from ray_diloco.outer.shaped import shaped_of

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 70)),
    st.tuples(st.integers(0, 20), st.integers(1, 70)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 12)),
)
seeds = st.integers(0, 10_000)
dcts = st.builds(Dct, st.sampled_from([1, 3, 8, 64]), st.integers(1, 12), st.sampled_from(["fp32", "bf16", "sign"]))
low_ranks = st.builds(LowRank, st.integers(1, 6), st.sampled_from(["fp32", "bf16"]))


def drawn(shape, seed=0, scale=1.0):
    """Flat fp32 normal numbers."""
    return scale * torch.randn(math.prod(shape), generator=torch.Generator().manual_seed(seed))


def encoded(codec, values, shape, **settings):
    target = torch.full((codec.nbytes(shape),), 255, dtype=torch.uint8)
    codec.encode(values, shape, target, **settings)
    return target


def decoded(codec, target, shape):
    out = torch.full((math.prod(shape),), float("nan"))
    codec.decode(target, shape, out)
    return out


def there_and_back(codec, values, shape):
    return decoded(codec, encoded(codec, values, shape), shape)


def cosine_transform(x):
    """Orthonormal DCT-II of a vector, from its definition in float64."""
    n = len(x)
    sums = [sum(v * math.cos(math.pi * (i + 0.5) * k / n) for i, v in enumerate(x)) for k in range(n)]
    return [math.sqrt((1 if k == 0 else 2) / n) * s for k, s in enumerate(sums)]


def transform_of_tile(tile):
    rows = np.array([cosine_transform(row) for row in tile.astype(np.float64)])
    return np.array([cosine_transform(column) for column in rows.T]).T


def largest_divisor(n, most):
    return max(d for d in range(1, most + 1) if n % d == 0)


def tiles_of(values, m, n, block):
    high, wide = largest_divisor(m, block), largest_divisor(n, block)
    matrix = values.numpy().reshape(m, n)
    return [matrix[i : i + high, j : j + wide] for i in range(0, m, high) for j in range(0, n, wide)]


@settings(deadline=None)
@given(st.one_of(dcts, low_ranks), shapes, seeds)
def test_bytes_decode_to_the_same_elements_wherever_they_lie(codec, shape, seed):
    values = drawn(shape, seed)
    target = encoded(codec, values, shape)
    out = decoded(codec, target, shape)
    assert torch.isfinite(out).all()
    # Another process: the parameters and the bytes are all that it gets, and those may begin at an odd address.
    other = shaped_of(codec.name, dict(codec.params))
    moved = torch.frombuffer(bytearray(b"\x00" + target.numpy().tobytes()), dtype=torch.uint8)[1:]
    assert torch.equal(decoded(other, moved, shape), out)
    odd = torch.zeros(codec.nbytes(shape) + 1, dtype=torch.uint8)[1:]
    codec.encode(values, shape, odd)
    assert torch.equal(odd, target)
    assert torch.equal(values, drawn(shape, seed))


@settings(deadline=None)
@given(st.one_of(dcts.filter(lambda codec: codec.params["values"] != "sign"), low_ranks), shapes, seeds)
def test_the_residual_is_what_the_bytes_do_not_say(codec, shape, seed):
    values = drawn(shape, seed)
    left = values.clone()
    target = torch.empty(codec.nbytes(shape), dtype=torch.uint8)
    codec.encode_residual(left, shape, target)
    assert torch.equal(target, encoded(codec, values, shape))
    assert torch.equal(left, values - decoded(codec, target, shape))


@settings(deadline=None)
@given(st.one_of(dcts, low_ranks), shapes)
def test_zeros_stay_zeros(codec, shape):
    values = torch.zeros(math.prod(shape))
    if codec.params["values"] != "sign":
        assert torch.equal(there_and_back(codec, values, shape), values)
    left = values.clone()
    codec.encode_residual(left, shape, torch.empty(codec.nbytes(shape), dtype=torch.uint8))
    assert torch.equal(left, values)


@pytest.mark.parametrize("codec", [Dct(8, 3), LowRank(2)])
def test_what_was_sent_and_what_is_left_add_up_to_what_came_in(codec):
    shape = (12, 16)
    memory = codec.memory(shape)
    error, sent, given_in = (torch.zeros(192, dtype=torch.float64) for _ in range(3))
    for k in range(10):
        values = drawn(shape, k)
        given_in += values
        error = (error.float() + values).double()
        left = error.float()
        target = torch.empty(codec.nbytes(shape), dtype=torch.uint8)
        codec.encode_residual(left, shape, target, memory)
        sent += decoded(codec, target, shape)
        error = left.double()
    torch.testing.assert_close(sent + error, given_in, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 10), (3, 2, 8), (7,), (6, 128), (1, 1), ()])
@pytest.mark.parametrize("block", [4, 64])
def test_coefficients_are_those_of_the_definition_tile_by_tile(shape, block):
    values = drawn(shape, 3)
    m, n = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
    expected = [transform_of_tile(tile).reshape(-1) for tile in tiles_of(values, m, n, block)]
    found = Dct(block, 1).transform(values, shape)
    np.testing.assert_allclose(found.numpy(), np.array(expected), atol=2e-6)


@settings(deadline=None)
@given(shapes, seeds, st.sampled_from([1, 3, 8, 64]))
def test_the_transform_keeps_norms_and_is_undone_by_its_inverse(shape, seed, block):
    codec, values = Dct(block, 1), drawn(shape, seed)
    coefficients = codec.transform(values, shape)
    assert float(coefficients.double().norm()) == pytest.approx(float(values.double().norm()), rel=1e-6)
    back = torch.empty_like(values)
    codec.inverse(coefficients.view(-1), shape, back)
    torch.testing.assert_close(back, values, rtol=0, atol=1e-5)


@settings(deadline=None)
@given(shapes, seeds, st.sampled_from([3, 8, 64]), st.integers(1, 30))
def test_the_bound_of_top_k_carries_over(shape, seed, block, k):
    codec, values = Dct(block, k), drawn(shape, seed)
    tile = codec.transform(values, shape).shape[1]
    left = float((values - there_and_back(codec, values, shape)).double().square().sum())
    assert left <= (1 - min(k, tile) / tile) * float(values.double().square().sum()) + 1e-5


@pytest.mark.parametrize("shape", [(64, 128), (96,), (5, 7), ()])
def test_a_tile_that_is_kept_whole_is_exact(shape):
    codec = Dct(64, 4096)
    values = drawn(shape, 1)
    left = values.clone()
    codec.encode_residual(left, shape, torch.empty(codec.nbytes(shape), dtype=torch.uint8))
    assert float(left.abs().max()) <= 1e-6 * max(1.0, float(values.abs().max()))


def test_the_largest_coefficients_of_each_tile_travel():
    codec, shape = Dct(4, 2), (8, 4)
    # Two tiles of 4 × 4, each with two large coefficients and a small one, from the definition backwards.
    wanted = np.zeros((2, 4, 4))
    wanted[0, 1, 2], wanted[0, 3, 0], wanted[0, 2, 2] = -5.0, 3.0, 1.0
    wanted[1, 0, 0], wanted[1, 3, 3], wanted[1, 1, 1] = 2.0, -4.0, 0.5
    cosines = np.array([cosine_transform(row) for row in np.eye(4)]).T
    values = torch.from_numpy(np.concatenate([cosines.T @ tile @ cosines for tile in wanted])).float().reshape(-1)
    out, sent = torch.empty(32), torch.empty(32, dtype=torch.bool)
    codec.decode_coefficients(encoded(codec, values, shape), shape, out, sent)
    wanted[0, 2, 2] = wanted[1, 1, 1] = 0
    np.testing.assert_allclose(out.numpy(), wanted.reshape(-1), atol=1e-5)
    assert sent.tolist() == (wanted.reshape(-1) != 0).tolist()


def test_numbers_of_coefficients_lie_bit_by_bit_before_the_values():
    # Tiles of three elements: two bits each.  Kept: the constant of [1, 1, 1] and of [2, 2, 2], number 0, then
    # number 1 of [1, 0, −1] (√2).
    codec = Dct(3, 1)
    values = torch.tensor([1.0, 1, 1, 2, 2, 2, 1, 0, -1])
    target = encoded(codec, values, (9,))
    assert target[0] == 0b01_00_00
    np.testing.assert_allclose(
        target[1:].clone().view(torch.float32), [math.sqrt(3), 2 * math.sqrt(3), math.sqrt(2)], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("shape", "bits"),
    # Tiles of 64 × 64 (12 bits), of 60 (1-D), of 50257 = 29 · 1733 → 4 × 29 = 116 (7 bits), of 1.
    [((128, 256), 8 * 32 * 12), ((120,), 2 * 32 * 6), ((4, 50257), 1733 * 32 * 7), ((), 0), ((0, 5), 0)],
)
def test_sizes_of_cosine_codes_follow_the_formula(shape, bits):
    kept = {(128, 256): 8 * 32, (120,): 2 * 32, (4, 50257): 1733 * 32, (): 1, (0, 5): 0}[shape]
    assert Dct().nbytes(shape) == math.ceil(bits / 8) + 4 * kept
    assert Dct(values="bf16").nbytes(shape) == math.ceil(bits / 8) + 2 * kept
    assert Dct(values="sign").nbytes(shape) == math.ceil(bits / 8) + math.ceil(kept / 8)


def test_signs_travel_as_one_bit_and_the_residual_lacks_the_kept_coefficients():
    shape, values = (8, 16), drawn((8, 16), 5)
    whole, signs = Dct(8, 5), Dct(8, 5, "sign")
    exact, one, sent = torch.empty(128), torch.empty(128), torch.empty(128, dtype=torch.bool)
    whole.decode_coefficients(encoded(whole, values, shape), shape, exact, sent)
    signs.decode_coefficients(encoded(signs, values, shape), shape, one)
    assert int(sent.sum()) == 10
    assert torch.equal(one, exact.sign())
    left, left_of_whole = values.clone(), values.clone()
    signs.encode_residual(left, shape, torch.empty(signs.nbytes(shape), dtype=torch.uint8))
    whole.encode_residual(left_of_whole, shape, torch.empty(whole.nbytes(shape), dtype=torch.uint8))
    assert torch.equal(left, left_of_whole)


def test_coefficients_merge_over_those_who_sent_them():
    codec, shape = Dct(8, 3), (8, 8)
    senders = [drawn(shape, k) for k in range(3)]
    total, count = torch.zeros(64), torch.zeros(64)
    by_hand = np.zeros(64)
    kept = []
    for values in senders:
        out, sent = torch.empty(64), torch.empty(64, dtype=torch.bool)
        codec.decode_coefficients(encoded(codec, values, shape), shape, out, sent)
        total, count = total + out, count + sent
        coefficients = transform_of_tile(values.numpy().reshape(8, 8)).reshape(-1)
        kept.append({int(k): coefficients[k] for k in np.argsort(-abs(coefficients))[:3]})
    for k in range(64):
        found = [one[k] for one in kept if k in one]
        by_hand[k] = sum(found) / len(found) if found else 0.0
    mean = torch.where(count > 0, total / count.clamp(min=1), 0.0)
    np.testing.assert_allclose(mean.numpy(), by_hand, atol=1e-5)


def test_a_coefficient_that_a_tile_does_not_have_is_refused():
    codec = Dct(3, 1)
    target = encoded(codec, drawn((3,)), (3,))
    target[0] = 3
    with pytest.raises(SyncError) as caught:
        decoded(codec, target, (3,))
    assert caught.value.number == 405


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(10, 40), st.integers(10, 40), seeds)
def test_a_matrix_of_low_rank_is_exact(rank, actual, m, n, seed):
    actual = min(rank, actual)
    matrix = (drawn((m, actual), seed).view(m, -1) @ drawn((actual, n), seed + 1).view(actual, -1)).reshape(-1)
    left = matrix.double() - there_and_back(LowRank(rank), matrix, (m, n))
    assert float(left.norm()) <= 1e-6 * float(matrix.norm()) + 1e-6


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(10, 40), st.integers(10, 40), seeds)
def test_what_factors_leave_is_orthogonal_to_them(rank, m, n, seed):
    values = drawn((m, n), seed)
    codec = LowRank(rank)
    left = values.clone()
    target = torch.empty(codec.nbytes((m, n)), dtype=torch.uint8)
    codec.encode_residual(left, (m, n), target)
    P = target[: 4 * m * rank].clone().view(torch.float32).view(m, rank)
    torch.testing.assert_close(P.T @ P, torch.eye(rank), rtol=0, atol=1e-6)
    assert float((P.T @ left.view(m, n)).abs().max()) <= 1e-5
    said = float((values - left).double().square().sum())
    assert said + float(left.double().square().sum()) == pytest.approx(float(values.double().square().sum()), rel=1e-5)


def test_rounds_of_a_constant_matrix_approach_the_best_factors():
    m, n, rank = 24, 18, 2
    values = drawn((m, n), 4)
    singular = torch.linalg.svdvals(values.view(m, n).double())
    best = float(singular[rank:].square().sum().sqrt())
    codec = LowRank(rank)
    memory = codec.memory((m, n))
    errors = [
        float((values - decoded(codec, encoded(codec, values, (m, n), memory=memory), (m, n))).norm())
        for _ in range(200)
    ]
    assert errors[0] > errors[3] > best * 0.999999
    assert errors[-1] == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("actual", [0, 1])
def test_a_round_of_lower_rank_does_not_spoil_the_next(actual):
    codec, shape = LowRank(3), (20, 16)
    memory = codec.memory(shape)
    poor = (drawn((20, 1), 2).view(20, 1) @ drawn((1, 16), 3).view(1, 16)).reshape(-1) * actual
    for _ in range(3):
        encoded(codec, poor, shape, memory=memory)
    rich = (drawn((20, 3), 4).view(20, 3) @ drawn((3, 16), 5).view(3, 16)).reshape(-1)
    back = decoded(codec, encoded(codec, rich, shape, memory=memory), shape)
    torch.testing.assert_close(back, rich, rtol=0, atol=1e-4)


def test_the_nonce_decides_where_a_sender_without_memory_begins():
    codec, shape = LowRank(2), (10, 8)
    values = drawn(shape, 1)
    first = encoded(codec, values, shape, nonce=7)
    assert torch.equal(encoded(codec, values, shape, nonce=7), first)
    assert torch.equal(encoded(codec, values, shape, memory=codec.memory(shape), nonce=7), first)
    assert not torch.equal(encoded(codec, values, shape, nonce=8), first)


def test_the_sender_iterates_from_what_the_round_before_found():
    codec, shape = LowRank(2), (10, 8)
    memory = codec.memory(shape)
    encoded(codec, drawn(shape, 1), shape, memory=memory)
    values, start = drawn(shape, 2).view(shape).double(), memory.double()
    P = np.linalg.qr((values @ start).numpy())[0]
    back = decoded(codec, encoded(codec, values.float().view(-1), shape, memory=memory), shape)
    np.testing.assert_allclose(back.view(shape).numpy(), P @ (P.T @ values.numpy()), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((100, 50), 4 * 4 * 150),
        ((5, 20, 50), 4 * 4 * 150),
        ((1000,), 4000),
        ((), 4),
        ((1, 64), 4 * 64),
        # 4 · (8 + 8) = 8 · 8: factors as large as the matrix.
        ((8, 8), 4 * 64),
        ((8, 9), 4 * 4 * 17),
        ((0, 9), 0),
    ],
)
def test_sizes_of_factors_follow_the_formula(shape, nbytes):
    assert LowRank(4).nbytes(shape) == nbytes


def test_factors_travel_in_the_codec_that_was_asked_for():
    assert LowRank(4, "bf16").nbytes((100, 50)) == 2 * 4 * 150
    assert LowRank(4, "bf16").nbytes((1000,)) == 4000
    assert LowRank(4, "bf16").params == {"rank": 4, "values": "bf16"}
    matrix = (drawn((30, 2), 4).view(30, 2) @ drawn((2, 20), 5).view(2, 20)).reshape(-1)
    back = there_and_back(LowRank(2, "bf16"), matrix, (30, 20))
    assert 0 < float((back - matrix).norm()) < 0.02 * float(matrix.norm())


@settings(deadline=None)
@given(shapes, seeds, st.integers(1, 6))
def test_tensors_whose_factors_would_not_be_smaller_travel_bit_for_bit(shape, seed, rank):
    codec, values = LowRank(rank), drawn(shape, seed)
    if codec.memory(shape) is None:
        assert codec.nbytes(shape) == 4 * values.numel()
        assert torch.equal(there_and_back(codec, values, shape), values)
    else:
        assert codec.nbytes(shape) < 4 * values.numel()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("wavelet", {}),
        ("dct", {"block": 0}),
        ("dct", {"block": 257}),
        ("dct", {"k": 0}),
        ("dct", {"values": "int9"}),
        ("dct", {"values": "low_rank"}),
        ("dct", {"rank": 3}),
        ("low_rank", {"rank": 0}),
        ("low_rank", {"values": "int9"}),
        ("low_rank", {"values": "fp32", "colour": 1}),
    ],
)
def test_codecs_that_there_are_not_are_refused(name, params):
    with pytest.raises(SyncError) as caught:
        shaped_of(name, params)
    assert caught.value.number == 404
