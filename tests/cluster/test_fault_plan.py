"""One run in which a plan lets everything go wrong once: it finishes, and its anchors are those of what was merged."""

import pytest
from cluster_runs import anchor, digest, distance, events, lines, manifest, replayed, traced_rounds

from ray_diloco.auditing import audit
from ray_diloco.config.compose import compose

pytestmark = pytest.mark.cluster

ROUNDS = 12
PLAN = [
    "nan_delta i1 2 before_send",
    "corrupt_payload i0 3 before_send",
    "storage_error storage 4 mid_send",
    "stale_epoch i1 5 before_send",
    "exit shard:0 6 before_commit",
    "slow_link i0 7 mid_send seconds=9 bytes_per_s=200000",
    "exit i0 8 mid_inner rank=1",
    "driver_exit driver 10 after_commit",
    "drop_link i1 11 mid_send seconds=0.5",
]


def test_a_run_survives_a_plan_of_everything(place):
    settings = {"run.rounds": ROUNDS, "islands.min": 2, "faults.plan": PLAN, "faults.allowed": True}
    # One island of two ranks: each keeps its own part of a progress point.
    settings |= {"islands.i0.ranks": 2, "islands.i0.micro_batch": 1, "checkpoint.progress_every": 1}
    run = place.train("planned", settings)
    folder = run.folder
    assert (run["status"], run["rounds"]) == ("finished", ROUNDS)
    struck = sorted(path.name.replace("_", " ") for path in (folder / "faults").iterdir())
    assert struck == sorted(line.replace("_", " ") for line in PLAN), "each of them, and once"

    refused = {(e["island"], e["round"]): e["reason"] for e in events(folder, "contribution_rejected")}
    assert "not finite" in refused["i1", 2]
    assert "damaged" in refused["i0", 3]
    assert "incarnation 1 offered as one of 0" in refused["i1", 5]
    (lost,) = [e for e in events(folder, "island_lost") if e["how"] == "died"]
    assert lost["island"] == "i0" and "rank 1 of i0 died" in lost["reason"]
    taken = [e for e in events(folder, "progress_taken_up") if e["incarnation"]]
    assert [(e["island"], e["steps"]) for e in taken] == [("i0", 4)] and taken[0]["done"] in (1, 2), (
        "the newest whole one"
    )
    merged = {e["round"]: e["islands"] for e in events(folder, "round_committed")}
    assert merged[8] == ["i0", "i1"], "the round has waited for it"
    assert not (folder / "points").exists()
    assert [e["round"] for e in events(folder, "checkpoint_failed")] == [4]
    assert [e["how"] for e in events(folder, "anchor_shard_lost")] == ["died"]
    assert len(events(folder, "anchor_shard_replaced")) == 1
    assert len(events(folder, "run_resumed")) == 1 and len(events(folder, "island_reattached")) == 2

    assert traced_rounds(folder) == list(range(ROUNDS + 1))
    for r, expected in enumerate(replayed(folder)):
        assert distance(anchor(folder, r), expected) < 1e-6
    assert digest(folder, anchor(folder, ROUNDS)) == run["anchor_digest"]
    commits = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "commit"]
    assert [line["version"] for line in commits] == list(range(1, ROUNDS + 1))
    (ledger,) = manifest(folder)["ledger"].values()
    contributed = sum(line["contributions"] for line in commits)
    assert ledger["credited"] == [[0, 4 * 2 * contributed]]
    assert run["tokens_committed"] == 32 * 4 * 2 * contributed
    checks = audit(folder, compose((), str(folder / "config.yaml")).config)
    assert [(check.name, check.status) for check in checks] == [
        (name, "pass") for name in ("commits", "history", "ledger", "summary", "trace")
    ]
