import uuid

import pytest


@pytest.fixture(params=["path", "file", "memory"])
def url(request, tmp_path):
    return {
        "path": str(tmp_path / "a" / "b"),
        "file": f"file://{tmp_path}/a",
        "memory": f"memory://{uuid.uuid4().hex}",
    }[request.param]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"
