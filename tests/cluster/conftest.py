import pytest


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory):
    """Runs of this folder share a corpus and a cache."""
    from cluster_runs import Place

    return Place(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def straight(place):
    """A run that nobody interrupted, with which others are compared.

    It is long enough for a signal, which the command looks for four times a second, to come before the end.
    """
    return place.train("straight", {"run.rounds": 100})


@pytest.fixture(autouse=True)
def one_thread():
    """Loops that are to equal ranks bit by bit compute with as many threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
