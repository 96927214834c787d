import json

import pytest
from observe_fake_run import fake_run

from ray_diloco.observe.comparison import Point, gather, points_of


def commit(round, tokens, up=10, down=5, fragment=0):
    return {"round": round, "fragment": fragment, "tokens_committed": tokens, "bytes_up": up, "bytes_down": down}


@pytest.fixture
def results(tmp_path):
    """Variants a, b and c finished, d failed after 5 rounds, e was never begun."""
    for seed, name in enumerate("abc"):
        fake_run(tmp_path / "trio" / name, rounds=10, islands=2, seed=seed)
    fake_run(tmp_path / "trio/d", rounds=5, islands=2, status="failed")
    orderings = [
        {"claim": "a below b", "better": "a", "worse": "b"},
        {"claim": "b below a", "better": "b", "worse": "a", "source": "somebody"},
        {"claim": "as low", "better": "a", "worse": "b", "within": 1.0},
        {"claim": "b as low", "better": "b", "worse": "a", "within": 1.0},
        {"claim": "a below d", "better": "a", "worse": "d"},
    ]
    variants = {name: [f"inner.H={k}"] for k, name in enumerate("abcde", start=1)}
    return gather(tmp_path / "trio", variants, orderings, command="ray-diloco compare trio", failures={"e": "no room"})


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "eval"]


def test_an_outcome_has_the_figures_of_its_run(results, tmp_path):
    a = results.variants[0]
    lines = [json.loads(line) for line in (tmp_path / "trio/a/metrics.jsonl").read_text().splitlines()]
    island = [line for line in lines if line["kind"] == "island"]
    assert (a.name, a.settings, a.status, a.rounds) == ("a", ("inner.H=1",), "finished", 10)
    assert a.loss == losses(tmp_path / "trio/a")[-1]
    assert a.tokens == 51_200 * len(island)
    assert a.bytes_up == a.bytes_down == 4_800_064 * len(island)
    exposed = sum(line["send_s"] + line["wait_s"] + line["adopt_s"] for line in island)
    assert a.exposed_s == pytest.approx(exposed / 2)
    assert 0.8 < a.utilisation < 1
    assert a.wall_s > 0


def test_points_join_evaluations_with_what_was_committed_by_then(results, tmp_path):
    a = results.variants[0]
    assert [point.loss for point in a.points] == losses(tmp_path / "trio/a")
    assert a.points[0] == Point(0, 0, 0, 5.55)
    assert (a.points[-1].tokens, a.points[-1].bytes) == (a.tokens, a.bytes_up + a.bytes_down)


def test_rounds_of_fragments_count_with_all_their_commits():
    commits = [commit(1, 100), commit(1, 150, fragment=1), commit(2, 250), commit(2, 300, fragment=1), commit(3, 400)]
    evaluations = [{"round": 2, "loss": 3.0}, {"round": 0, "loss": 5.0}, {"round": 3, "loss": None}]
    assert points_of(commits, evaluations) == (Point(0, 0, 0, 5.0), Point(2, 300, 60, 3.0))


def test_a_claim_holds_where_the_losses_say_so(results):
    a, b = results.variants[0].loss, results.variants[1].loss
    below, above, near, as_near, _ = results.orderings
    assert a != b
    assert (below.holds, above.holds) == (a < b, b < a)
    assert near.holds and as_near.holds
    assert (below.loss_of_better, below.loss_of_worse, above.source) == (a, b, "somebody")


def test_a_variant_that_did_not_finish_has_no_loss_and_decides_no_claim(results):
    _, _, _, d, e = results.variants
    assert (d.status, d.loss, d.reason) == ("failed", None, "no islands left: i0, i1 & i2 died <6 times>")
    assert d.points, "its course is known all the same"
    assert (e.status, e.reason, e.loss, e.rounds, e.points) == ("failed", "no room", None, 0, ())
    assert results.orderings[-1].holds is None


def test_a_variant_that_was_never_begun_is_missing(tmp_path):
    (only,) = gather(tmp_path, {"a": []}, [], command="x").variants
    assert (only.status, only.loss, only.tokens, only.utilisation) == ("missing", None, 0, None)


def test_the_results_say_when_and_on_what_they_were_measured(results):
    # The clock of the fake run begins at 1 790 000 000 s.
    assert results.measured == "2026-09-21"
    assert results.comparison == "trio"
    assert results.machine == ""


def test_a_machine_is_told_in_words_without_its_name(tmp_path):
    fake_run(tmp_path / "a", rounds=3)
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    summary["environment"] = {
        "cpus_usable": 2,
        "hostname": "secret",
        "platform": "Linux-6",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.1"},
        "git": {"commit": "0123456789abcdef", "modified": True},
    }
    (tmp_path / "a/summary.json").write_text(json.dumps(summary))
    found = gather(tmp_path, {"a": []}, [], command="x").machine
    assert found == "2 CPUs, Linux-6, python 3.11.9, torch 2.13.0, commit 0123456789 with changes"
