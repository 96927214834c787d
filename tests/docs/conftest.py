import logging
import os
import shutil
import tempfile

import pytest
from docs_pages import code_block

LOCAL_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def cluster():
    """A local Ray for the module; the one of another folder's tests, if that is still up in this process."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ |= LOCAL_RAY
    # Sockets have short paths, pytest's folders do not.
    folder = tempfile.mkdtemp(prefix="rd-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=4,
        namespace="ray_diloco",
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """An empty current folder with `sums.py` of docs/python.md in it, importable, and a home of its own."""
    (tmp_path / "sums.py").write_text(code_block("docs/python.md", "class LastTokens"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path
