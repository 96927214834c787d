import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outer_world import anchor_payload, chunk_size, contribution_payload, partitions

from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import CODECS, Bf16, Fp32, Traits
from ray_diloco.outer.layout import Range, total
from ray_diloco.outer.payload import Meta, Writer, gather, open_payload, require_purpose

RANGES = (Range(2, 5), Range(7, 9))
VALUES = [1.0, -2.0, 3.5, 0.0, 1e-30]


def read(payload):
    return payload.read(0, payload.numel, torch.empty(payload.numel)).tolist()


def test_a_payload_gives_back_elements_and_header():
    sealed = contribution_payload(VALUES, RANGES, island="i3", version=7, fragment=2, incarnation=4)
    payload = open_payload(sealed)
    assert payload.header.ranges == RANGES
    assert payload.header.codec == "fp32"
    assert payload.header.meta == Meta("contribution", {2: 7}, "i3", 4)
    assert payload.nbytes == sealed.nbytes
    assert read(payload) == np.float32(VALUES).tolist()


def test_bytes_are_prefix_header_digests_and_body_each_at_a_multiple_of_64():
    sealed = contribution_payload(VALUES, RANGES)
    raw = sealed.tobytes()
    assert raw[:8] == b"RDILOCO\0"
    assert int.from_bytes(raw[8:12], "little") == 1
    header_bytes, body_bytes = int.from_bytes(raw[12:16], "little"), int.from_bytes(raw[16:24], "little")
    assert header_bytes % 64 == 0
    assert body_bytes == 20
    assert len(raw) == 64 + header_bytes + 64 + 20
    assert json.loads(raw[64 : 64 + header_bytes])["ranges"] == [2, 5, 7, 9]
    assert raw[-20:] == np.float32(VALUES).tobytes()


def test_a_payload_without_elements_is_valid():
    payload = open_payload(contribution_payload([], ()))
    payload.verify()
    assert payload.numel == 0
    assert read(payload) == []


def test_read_only_memory_is_read_without_a_warning_or_a_copy(recwarn):
    sealed = contribution_payload(VALUES, RANGES)
    assert not sealed.flags.writeable
    values = open_payload(sealed).read(0, 5, torch.empty(5))
    assert values.data_ptr() == sealed.ctypes.data + sealed.nbytes - 20
    assert not recwarn


@settings(deadline=None, max_examples=50)
@given(partitions(200, 2), st.sampled_from([Fp32(), Bf16()]), st.integers(1, 60), st.data())
def test_any_run_reads_the_same_elements_whatever_the_chunks(parts, codec, size, data):
    ranges = parts[0]
    values = torch.arange(total(ranges), dtype=torch.float32)
    with chunk_size(size):
        payload = open_payload(contribution_payload(values, ranges, codec=codec))
        start = data.draw(st.integers(0, payload.numel))
        stop = data.draw(st.integers(start, payload.numel))
        assert payload.read(start, stop, torch.empty(200)).tolist() == list(range(start, stop))


@pytest.mark.parametrize("codec", [Fp32(), Bf16()])
def test_every_flipped_byte_is_detected(codec):
    with chunk_size(2):
        sealed = contribution_payload(VALUES, RANGES, codec=codec)
        for at in range(sealed.nbytes):
            damaged = sealed.copy()
            damaged[at] ^= 0x10
            with pytest.raises(SyncError) as caught:
                open_payload(damaged).verify()
            assert 401 <= caught.value.number <= 408


def test_every_truncation_and_every_appended_byte_is_detected():
    sealed = contribution_payload(VALUES, RANGES)
    for size in range(sealed.nbytes):
        with pytest.raises(SyncError, match=r"RD-40[127]"):
            open_payload(sealed[:size])
    with pytest.raises(SyncError, match="RD-401"):
        open_payload(np.append(sealed, np.uint8(0)))


def test_a_damaged_chunk_is_found_when_it_is_touched_and_named():
    with chunk_size(2):
        damaged = contribution_payload(VALUES, RANGES, island="i5").copy()
        damaged[-1] ^= 1
        payload = open_payload(damaged)
        assert payload.read(0, 4, torch.empty(4)).tolist() == VALUES[:4]
        with pytest.raises(
            SyncError, match="RD-405: contribution payload of island i5: chunk 2 of the body is damaged"
        ):
            payload.read(3, 5, torch.empty(2))


def resealed(sealed, **changes):
    """The same message with other header fields and a digest that fits them, as a faulty program might send it."""
    from xxhash import xxh3_128_digest

    array = sealed.copy()
    size = int.from_bytes(array[12:16].tobytes(), "little")
    fields = json.loads(array[64 : 64 + size].tobytes())
    fields.update(changes)
    text = json.dumps(fields, separators=(",", ":")).encode()
    array[64 : 64 + size] = np.frombuffer(text.ljust(size), np.uint8)
    array[24:40] = 0
    body = int.from_bytes(array[16:24].tobytes(), "little")
    array[24:40] = np.frombuffer(xxh3_128_digest(array[: array.size - body].tobytes()), np.uint8)
    return array


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"codec": "int9"}, 404),
        ({"params": {"block": 3}}, 404),
        ({"ranges": [2, 5, 7, 10]}, 401),
        ({"ranges": [7, 9, 2, 5]}, 406),
        ({"ranges": [2, 6, 5, 6]}, 406),
        ({"ranges": [2, 2, 5, 9]}, 406),
        ({"ranges": [2, 5, 7]}, 406),
        ({"ranges": [-2, 3]}, 407),
        ({"ranges": [2.0, 7.0]}, 407),
        ({"ranges": None}, 407),
        ({"purpose": "gossip"}, 407),
        ({"versions": {"a": 1}}, 407),
        ({"versions": {"0": -1}}, 407),
        ({"versions": [1]}, 407),
        ({"incarnation": True}, 407),
    ],
)
def test_impossible_headers_are_refused_though_their_digest_fits(changes, number):
    sealed = contribution_payload(VALUES, RANGES)
    open_payload(resealed(sealed)).verify()
    with pytest.raises(SyncError) as caught:
        open_payload(resealed(sealed, **changes))
    assert caught.value.number == number


