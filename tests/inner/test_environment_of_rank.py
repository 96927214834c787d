from ray_diloco.inner.environment import interface_towards, rank_environment, rendezvous_environment


def test_every_variable_that_deepspeed_would_ask_mpi_for_is_set():
    environment = rank_environment(1, 4) | rendezvous_environment("10.0.0.7", 4711)
    assert environment["RANK"] == "1"
    assert environment["WORLD_SIZE"] == "4"
    assert environment["LOCAL_RANK"] == "0"
    assert environment["MASTER_ADDR"] == "10.0.0.7"
    assert environment["MASTER_PORT"] == "4711"


def test_local_size_is_never_set_since_it_makes_deepspeed_compile_an_op():
    assert "LOCAL_SIZE" not in rank_environment(0, 2)


def test_threads_wait_passively_and_are_as_many_as_asked_for():
    environment = rank_environment(0, 1, threads=3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_accelerator_is_named_before_deepspeed_looks_for_one():
    assert rank_environment(0, 1)["DS_ACCELERATOR"] == "cpu"
    assert rank_environment(0, 1, accelerator="cuda")["DS_ACCELERATOR"] == "cuda"


def test_large_temporaries_stay_in_the_heap():
    environment = rank_environment(0, 1)
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "8589934592"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "17179869184"


def test_noise_of_libraries_is_turned_off():
    environment = rank_environment(0, 1)
    assert environment["PYTHONWARNINGS"] == "ignore::FutureWarning"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"


def test_gloo_is_bound_to_the_interface_that_leads_to_rank_0():
    assert rendezvous_environment("127.0.0.1", 1)["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_a_host_that_has_no_address_leaves_the_interface_to_gloo():
    assert interface_towards("no-such-host.invalid") is None
    assert "GLOO_SOCKET_IFNAME" not in rendezvous_environment("no-such-host.invalid", 1)


def test_all_values_are_text():
    assert all(isinstance(value, str) for value in rank_environment(0, 1, threads=2).values())
