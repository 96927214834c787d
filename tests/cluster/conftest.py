import logging
import os
import shutil
import tempfile

import pytest

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def cluster():
    """The one local Ray of this folder."""
    import ray

    # Sockets have short paths, pytest's folders do not.
    folder = tempfile.mkdtemp(prefix="rd-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
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


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory):
    from cluster_runs import Place

    return Place(tmp_path_factory.mktemp("cluster"))
