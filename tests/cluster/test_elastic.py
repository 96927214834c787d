"""Islands that come and go during real runs: asked for by command, sent away, on nodes that join the cluster and leave.

Every step waits for an event of the step before, and runs are as long as that takes: nothing depends on time.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from cluster_runs import Place, Tape, actor_processes, command, ended, seen, when
from ray.cluster_utils import Cluster

from ray_diloco.cluster.control import control

pytestmark = pytest.mark.cluster

ENDLESS = {"run.rounds": 1_000_000, "trace.contributions": False, "evaluate.every": 0, "checkpoint.every": 20}
REGION = "ray.io/availability-region"


# Actors that ask for nothing, bound to the node of a region in each of the two ways: where they are.
BOUND = """
import sys
import ray
from ray_diloco.cluster.placement import on_node
from ray_diloco.cluster.whereabouts import Whereabouts
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id()
(us,) = (n["NodeID"] for n in ray.nodes() if n["Labels"].get(sys.argv[2]) == "us")
ways = [on_node(us)] * 3 + [Whereabouts(sys.argv[2]).inside("us")] * 3
found = [ray.remote(num_cpus=0)(Where).options(**way).remote() for way in ways]
assert ray.get([one.node.remote() for one in found]) == [us] * 6
"""


def committed_with(*islands):
    return lambda tape: any(e["event"] == "round_committed" and e["islands"] == [*islands] for e in tape)


def all_of(*wanted):
    return lambda tape: all(one(tape) for one in wanted)


def test_a_run_is_drained_scaled_and_stopped_from_outside_and_a_notice_is_heard(place):
    folder, went = place.folder("elastic"), []

    def steer():
        tape = Tape(folder)
        with control("elastic", str(folder.parent)) as run:
            run.drain("i0")
            tape.wait(all_of(seen("island_left", island="i0"), seen("islands_awaited")))
            view = run.view()
            assert view.waiting_for == "more islands (1 of 2 are here)"
            assert {island.name: island.state for island in view.islands}["i0"] == "left"
            assert run.scale({"": 2}) == ["i0", "i1"]
            back = tape.wait(seen("islands_enough"))
            tape.wait(lambda events: committed_with("i0", "i1")(events[len(back) :]))
            os.kill(actor_processes("Rank")[0].pid, signal.SIGTERM)
            tape.wait(seen("island_left", 2))
            run.stop()
        went.extend(tape.read())

    settings = ENDLESS | {"islands.min": 2, "checkpoint.every": 1}
    with when(folder, committed_with("i0", "i1"), steer):
        assert place.train("elastic", settings)["status"] == "stopped"
    left = [(event["island"], event["reason"]) for event in went if event["event"] == "island_left"]
    assert left[0] == ("i0", "asked to")
    assert left[1][1] == "its machine is about to go"
    assert not seen("island_lost")(went)


def test_a_node_that_joins_the_cluster_becomes_an_island_and_one_that_leaves_is_done_without(tmp_path):
    place, temp = Place(tmp_path), tempfile.mkdtemp(prefix="rd-", dir="/tmp")
    small = {"object_store_memory": 80 << 20, "num_cpus": 1}
    head = small | {"labels": {REGION: "eu"}, "include_dashboard": False, "temp_dir": temp}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    settings = ENDLESS | {"islands.regions.eu": 1, "islands.regions.us": 0, "islands.max": 2}
    settings |= {"trace.contributions": "false", "ray.address": nodes.address, "deadlines.heartbeat_s": 8}
    try:
        process = place.command("nodes", settings)
        tape = Tape(place.folder("nodes"))

        def alive():
            return process.poll() is None

        tape.wait(committed_with("eu-0"), alive)
        added = nodes.add_node(**small, labels={REGION: "us"})
        tape.wait(committed_with("eu-0", "us-0"), alive)
        joined = [e["region"] for e in tape.read() if e["event"] == "island_joined" and e["island"] == "us-0"]
        assert set(joined) == {"us"}
        code, said = ended(command("status", "nodes", "--root", str(place.folder("nodes").parent)))
        assert (code, "us-0" in said) == (0, True)
        subprocess.run([sys.executable, "-c", BOUND, nodes.address, REGION], check=True)
        # Not one that a busy machine lost before.
        before = len(tape.read())
        nodes.remove_node(added, allow_graceful=False)
        tape.wait(lambda events: seen("island_lost", island="us-0")(events[before:]), alive)
        lost = len(tape.read())
        tape.wait(lambda events: committed_with("eu-0")(events[lost:]), alive)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 130
    finally:
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)
