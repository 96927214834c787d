"""What cannot run says so at once, by number and exit code, and leaves nothing on the cluster."""

import json
import time

import pytest
import ray
from cluster_runs import Tape, command, ended, events, write_corpus

from ray_diloco.errors import CommittedError, DataError, DilocoError, InfeasibleError, InnerError

pytestmark = pytest.mark.cluster


def assert_nothing_stays(folder):
    from ray._private.state import actors

    tape = Tape(folder)
    # Those that wait for the run of another test are none of this one's.
    warm = {"WarmRank", "WarmShard"}
    tape.wait(lambda _: all(a["State"] == "DEAD" or a["ActorClassName"] in warm for a in actors().values()))
    tape.wait(lambda _: ray.available_resources().get("CPU") == 8)
    assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


def test_more_islands_than_there_is_room_for_are_refused_with_a_table(place):
    began = time.monotonic()
    with pytest.raises(InfeasibleError) as refused:
        place.train("too-many", {"islands.count": 50})
    assert time.monotonic() - began < 30
    assert refused.value.number == 210 and refused.value.exit_code == 3
    header, row = refused.value.what.splitlines()[-2:]
    assert header.split() == ["resource", "need", "have", "free", "now", "largest", "node"]
    assert row.split() == ["CPU", "50", "8", "8", "8"]
    folder = place.folder("too-many")
    assert [event["event"] for event in events(folder)] == ["run_started", "run_failed"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert_nothing_stays(folder)


def test_room_that_others_hold_is_waited_for_no_longer_than_the_deadline(place):
    group = ray.util.placement_group([{"CPU": 7}])
    ray.get(group.ready(), timeout=30)
    try:
        with pytest.raises(InfeasibleError, match="found no room within 1 s") as refused:
            place.train("no-room-now", {"deadlines.placement_s": 1.0})
    finally:
        ray.util.remove_placement_group(group)
    assert refused.value.number == 211
    assert_nothing_stays(place.folder("no-room-now"))


def test_a_model_that_cannot_be_built_ends_the_run_at_once(place):
    with pytest.raises(InnerError, match="the weights are at home") as failed:
        place.train("no-model", {"model.builder": "cluster_builders:no_model"})
    assert failed.value.number == 708
    tape = [event["event"] for event in events(place.folder("no-model"))]
    assert tape.count("island_launching") == 2 and "island_lost" not in tape and tape[-1] == "run_failed"
    assert_nothing_stays(place.folder("no-model"))


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"data.builder": "cluster_builders:no_documents", "data.source": "stdlib", "data.path": None}, 308),
        ({"data.builder": "cluster_builders:none_such", "data.source": "stdlib", "data.path": None}, 122),
        ({"data.heldout_blocks": 500}, 331),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_anything_starts(place, settings, number):
    with pytest.raises(DilocoError) as refused:
        place.train("no-data", settings)
    assert refused.value.number == number and refused.value.exit_code == 2
    assert not place.folder("no-data").exists()


def test_what_a_run_can_and_cannot_be_continued_with(place):
    alone = {"islands.count": 1}
    place.train("taken", alone | {"run.rounds": 1})
    with pytest.raises(CommittedError) as refused:
        place.train("taken", alone | {"run.rounds": 2, "model.builder": "cluster_builders:wide_mixer"})
    assert refused.value.number == 560
    with pytest.raises(CommittedError) as refused:
        place.train("taken", alone | {"run.fresh": True})
    assert refused.value.number == 562
    # Another inner optimiser may go on, with moments of its own, and says so.
    sgd = {"inner.optimizer.name": "sgd", "inner.optimizer.momentum": 0.9, "inner.lr": 0.1}
    assert place.train("taken", alone | sgd | {"run.rounds": 2})["rounds"] == 2
    (reset,) = events(place.folder("taken"), "inner_state_reset")
    assert reset["island"] == "i0" and "momentum_buffer" in reset["reason"]
    assert_nothing_stays(place.folder("taken"))


def test_exit_codes_of_the_command(place, tmp_path):
    joined = {"ray.address": ray.get_runtime_context().gcs_address}
    code, output = ended(command("train", "islands.cuont=2"))
    assert code == 2 and "did you mean 'islands.count'" in output
    code, output = ended(place.command("too-many-again", joined | {"islands.count": 50}))
    assert code == 3 and "RD-210" in output and "Traceback" not in output
    (tmp_path / "runs").write_text("not a folder")
    code, output = ended(place.command("nowhere", joined | {"run.root": str(tmp_path / "runs")}))
    assert code == 4 and "RD-50" in output and "Traceback" not in output, output


def test_the_source_of_one_island_is_named_where_it_is_at_fault(place):
    write_corpus(place.root / "short.txt", 4)
    with pytest.raises(DataError, match=r"short.txt") as refused:
        place.train("short", {"islands.i1.data.path": str(place.root / "short.txt")})
    assert refused.value.number == 331
