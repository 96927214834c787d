"""How payloads go into the object store."""

import pickle

import numpy as np
import pytest

from ray_diloco.cluster.runs import LONGEST, RUN, in_runs

SOME = 3 * RUN + 64


def payload(nbytes):
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def pickled(array):
    buffers = []
    return pickle.dumps(in_runs(array), protocol=5, buffer_callback=buffers.append), [b.raw() for b in buffers]


def test_a_payload_goes_in_runs_that_are_copied_at_once():
    _, buffers = pickled(payload(SOME))
    assert [run.nbytes for run in buffers] == [RUN, RUN, RUN, 64]


@pytest.mark.parametrize("nbytes", [0, RUN, LONGEST + 1])
def test_what_is_copied_as_quickly_whole_stays_whole(nbytes):
    array = payload(nbytes)
    assert in_runs(array) is array


def test_runs_that_lie_one_behind_the_other_are_one_array_without_a_copy():
    sent = payload(SOME)
    text, buffers = pickled(sent)
    memory = np.concatenate([np.frombuffer(run, np.uint8) for run in buffers])
    laid_down = [memory[at : at + run.nbytes].data for at, run in zip(range(0, SOME, RUN), buffers, strict=True)]
    got = pickle.loads(text, buffers=laid_down)
    assert type(got) is np.ndarray and not got.flags.writeable
    np.testing.assert_array_equal(got, sent)
    assert np.shares_memory(got, memory) and got.nbytes == memory.nbytes


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_runs_that_lie_apart_are_joined_in_their_order(order):
    sent = payload(SOME)
    text, buffers = pickled(sent)
    apart = {k: bytes(buffers[k]) for k in order}
    got = pickle.loads(text, buffers=[apart[k] for k in range(4)])
    np.testing.assert_array_equal(got, sent)
    assert type(got) is np.ndarray and not got.flags.writeable and got.flags.c_contiguous


def test_without_buffers_beside_the_text_it_is_the_same_array():
    sent = payload(SOME)
    for protocol in (4, 5):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(in_runs(sent), protocol=protocol)), sent)


def test_the_object_store_gives_one_read_only_array_that_outlives_its_reference(cluster):
    import ray

    sent = payload(SOME)
    reference = ray.put(in_runs(sent))
    got = ray.get(reference)
    assert type(got) is np.ndarray and not got.flags.writeable
    # Another view of the same memory, not a copy of it.
    assert np.shares_memory(got, ray.get(reference))
    del reference
    # What would be written over it, were its memory given back.
    others = [ray.put(np.zeros(SOME, np.uint8)) for _ in range(8)]
    np.testing.assert_array_equal(got, sent)
    del others
