import pytest


@pytest.fixture(scope="session")
def place(cluster, tmp_path_factory):
    """Runs of this folder share a corpus and a cache."""
    from cluster_runs import Place

    return Place(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def warm(cluster):
    """Processes that serve one run after the other."""
    from warm_processes import Warm

    processes = Warm()
    yield processes
    processes.end()


@pytest.fixture(scope="session")
def quick(warm, tmp_path_factory):
    """A place for runs that nothing befalls, on those processes."""
    from warm_processes import QuickPlace

    return QuickPlace(tmp_path_factory.mktemp("quick"), warm)


@pytest.fixture(scope="session")
def straight(quick):
    """A run that nobody interrupted, with which others are compared.

    It is long enough for a signal, which the command looks for four times a second, to come before the end.
    """
    return quick.train("straight", {"run.rounds": 60})


@pytest.fixture(scope="session")
def llama(quick):
    """A run of six rounds of a Llama, which passes the end of its 72 training blocks, exported."""
    from cluster_runs import LLAMA

    sample = {"export.enabled": True, "export.prompt": "3 plus 4 is ", "export.sample_tokens": 6}
    return quick.train("llama", {"model": LLAMA, "run.rounds": 6} | sample)


@pytest.fixture(autouse=True)
def one_thread():
    """Loops that are to equal ranks bit by bit compute with as many threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
