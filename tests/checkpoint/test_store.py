"""Commits on local paths and fsspec URLs: visible when whole, read back, chained."""

import dataclasses
import hashlib
import pickle
import shutil
import threading

import numpy as np
import pytest
import safetensors.numpy
from commits import anchor, commit, number_of, write
from storage_doubles import flip_byte

from ray_diloco.checkpoint.names import inner_filename
from ray_diloco.checkpoint.store import CheckpointStore
from ray_diloco.errors import CheckpointError


def test_a_commit_comes_back_with_every_value(url):
    committed = commit(CheckpointStore(url), 3)
    store = CheckpointStore(url)
    manifest = store.newest()
    assert manifest == committed
    assert manifest.ledger == {"credited": [[0, 24]]}
    loaded = dict(store.load(manifest))
    assert loaded.keys() == {"wte", "bias", "head"}
    for name, array in anchor(3).items():
        assert np.array_equal(loaded[name], array)
        assert loaded[name].shape == array.shape
    momentum = dict(store.load(manifest, kind="outer"))
    assert np.array_equal(momentum["momentum.head"], -anchor(3)["head"])
    store.verify(manifest)


def test_nothing_is_visible_before_the_commit(url):
    store = CheckpointStore(url)
    assert store.newest() is None
    manifest = write(store, 0)
    assert store.newest() is None
    assert store.commit(manifest).round == 0
    assert store.newest().round == 0
    write(store, 1)
    assert store.newest().round == 0


def test_a_local_folder_holds_the_manifest_and_the_files_and_nothing_else(tmp_path):
    store = CheckpointStore(str(tmp_path))
    write(store, 12)
    store.write_tensors(12, "anchor-00000-of-00001.safetensors", {"w": np.zeros(2)}, kind="anchor")
    commit(store, 12)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["round-000012"]
    assert sorted(p.name for p in (tmp_path / "checkpoints" / "round-000012").iterdir()) == [
        "anchor-00000-of-00002.safetensors",
        "anchor-00001-of-00002.safetensors",
        "inner-i0-r00000.safetensors",
        "inner-i0-r00001.safetensors",
        "manifest.json",
        "outer-00000-of-00002.safetensors",
        "outer-00001-of-00002.safetensors",
    ]


def test_files_are_what_the_safetensors_package_reads_and_entries_describe_them(tmp_path, folder):
    manifest = commit(CheckpointStore(str(tmp_path)), 2)
    entry = manifest.files_of("anchor")[0]
    content = (folder / "round-000002" / entry.name).read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert np.array_equal(safetensors.numpy.load(content)["wte"], anchor(2)["wte"])


def test_only_the_named_tensors_come_in_the_order_asked_for(url):
    store = CheckpointStore(url)
    manifest = commit(store, 1)
    loaded = list(store.load(manifest, ["head", "bias"]))
    assert [name for name, _ in loaded] == ["head", "bias"]
    assert np.array_equal(loaded[0][1], anchor(1)["head"])


def test_loaded_arrays_cannot_be_written_and_outlive_the_files(tmp_path, folder):
    store = CheckpointStore(str(tmp_path))
    loaded = dict(store.load(commit(store, 1)))
    shutil.rmtree(folder)
    assert np.array_equal(loaded["head"], anchor(1)["head"])
    with pytest.raises(ValueError):
        loaded["head"][0] = 0


def test_inner_state_of_an_island_comes_from_the_files_of_all_its_ranks(url):
    store = CheckpointStore(url)
    manifest = write(store, 0)
    pieces = [
        store.write_tensors(
            0,
            inner_filename(island, rank),
            {"step": np.array(7), f"exp_avg@{rank}": np.full(2, rank)},
            kind="inner",
            island=island,
        )
        for island in ("a", "a/b")
        for rank in range(3)
    ]
    manifest = store.commit(dataclasses.replace(manifest, files=(*manifest.files, *pieces)))
    loaded = {name: array.tolist() for name, array in store.load(manifest, kind="inner", island="a/b")}
    assert loaded == {"step": 7, "exp_avg@0": [0, 0], "exp_avg@1": [1, 1], "exp_avg@2": [2, 2]}
    assert list(store.load(manifest, kind="inner", island="absent")) == []
    own = dict(store.load(manifest, kind="inner", island="a/b", file=inner_filename("a/b", 1)))
    assert own.keys() == {"step", "exp_avg@1"}
    assert list(store.load(manifest, kind="inner", island="a/b", file=inner_filename("a/b", 3))) == []


def test_a_file_without_tensors_is_a_file(url):
    store = CheckpointStore(url)
    manifest = write(store, 0)
    empty = store.write_tensors(0, "outer-00000-of-00001.safetensors", {}, kind="outer")
    manifest = store.commit(dataclasses.replace(manifest, files=(empty,)))
    assert list(store.load(manifest, kind="outer")) == []
    store.verify(manifest)


def test_island_names_make_file_names_that_are_safe_and_distinct():
    names = [inner_filename(island, 0) for island in ("eu/west", "eu_west", "eu west", "../x", "é")]
    assert len(set(names)) == 5
    assert not any("/" in name or " " in name for name in names)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "a/b.safetensors", "manifest.json", "", ".safetensors", "é.safetensors"]
)
def test_a_file_name_that_leaves_the_folder_is_refused(tmp_path, name):
    store = CheckpointStore(str(tmp_path))
    assert number_of(store.write_tensors, 0, name, {}, kind="anchor") == 523
    assert not list(tmp_path.iterdir())


