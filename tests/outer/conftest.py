import pytest
from outer_world import chunk_size


@pytest.fixture
def small_chunks():
    """Chunks of four elements, so that eight have two."""
    with chunk_size(4):
        yield
