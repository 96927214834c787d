"""Top-k and random masks against plain numpy, to the byte, and against what algorithms.md says of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_diloco.errors import SyncError
from ray_diloco.outer.chunks import CHUNK
from ray_diloco.outer.codec import codec_of

PLACES_128 = [68, 29, 41, 30, 121, 78]
PLACES_100 = [54, 97, 72, 57, 12]
VALUES = ("fp32", "bf16", "fp16", "int8", "int8_bin_mean", "int4", "e3m0", "2bit", "1bit")
vectors = st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=70).map(
    lambda v: torch.tensor(v, dtype=torch.float32)
)


def normal(numel, seed=1):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encode(codec, values, nonce=0):
    data = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data, nonce)
    return data


def round_trip(codec, values, nonce=0):
    decoded = torch.empty(values.numel())
    codec.decode(encode(codec, values, nonce), decoded, nonce)
    return decoded


def largest(values, k):
    """Indices of the k largest magnitudes, ascending; among equals the first ones."""
    return np.sort(np.argsort(-np.abs(values.numpy()), kind="stable")[:k])


def packed(indices, width):
    """A number whose binary digits are the indices, the first one lowest, as bytes."""
    number = sum(int(index) << (width * j) for j, index in enumerate(indices))
    return number.to_bytes((len(indices) * width + 7) // 8, "little")


def top_k_reference(values, k, block, inner):
    """Bytes and decoded values, block by block."""
    data, decoded = b"", torch.zeros(values.numel())
    for start in range(0, values.numel(), block):
        chunk = values[start : start + block]
        kept = torch.from_numpy(largest(chunk, k))
        # One unit for all that is kept of a block.
        codec = codec_of(inner, {"block": 4096} if inner == "int4" else {})
        data += packed(kept, block.bit_length() - 1) + encode(codec, chunk[kept]).numpy().tobytes()
        decoded[start + kept] = round_trip(codec, chunk[kept])
    return data, decoded


@pytest.mark.parametrize("inner", VALUES)
@pytest.mark.parametrize(("k", "block"), [(128, 4096), (1, 16), (16, 16), (5, 32), (41, 4096)])
def test_top_k_equals_plain_numpy_bit_for_bit(inner, k, block):
    codec = codec_of("topk", {"k": k, "block": block, "values": inner})
    for numel in (1, block - 1, 3 * block, 2 * block + block // 2 + 1):
        values = normal(numel)
        data, decoded = top_k_reference(values, k, block, inner)
        assert encode(codec, values).numpy().tobytes() == data
        assert torch.equal(round_trip(codec, values), decoded)


@given(vectors, st.integers(1, 16))
@settings(deadline=None)
def test_top_k_of_any_numbers_equals_plain_numpy(values, k):
    codec = codec_of("topk", {"k": k, "block": 16})
    data, decoded = top_k_reference(values, k, 16, "fp32")
    assert encode(codec, values).numpy().tobytes() == data
    assert torch.equal(round_trip(codec, values), decoded)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0]), min_size=1, max_size=40), st.integers(1, 8))
@settings(deadline=None)
def test_among_equals_the_first_are_kept(values, k):
    values = torch.tensor(values)
    codec = codec_of("topk", {"k": k, "block": 8})
    assert encode(codec, values).numpy().tobytes() == top_k_reference(values, k, 8, "fp32")[0]


def test_top_k_by_hand():
    codec = codec_of("topk", {"k": 2, "block": 4, "values": "bf16"})
    values = torch.tensor([1.0, -4.0, 0.5, 2.0, 3.0])
    # Indices 1 and 3 of 2 bits: 0b1101; then −4 and 2.  The last block of one element keeps it, with index 0.
    bf16 = torch.tensor([-4.0, 2.0, 3.0]).bfloat16().view(torch.uint8).tolist()
    assert encode(codec, values).tolist() == [0b1101, *bf16[:4], 0, *bf16[4:]]
    assert round_trip(codec, values).tolist() == [0.0, -4.0, 0.0, 2.0, 3.0]


def test_sizes_of_top_k_are_those_of_the_formula():
    d = 5 * 4096
    for inner, bytes_of_values in [
        ("fp32", 512),
        ("bf16", 256),
        ("int8", 132),
        ("e3m0", 68),
        ("2bit", 48),
        ("1bit", 24),
    ]:
        codec = codec_of("topk", {"k": 128, "block": 4096, "values": inner})
        assert codec.nbytes(d) == 5 * (128 * 12 // 8 + bytes_of_values)
        assert codec.nbytes(d + 3) == codec.nbytes(d) + (3 * 12 + 7) // 8 + codec_of(inner).nbytes(3)


@given(vectors, st.integers(1, 16))
@settings(deadline=None)
def test_top_k_leaves_at_most_its_share_of_the_energy(values, k):
    left = values.double() - round_trip(codec_of("topk", {"k": k, "block": 16}), values).double()
    for x, e in zip(values.double().split(16), left.split(16), strict=True):
        assert e.square().sum() <= (1 - min(k, x.numel()) / x.numel()) * x.square().sum() * (1 + 1e-12)


def test_top_k_of_whole_blocks_is_the_identity_and_leaves_nothing():
    values = normal(100)
    codec = codec_of("topk", {"k": 32, "block": 32})
    rest = values.clone()
    codec.encode_residual(rest, encode(codec, values))
    assert torch.equal(round_trip(codec, values), values)
    assert not rest.any()


@given(vectors)
@settings(deadline=None)
def test_top_k_is_idempotent(values):
    codec = codec_of("topk", {"k": 3, "block": 16})
    once = round_trip(codec, values)
    assert torch.equal(round_trip(codec, once), once)


def test_an_index_outside_its_block_is_refused():
    codec = codec_of("topk", {"k": 2, "block": 16})
    data = encode(codec, normal(5))
    data[0] = 0xF1
    with pytest.raises(SyncError, match="RD-405: 1 indices of a top-k payload lie outside their block of 5 elements"):
        codec.decode(data, torch.empty(5))


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 64, 1000, 4096])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.5, 1.0])
def test_a_mask_keeps_its_number_of_different_places(numel, p):
    codec = codec_of("mask", {"p": p, "block": 4096})
    places = codec.positions(numel, nonce=3)
    assert places.numel() == max(1, int(p * numel + 0.5))
    assert sorted(set(places.tolist())) == sorted(places.tolist())
    assert places.min() >= 0
    assert places.max() < numel


def test_the_same_seed_and_nonce_give_the_same_mask_and_others_another():
    def kept(seed, nonce):
        codec = codec_of("mask", {"p": 0.1, "block": 1024, "seed": seed})
        return tuple(round_trip(codec, torch.ones(1024), nonce).nonzero().flatten().tolist())

    assert kept(1, 1) == kept(1, 1)
    assert len({kept(seed, nonce) for seed in range(3) for nonce in range(3)}) == 9


def test_the_places_of_a_mask_never_change():
    codec = codec_of("mask", {"p": 0.05, "block": 128, "seed": 7})
    assert codec.positions(128, nonce=5).tolist() == PLACES_128
    assert codec.positions(100, nonce=5).tolist() == PLACES_100


def test_a_mask_sends_what_lies_at_its_places_and_nothing_else():
    codec = codec_of("mask", {"p": 0.25, "block": 64, "seed": 2})
    values = normal(64 + 64 + 10)
    decoded = round_trip(codec, values, nonce=9)
    expected = torch.zeros(138)
    for start, numel in [(0, 64), (64, 64), (128, 10)]:
        places = start + codec.positions(numel, nonce=9)
        expected[places] = values[places]
    assert torch.equal(decoded, expected)
    assert decoded.count_nonzero() == 16 + 16 + 3
    assert codec.nbytes(138) == 4 * 35


def test_masks_of_many_rounds_reach_every_place_equally_often():
    for numel in (64, 50):
        codec = codec_of("mask", {"p": 0.125, "block": 64, "seed": 4})
        draws = 4000
        hits = sum(round_trip(codec, torch.ones(numel), nonce) for nonce in range(draws))
        p = codec.kept(numel) / numel
        assert (hits / draws - p).abs().max() < 5 * (p * (1 - p) / draws) ** 0.5


def test_pairs_of_places_are_as_often_together_as_in_random_subsets():
    codec = codec_of("mask", {"p": 0.25, "block": 16, "seed": 4})
    draws = 4000
    together = torch.zeros(16, 16)
    for nonce in range(draws):
        hit = round_trip(codec, torch.ones(16), nonce)
        together += hit[:, None] * hit
    pairs = together[~torch.eye(16, dtype=torch.bool)] / draws
    expected = 4 * 3 / (16 * 15)
    assert (pairs - expected).abs().max() < 6 * (expected / draws) ** 0.5


def test_only_a_scaled_mask_is_unbiased():
    values = torch.arange(1.0, 65.0)
    for scaled, factor in [(1, 1.0), (0, 8 / 64)]:
        codec = codec_of("mask", {"p": 0.125, "block": 64, "scaled": scaled})
        mean = sum(round_trip(codec, values, nonce) for nonce in range(4000)) / 4000
        assert (mean / values - factor).abs().max() < 0.25 * factor


def test_masked_codes_of_several_senders_can_be_summed():
    codec = codec_of("mask", {"p": 0.1, "block": 128})
    a, b = torch.arange(128.0), torch.arange(128.0) * 3
    both = encode(codec, a, 1).view(torch.float32) + encode(codec, b, 1).view(torch.float32)
    assert torch.equal(both, encode(codec, a + b, 1).view(torch.float32))


def test_a_mask_over_everything_is_the_identity():
    values = normal(CHUNK + 5)
    assert torch.equal(round_trip(codec_of("mask", {"p": 1.0}), values), values)
