import logging
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from ray_diloco.cluster.local_ray import LOCAL_RAY

# No test depends on how fast the machine is.
settings.register_profile("untimed", deadline=None, max_examples=40)
settings.load_profile("untimed")

# Helper modules that stand beside the tests that use them.
for folder in ("rounds",):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# For every Ray of the tests, those that commands start included.
os.environ |= LOCAL_RAY | {
    # As those of commands do, it asks for a token; Ray reads the mode when it is imported.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Ray gives up a start whose own processes are not there after 15 s; the training of other tests is to make way.
    "RAY_worker_niceness": "15",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="session")
def cluster():
    """The one local Ray of all tests that need a real one; it claims 8 CPUs, whatever the machine has."""
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