def test_a_tensor_in_no_file_or_in_two_is_an_error(url):
    store = CheckpointStore(url)
    manifest = write(store, 0)
    again = store.write_tensors(0, "anchor-again.safetensors", {"head": np.zeros(1, np.float32)}, kind="anchor")
    manifest = store.commit(dataclasses.replace(manifest, files=(*manifest.files, again)))
    assert number_of(lambda: list(store.load(manifest, ["head"]))) == 517
    other = CheckpointStore(f"{url}-other")
    assert number_of(lambda: list(other.load(commit(other, 0), ["absent"]))) == 517


def test_a_commit_without_one_of_its_files_is_refused(url):
    store = CheckpointStore(url)
    manifest = write(store, 0)
    short = dataclasses.replace(manifest.files[0], bytes=manifest.files[0].bytes + 1)
    absent = dataclasses.replace(manifest.files[0], name="anchor-absent.safetensors")
    assert number_of(store.commit, dataclasses.replace(manifest, files=(short,))) == 514
    assert number_of(store.commit, dataclasses.replace(manifest, files=(absent,))) == 513
    assert store.newest() is None


def test_each_commit_names_the_one_before(url):
    store = CheckpointStore(url)
    first, second, fourth = commit(store, 0), commit(store, 1), commit(store, 4)
    assert (first.previous, first.previous_round) == ("", None)
    assert (second.previous, second.previous_round) == (first.digest, 0)
    assert (fourth.previous, fourth.previous_round) == (second.digest, 1)
    assert [store.broken_link(manifest) for manifest in (first, second, fourth)] == [None, None, None]


def test_a_replaced_commit_breaks_the_chain(tmp_path):
    store = CheckpointStore(str(tmp_path / "a"))
    other = CheckpointStore(str(tmp_path / "b"))
    for round in range(3):
        commit(store, round)
        commit(other, round, shift=0.5)
    target = tmp_path / "a" / "checkpoints" / "round-000001"
    shutil.rmtree(target)
    shutil.copytree(tmp_path / "b" / "checkpoints" / "round-000001", target)
    assert store.read(1, full=True).round == 1
    assert [round for round in store.rounds() if store.broken_link(store.read(round))] == [1, 2]


def test_pruned_predecessors_do_not_break_the_chain(tmp_path):
    store = CheckpointStore(str(tmp_path))
    for round in range(5):
        commit(store, round)
    store.prune(keep_last=2)
    assert [store.broken_link(store.read(round)) for round in store.rounds()] == [None, None]


def test_progress_never_goes_back(url):
    store = CheckpointStore(url)
    commit(store, 5)
    if "memory" in url:
        assert number_of(write, store, 5) == 520
    else:
        assert number_of(store.commit, write(store, 5, shift=0.5)) == 520
    assert number_of(store.commit, write(store, 4)) == 520
    assert store.newest().round == 5
    assert np.array_equal(dict(store.load(store.newest()))["head"], anchor(5)["head"])


def test_the_same_commit_again_returns_what_exists(url):
    store = CheckpointStore(url)
    commit(store, 0)
    manifest = write(store, 1)
    assert store.commit(manifest) == store.commit(manifest)
    assert store.rounds() == [0, 1]


def test_a_writer_that_was_succeeded_is_refused(url):
    stale, successor = CheckpointStore(url), CheckpointStore(url)
    base = commit(stale, 0)
    commit(successor, 1, previous=base.digest)
    assert number_of(stale.commit, write(stale, 2, previous=base.digest)) == 521


def test_two_runs_cannot_share_a_storage(url):
    commit(CheckpointStore(url), 0, run="a")
    store = CheckpointStore(url)
    assert number_of(store.commit, write(store, 1, run="b")) == 521


def test_the_store_travels_to_another_process(url):
    store = CheckpointStore(url)
    manifest = commit(store, 0)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.newest() == manifest
    assert dict(copy.load(manifest)).keys() == {"wte", "bias", "head"}


def test_a_relative_path_means_the_same_in_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore("runs/storage")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    commit(store, 0)
    assert (tmp_path / "runs" / "storage" / "checkpoints" / "round-000000" / "manifest.json").is_file()


def test_a_reader_beside_a_writer_always_finds_a_whole_commit(url):
    writer, reader = CheckpointStore(url), CheckpointStore(url)
    commit(writer, 0)
    stop, problems, seen = threading.Event(), [], set()

    def look():
        while not stop.is_set():
            try:
                survey = reader.survey()
            except CheckpointError as error:
                problems.append(str(error))
                return
            seen.add(survey.manifest.round)

    thread = threading.Thread(target=look)
    thread.start()
    for round in range(1, 25):
        commit(writer, round)
        writer.prune(keep_last=1)
    stop.set()
    thread.join(30)
    assert problems == []
    assert seen
    assert reader.newest().round == 24


def test_a_file_is_digested_once_per_store(tmp_path, folder):
    store = CheckpointStore(str(tmp_path))
    manifest = commit(store, 1)
    list(store.load(manifest))
    flip_byte(folder / "round-000001" / "anchor-00000-of-00002.safetensors")
    list(store.load(manifest))
    assert number_of(lambda: list(CheckpointStore(str(tmp_path)).load(manifest))) == 515
