import numpy as np
import pytest

from ray_diloco.checkpoint.points import Mark, point_name
from ray_diloco.checkpoint.store import CheckpointStore

MARK = Mark(3, 2, 100, 50, ((0, 40), (44, 60)), ((0, 7, 0, 0),))
STATE = {"theta|0": np.arange(5, dtype=np.float32), "tally": np.array([2.5, 1.0])}


@pytest.fixture
def points(url):
    return CheckpointStore(url).points


def test_what_was_written_is_found_by_its_rank_and_read_as_it_was(points):
    assert points.found("a/b", 1) == {}
    name = points.write("a/b", 1, 20, MARK, STATE)
    assert name == point_name(1, 120)
    ((found, told),) = points.found("a/b", 1).items()
    assert (found, told["done"], told["mark"]) == (name, 20, MARK.json)
    assert points.found("a/b", 0) == points.found("a", 1) == {}
    read = points.read("a/b", name)
    assert read.keys() == STATE.keys()
    assert all(np.array_equal(read[key], array) and read[key].dtype == array.dtype for key, array in STATE.items())


def test_a_point_that_is_not_whole_is_none(points):
    name = points.write("a", 0, 20, MARK, STATE)
    path = f"points/a/{name}"
    content = points.files.read(f"{path}.safetensors", 0, points.files.size(f"{path}.safetensors"))
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        points.files.write(f"{path}.safetensors", [damaged])
        assert points.read("a", name) is None
    points.files.write(f"{path}.safetensors", [content])
    assert points.read("a", name) is not None
    points.files.write(f"{path}.json", [b'{"done": 20, "bytes"'])
    assert points.read("a", name) is None and points.found("a", 0) == {}
    points.files.remove(f"{path}.json")
    assert points.read("a", name) is None


def test_a_rank_removes_what_is_its_own(points):
    names = [points.write("a", 0, done, MARK, STATE) for done in (10, 20, 30)]
    other = points.write("a", 1, 10, MARK, STATE)
    points.keep_only("a", 0, names[1:])
    assert list(points.found("a", 0)) == names[1:]
    assert list(points.found("a", 1)) == [other]
    points.clear()
    assert points.found("a", 0) == points.found("a", 1) == {}


def test_points_are_no_commits(points, url):
    points.write("a", 0, 10, MARK, STATE)
    assert CheckpointStore(url).rounds() == [] and CheckpointStore(url).newest() is None
