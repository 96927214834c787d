"""Two phases: what is prepared shows after its commit only, and what fails or is aborted leaves no trace."""

import numpy as np
import pytest
from outer_world import (
    flat,
    nesterov,
    offer,
    state_digest,
)

from ray_diloco.errors import SyncError
from ray_diloco.outer.shard import BadContribution, Contribution

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_an_aborted_round_leaves_no_trace_and_can_be_prepared_again():
    shard, straight = nesterov(), nesterov()
    before = state_digest(shard)
    shard.prepare("r1", 0, [offer("i0", np.full(8, 100.0))])
    assert state_digest(shard) == before
    shard.abort("r1")
    assert state_digest(shard) == before
    for s in (shard, straight):
        s.prepare("r1", 0, [offer("i0", np.ones(8))])
        s.commit("r1")
    assert state_digest(shard) == state_digest(straight)


@pytest.mark.parametrize("chunk", range(2))
@pytest.mark.parametrize("fault", ["damaged", "nan"])
def test_a_contribution_that_fails_at_any_chunk_leaves_no_trace(chunk, fault):
    shard, straight = nesterov(), nesterov()
    for s in (shard, straight):
        s.prepare("r0", 0, [offer("i0", np.ones(8))])
        s.commit("r0")
    before, payload_before = state_digest(shard), shard.payload(0).tobytes()
    values = np.ones(8)
    if fault == "nan":
        values[4 * chunk + 1] = np.nan
    bad = offer("i1", values, version=1)
    if fault == "damaged":
        damaged = bad.payloads[0].copy()
        damaged[len(damaged) - 32 + 16 * chunk] ^= 1
        bad = Contribution("i1", 1.0, 1, (damaged,))
    good = offer("i0", np.full(8, 2.0), version=1)
    with pytest.raises(BadContribution) as caught:
        shard.prepare("r1", 0, [good, bad])
    assert caught.value.island == "i1"
    assert caught.value.number == {"nan": 411, "damaged": 405}[fault]
    assert (state_digest(shard), shard.payload(0).tobytes()) == (before, payload_before)
    for s in (shard, straight):
        s.prepare("r1", 0, [good])
        s.commit("r1")
    assert state_digest(shard) == state_digest(straight)


def test_the_same_key_gives_the_same_answer_before_and_after_the_commit():
    shard = nesterov()
    prepared, payload = shard.prepare("r1", 0, [offer("i0", np.ones(8))])
    sent = payload.tobytes()
    for _ in range(2):
        again, same = shard.prepare("r1", 0, [offer("i0", np.full(8, 9.0))])
        assert (again, same.tobytes()) == (prepared, sent)
        shard.commit("r1")
    assert shard.versions == {0: 1}
    assert shard.payload(0).tobytes() == sent


def test_keys_that_do_not_fit_are_errors_and_repeated_ones_are_not():
    shard = nesterov()
    with pytest.raises(SyncError, match="RD-423: there is no preparation 'r1' to commit"):
        shard.commit("r1")
    shard.abort("r1")
    shard.prepare("r1", 0, [offer("i0", np.ones(8))])
    with pytest.raises(SyncError, match="RD-423: fragment 0 has the open preparation 'r1', so 'r2' cannot begin"):
        shard.prepare("r2", 0, [offer("i0", np.ones(8))])
    with pytest.raises(SyncError, match="RD-423"):
        shard.commit("r2")
    shard.abort("r2")
    shard.commit("r1")
    shard.commit("r1")
    with pytest.raises(SyncError, match="RD-423: 'r1' was committed and cannot be aborted"):
        shard.abort("r1")
    shard.prepare("r2", 0, [offer("i0", np.ones(8), version=1)])
    shard.abort("r2")
    shard.abort("r2")
    with pytest.raises(SyncError, match="RD-423"):
        shard.commit("r2")
    assert shard.versions == {0: 1}


def test_an_open_round_does_not_show_and_views_outlive_the_next_preparation():
    shard = nesterov()
    tensors, payload = shard.tensors(), shard.payload(0)
    before, sent = flat(tensors).tobytes(), payload.tobytes()
    shard.prepare("r1", 0, [offer("i0", np.ones(8))])
    assert flat(shard.tensors()).tobytes() == before
    shard.commit("r1")
    assert (flat(tensors).tobytes(), payload.tobytes()) == (before, sent)
    assert not any(array.flags.writeable for array in (payload, *tensors.values()))


def test_what_is_being_read_is_not_written_again_when_the_spare_memory_is_renewed():
    shard, straight = nesterov(), nesterov()
    for s in (shard, straight):
        s.prepare("r1", 0, [offer("i0", np.ones(8))])
        s.commit("r1")
    reading, before = shard.tensors(), flat(shard.tensors()).copy()
    (read,) = shard.live_sides()
    for r in (2, 3, 4):
        if shard.spare_side(0) is read:
            shard.renew_spare(0)
        for s in (shard, straight):
            s.prepare(f"r{r}", 0, [offer("i0", np.full(8, float(r)), version=r - 1)])
        # An open preparation is not thrown away.
        shard.renew_spare(0)
        for s in (shard, straight):
            s.commit(f"r{r}")
        assert state_digest(shard) == state_digest(straight)
    assert flat(reading).tobytes() == before.tobytes()
