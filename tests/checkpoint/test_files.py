"""File operations: what is durable when they return, and what they cost."""

import os
import tracemalloc

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from ray_diloco.checkpoint.anchor import anchor_digest
from ray_diloco.checkpoint.files import LocalFiles, RemoteFiles
from ray_diloco.checkpoint.manifest import Manifest
from ray_diloco.checkpoint.store import CheckpointStore

MIB = 1 << 20


@pytest.fixture
def calls(monkeypatch):
    """Names of the synced files and folders, and of the renamed files, in order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor):
        seen.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recording_replace(source, target):
        seen.append(("replace", os.path.basename(source), os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    return seen


def test_a_file_is_synced_before_it_gets_its_name_and_new_folders_are_synced(tmp_path, calls):
    LocalFiles(tmp_path).write("a/b/file", [b"one", b"two"])
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"onetwo"
    *folders, (_, temporary), renamed = calls
    assert folders == [("sync", tmp_path.name), ("sync", "a")]
    assert temporary.endswith(".tmp")
    assert renamed == ("replace", temporary, "file")


def test_a_write_that_the_system_cuts_short_is_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    LocalFiles(tmp_path).write("file", [b"12345678"])
    assert (tmp_path / "file").read_bytes() == b"12345678"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    files = LocalFiles(tmp_path)
    files.write("file", [b"old"])

    def views():
        yield b"ne"
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        files.write("file", views())
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]


def test_a_remote_storage_with_real_folders_gets_them_below_its_root_only(tmp_path):
    (tmp_path / "root").mkdir()
    files = RemoteFiles(LocalFileSystem(), str(tmp_path / "root"))
    files.write("checkpoints/round-000001/file", [b"x"])
    assert files.read("checkpoints/round-000001/file", 0, 9) == b"x"
    assert files.entries("checkpoints") == ["round-000001"]
    with pytest.raises(FileNotFoundError):
        RemoteFiles(LocalFileSystem(), str(tmp_path / "absent")).write("checkpoints/file", [b"x"])
    assert not (tmp_path / "absent").exists()


def test_a_remote_view_leaves_no_temporary_file(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    files = RemoteFiles(LocalFileSystem(), str(tmp_path))
    files.write("file", [b"0123"])
    files.write("empty", [])
    assert bytes(files.view("file")[1:3]) == b"12"
    assert bytes(files.view("empty")) == b""
    assert not list((tmp_path / "tmp").iterdir())


def test_writing_and_reading_64_mib_takes_no_second_copy_of_it(tmp_path):
    store = CheckpointStore(str(tmp_path))
    layout = tuple((f"layer.{i}", (2, MIB)) for i in range(8))
    tensors = {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(layout)}
    tracemalloc.start()
    try:
        entry = store.write_tensors(0, "anchor-00000-of-00001.safetensors", tensors, kind="anchor")
        _, write_peak = tracemalloc.get_traced_memory()
        manifest = store.commit(
            Manifest(run="r", round=0, versions={}, step=0, layout=layout, files=(entry,), created=0.0)
        )
        tracemalloc.reset_peak()
        anchor_digest(CheckpointStore(str(tmp_path)), manifest)
        _, read_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert entry.bytes > 64 * MIB
    assert write_peak < 1 * MIB
    assert read_peak < 16 * MIB
