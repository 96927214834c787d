"""Who may speak to a Ray: the token of a user, and what a head answers to those who have it and those who have not."""

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import ray

from ray_diloco.cluster import credentials as those
from ray_diloco.cluster.credentials import MODE, TOKEN, TOKEN_PATH, credentials
from ray_diloco.errors import SecurityError


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Somebody with a home, no token, and no settings; Ray itself is told nothing."""
    for name in (MODE, TOKEN, TOKEN_PATH, "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(those, "_tell_ray", lambda: None)
    return tmp_path / ".ray" / "auth_token"


@pytest.fixture
def head():
    """Starts what answers like a head: to everybody, or to those with a token."""
    servers = []

    def start(token=None):
        def hello(_request, context):
            if token and dict(context.invocation_metadata()).get("authorization") != f"Bearer {token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        service, method = those._HELLO[1:].split("/")
        handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(hello)})
        server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


@contextmanager
def refused(number, words):
    with pytest.raises(SecurityError) as error:
        yield
    assert (error.value.number, words in error.value.what) == (number, True), error.value


def mode():
    return os.environ.get(MODE)


def test_a_local_ray_gets_a_token_that_only_its_user_can_read(user):
    with credentials(None):
        assert mode() == "token"
    assert mode() is None, "what comes after is as it was"
    token = user.read_text()
    assert len(token) == 64 and stat.S_IMODE(user.stat().st_mode) == 0o600
    # As Ray writes it.
    user.chmod(0o644)
    with credentials(None):
        assert user.read_text() == token and stat.S_IMODE(user.stat().st_mode) == 0o600
    assert [path.name for path in user.parent.iterdir()] == ["auth_token"]


def test_without_a_home_the_token_stays_in_the_processes_of_the_run(user, monkeypatch, tmp_path):
    (tmp_path / ".ray").touch()
    monkeypatch.setenv(TOKEN, "")
    with credentials(None):
        assert len(os.environ[TOKEN]) == 64


def test_settings_of_the_user_are_left_alone(user, monkeypatch):
    monkeypatch.setenv(MODE, "disabled")
    with credentials(None):
        assert mode() == "disabled"
    assert mode() == "disabled" and not user.exists()
    monkeypatch.setenv(MODE, "token")
    monkeypatch.setenv(TOKEN, "mine")
    with credentials(None):
        assert os.environ[TOKEN] == "mine" and not user.exists()


def test_a_cluster_is_shown_a_token_only_if_it_asks_for_one(user, head):
    user.parent.mkdir()
    user.write_text("secret\n")
    with credentials(head()):
        assert mode() == "disabled"
    with credentials(head("secret")):
        assert mode() == "token"
    assert mode() is None


def test_a_client_that_a_cluster_does_not_take_hears_why(user, head, monkeypatch):
    address = head("secret")
    with refused(601, "this user has none"), credentials(address):
        pass
    monkeypatch.setenv(TOKEN, "another")
    with refused(601, "the one of this user is another"), credentials(address):
        pass
    monkeypatch.setenv(MODE, "disabled")
    with refused(601, "RAY_AUTH_MODE is disabled"), credentials(address):
        pass


def test_a_head_that_speaks_tls_otherwise_is_told_apart(user, head, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "ca.crt"))
    with refused(603, "ca.crt"), credentials(head()):
        pass
    monkeypatch.delenv("RAY_USE_TLS")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with refused(602, "a call without TLS"), credentials(f"127.0.0.1:{free}"):
        pass


@pytest.mark.cluster
def test_the_ray_of_the_tests_refuses_who_has_no_token(cluster, user, monkeypatch):
    address = ray.get_runtime_context().gcs_address
    with refused(601, "this user has none"), credentials(address):
        pass
    monkeypatch.setenv(TOKEN, "0" * 64)
    with refused(601, "another"), credentials(address):
        pass
