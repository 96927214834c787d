"""The safetensors codec, against the safetensors package."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ray_diloco.checkpoint.tensors import CHUNK, byte_views, encode, header_length, parse_header
from ray_diloco.errors import CheckpointError

DTYPES = [np.dtype(t) for t in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?")]
ARRAY = st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)))
NAME = st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__")


def written(tensors) -> bytes:
    size, views = encode(tensors)
    content = b"".join(views)
    assert len(content) == size
    return content


def parsed(content: bytes):
    length = header_length(content[:8], len(content))
    return parse_header(content[8 : 8 + length], len(content))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAME, ARRAY, max_size=4))
def test_the_safetensors_package_reads_what_is_written(tensors):
    loaded = safetensors.numpy.load(written(tensors))
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(NAME, ARRAY, max_size=4))
def test_what_the_safetensors_package_writes_is_read(tensors):
    content = safetensors.numpy.save(tensors)
    for name, stored in parsed(content).items():
        array = np.frombuffer(content[stored.start : stored.stop], stored.dtype).reshape(stored.shape)
        assert array.tobytes() == tensors[name].tobytes()
        assert array.shape == tensors[name].shape


def test_one_file_by_hand():
    content = written({"w": np.array([1.0, -2.0], np.float32)})
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (-len(header) % 8)
    assert content == bytes([len(header), 0, 0, 0, 0, 0, 0, 0]) + header + b"\x00\x00\x80\x3f\x00\x00\x00\xc0"


def test_big_endian_and_strided_arrays_are_written_as_their_values():
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    loaded = safetensors.numpy.load(written({"w": array}))
    assert loaded["w"].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_views_share_memory_with_the_array_and_stay_below_the_chunk():
    array = np.zeros(CHUNK // 4 * 2 + 1, np.float32)
    views = list(byte_views(array))
    assert [v.nbytes for v in views] == [CHUNK, CHUNK, 4]
    array[0] = 1
    assert bytes(views[0][:4]) == b"\x00\x00\x80\x3f"


def test_a_dtype_that_the_format_lacks_is_refused_by_name():
    with pytest.raises(CheckpointError) as raised:
        encode({"layer.w": np.zeros(2, np.complex64)})
    assert raised.value.number == 519
    assert "layer.w" in raised.value.what


def header(**entries) -> bytes:
    return json.dumps(entries).encode()


def entry(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        header(a=entry(0, 8, [3])),
        header(a=entry(4, 12, [2])),
        header(a=entry(0, 8, [2]), b=entry(4, 12, [2])),
        header(a=entry(0, 8, [2]), b=entry(8, 20, [3])),
        header(a=entry(0, 8, [2], "F9")),
        header(a=entry(-4, 4, [2])),
        header(a=entry(0, 8, [-1, -2])),
        header(a={"dtype": "F32"}),
        header(a=7),
        header(),
    ],
)
def test_a_header_whose_tensors_do_not_tile_the_file_is_refused(text):
    with pytest.raises(ValueError):
        parse_header(text, 8 + len(text) + 8)


@pytest.mark.parametrize(("first", "size"), [(b"", 0), (b"\x02\x00", 2), (b"\xff" * 8, 4096), (bytes(8), 64)])
def test_an_impossible_header_length_is_refused(first, size):
    with pytest.raises(ValueError):
        header_length(first, size)