def test_other_formats_and_strangers_are_named():
    sealed = contribution_payload(VALUES, RANGES)
    stranger, later = sealed.copy(), sealed.copy()
    stranger[0] = 0
    later[8] = 2
    with pytest.raises(SyncError, match="RD-402: a payload begins with"):
        open_payload(stranger)
    with pytest.raises(SyncError, match="RD-403: a payload has format 2, not 1"):
        open_payload(later)


@pytest.mark.parametrize(
    "array", [None, b"RDILOCO\0", np.zeros(200, np.int8), np.zeros((20, 20), np.uint8), np.zeros(400, np.uint8)[::2]]
)
def test_only_flat_arrays_of_bytes_are_payloads(array):
    with pytest.raises(SyncError, match="RD-408: a payload is a flat uint8 array, not"):
        open_payload(array)


def test_a_writer_is_used_again_and_its_header_may_grow_as_versions_do():
    writer = Writer(Fp32(), RANGES, Meta("contribution", {0: 0}, "i0"))
    for version in (0, 9, 10, 10**18):
        writer.put(0, torch.tensor([float(version)] * 5))
        meta = Meta("contribution", {0: version}, "i0", incarnation=version)
        assert writer.fits(meta)
        payload = open_payload(writer.seal(meta))
        assert payload.header.meta == meta
        assert payload.digest == writer.digest
        assert read(payload) == [float(np.float32(version))] * 5


def test_a_header_that_does_not_fit_is_refused():
    writer = Writer(Fp32(), RANGES, Meta("contribution", {0: 0}, "i0"))
    large = Meta("contribution", {0: 0}, "i" * 300)
    assert not writer.fits(large)
    with pytest.raises(SyncError, match="RD-407: a header of"):
        writer.seal(large)


def test_a_plain_codec_is_written_in_place_and_others_through_scratch():
    scratch = torch.zeros(5)
    plain, half = (Writer(codec, RANGES, Meta("anchor", {0: 1})) for codec in (Fp32(), Bf16()))
    assert plain.target(0, 5, scratch).data_ptr() == plain.elements.data_ptr()
    assert half.elements is None
    assert half.target(0, 5, scratch).data_ptr() == scratch.data_ptr()
    for writer in (plain, half):
        target = writer.target(0, 5, scratch)
        target.fill_(1.5)
        writer.put(0, target)
        assert read(open_payload(writer.seal(Meta("anchor", {0: 1})))) == [1.5] * 5


def test_digests_tell_messages_apart():
    one, same, other = (contribution_payload(VALUES, RANGES, version=v) for v in (1, 1, 2))
    digests = [open_payload(sealed).digest for sealed in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


def test_gather_views_one_piece_and_joins_several():
    from ray_diloco.outer.chunks import in_chunks, pieces

    a, b = anchor_payload([1, 2, 3], (Range(0, 3),)), anchor_payload([4, 5], (Range(3, 5),))
    opened = [open_payload(a), open_payload(b)]
    sources = [(payload, payload.header.ranges) for payload in opened]
    scratch = (torch.zeros(5), torch.zeros(5))
    ((start, stop, inside),) = in_chunks(pieces((Range(1, 5),), sources, "test"), 4)
    assert gather(start, stop, inside, scratch).tolist() == [2, 3, 4, 5]
    ((start, stop, inside),) = in_chunks(pieces((Range(1, 3),), sources, "test"), 2)
    assert gather(start, stop, inside, scratch).data_ptr() == a.ctypes.data + a.nbytes - 8


def test_purposes_are_not_mixed_up():
    payload = open_payload(anchor_payload([1.0], (Range(0, 1),)))
    require_purpose(payload, "anchor")
    with pytest.raises(SyncError, match="RD-412: a payload has the purpose anchor, not contribution"):
        require_purpose(payload, "contribution")


class PerBlock:
    """Blocks of 4: one fp32 offset, then a byte for each element; a block cannot be decoded in part."""

    name, granularity, plain, traits, params = "per_block", 4, False, Traits(), {}

    def nbytes(self, numel):
        return numel + 4 * -(-numel // 4)

    def encode(self, source, target, nonce=0):
        for k, block in enumerate(source.split(4)):
            run = target[8 * k : 8 * k + 4 + block.numel()]
            run[:4].copy_(block.min().reshape(1).view(torch.uint8))
            run[4:].copy_((block - block.min()).to(torch.uint8))

    def decode(self, source, target, nonce=0):
        for k, block in enumerate(target.split(4)):
            run = source[8 * k : 8 * k + 4 + block.numel()]
            block.copy_(run[4:].float() + run[:4].clone().view(torch.float32))


@given(st.integers(1, 40), st.integers(1, 3), st.data())
def test_runs_inside_blocks_of_a_codec_are_read(numel, blocks, data):
    CODECS["per_block"] = PerBlock
    try:
        with chunk_size(4 * blocks):
            values = torch.arange(numel, dtype=torch.float32) + 1000
            payload = open_payload(contribution_payload(values, (Range(0, numel),), codec=PerBlock()))
            start = data.draw(st.integers(0, numel))
            stop = data.draw(st.integers(start, numel))
            assert payload.read(start, stop, torch.empty(40)).tolist() == values[start:stop].tolist()
    finally:
        del CODECS["per_block"]
