"""Faults of a plan in one process: at their point, once, whoever comes after."""

import numpy as np
import pytest
import torch

from ray_diloco.cluster import misfortune
from ray_diloco.cluster.misfortune import STRUCK, Misfortune, Misfortunes, spoiled
from ray_diloco.errors import SyncError
from ray_diloco.outer.codec import Fp32
from ray_diloco.outer.layout import layout_of
from ray_diloco.outer.payload import Meta, Writer, open_payload
from ray_diloco.rounds.faults import CORRUPT_PAYLOAD, NAN_DELTA, parse_faults

ISLANDS = ("i0", "i1")
WHOLE = layout_of([("w", (3, 4))]).whole


def told(folder, *lines):
    return Misfortunes("", parse_faults(lines, ISLANDS), str(folder / "faults"))


@pytest.fixture
def ends(monkeypatch):
    """What the process would have done to itself."""
    done = []
    monkeypatch.setattr(misfortune.os, "_exit", lambda code: done.append(f"exit {code}"))
    monkeypatch.setattr(misfortune, "freeze", lambda pid, seconds: done.append(f"freeze {seconds:g}"))
    return done


def test_a_fault_strikes_its_target_at_its_point_and_once(tmp_path, ends):
    plan = told(tmp_path, "exit i0 2 mid_inner", "freeze i1 2 mid_inner seconds=3")
    ours, others = Misfortune(plan.of("i0")), Misfortune(plan.of("i1"))
    for round_, phase in [(1, "mid_inner"), (2, "before_inner"), (3, "mid_inner")]:
        ours.pass_(round_, phase)
    assert ends == []
    ours.pass_(2, "mid_inner")
    others.pass_(2, "mid_inner")
    assert ends == [f"exit {STRUCK}", "freeze 3"]
    ours.pass_(2, "mid_inner")
    # A process that was started anew is told of the fault again.
    Misfortune(plan.of("i0")).pass_(2, "mid_inner")
    assert len(ends) == 2


def test_what_strikes_while_a_rank_waits_is_noticed_at_its_next_call(tmp_path, ends):
    mine = Misfortune(told(tmp_path, "exit i0 1 before_commit").of("i0"))
    mine.wait_at(1, "before_commit")
    assert ends == []
    mine.called()
    assert ends == [f"exit {STRUCK}"]


def test_links_are_cut_and_slow_for_as_long_as_the_plan_says(tmp_path, monkeypatch):
    waits, clock = [], [100.0]
    monkeypatch.setattr(misfortune.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(misfortune.threading.Event, "wait", lambda self, seconds: waits.append(seconds))
    plan = told(tmp_path, "drop_link i0 1 mid_send seconds=5", "slow_link i0 2 mid_send seconds=9 bytes_per_s=1000")
    mine = Misfortune(plan.of("i0"))
    mine.transfer(4000)
    mine.pass_(1, "mid_send")
    clock[0] += 2
    mine.transfer(4000)
    clock[0] += 10
    mine.pass_(2, "mid_send")
    mine.transfer(4000)
    clock[0] += 10
    mine.transfer(4000)
    assert waits == [3.0, 4.0]


@pytest.mark.parametrize("damage", [CORRUPT_PAYLOAD, NAN_DELTA])
def test_payloads_are_spoiled_as_a_broken_island_would(damage):
    meta = Meta("contribution", {0: 0}, "i0")
    writer = Writer(Fp32(), WHOLE, meta)
    writer.put(0, torch.arange(12.0))
    good = writer.seal(meta)
    assert spoiled(good, "") is good
    bad = open_payload(spoiled(good, damage))
    if damage == NAN_DELTA:
        assert np.isnan(bad.read(0, 12, torch.empty(12)).numpy()).all()
        return
    with pytest.raises(SyncError, match="RD-4"):
        bad.read(0, 12, torch.empty(12))
