"""Who may speak to a Ray: whoever has its token can run code there, and nobody else should.

A Ray that this program starts asks for a token, for it listens at the machine's own address.  The token is the user's
own, where Ray itself looks for one: `RAY_AUTH_TOKEN`, the file that `RAY_AUTH_TOKEN_PATH` names, or ~/.ray/auth_token.
A cluster is asked whether it wants a token before it is joined: a process that insists on one breaks where nobody else
has it, and Ray tries for 20 s before it says that a token is wrong.  `RAY_AUTH_MODE`, if it is set, decides instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from ray_diloco.errors import SecurityError

if TYPE_CHECKING:
    import grpc

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
# What Ray itself asks a head first.
_HELLO = "/ray.rpc.NodeInfoGcsService/GetClusterId"


@contextmanager
def credentials(address: str | None, deadline_s: float = 10.0) -> Iterator[None]:
    """Lets this process speak, while the block runs, to the Ray that is to be started (None) or joined.

    Raises:
      SecurityError: RD-601, the cluster does not take the token; RD-602, it does not speak TLS as this process does.
    """
    wanted = os.environ.get(MODE)
    if address is None:
        mode = wanted or "token"
        if mode.lower() == "token":
            _make_token()
    elif re.fullmatch(r"[^/]+:\d+", address):
        asks = _refuses(address, "", deadline_s)
        mode = wanted or ("token" if asks else "disabled")
        if asks and (mode.lower() != "token" or _refuses(address, _token(), deadline_s)):
            raise _not_taken(address, mode)
    else:
        mode = wanted or ("token" if _token() else "disabled")
    os.environ[MODE] = mode
    _tell_ray()
    try:
        yield
    finally:
        if wanted is None:
            os.environ.pop(MODE, None)
            _tell_ray()


def _tell_ray() -> None:
    """Lets Ray read its settings again: it has done so when it was imported."""
    AuthenticationTokenLoader.instance().reset_cache()
    RayConfig.initialize("")


def _refuses(address: str, token: str, deadline_s: float) -> bool:
    """Whether a head refuses a call that shows this token, or none."""
    # Only who joins a cluster waits for this import.
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    with _channel(address, options) as channel:
        hello = channel.unary_unary(_HELLO)
        shown = [("authorization", f"Bearer {token}")] if token else []
        try:
            hello(b"", timeout=deadline_s, metadata=shown)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise _no_tls(address) from None
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


def _channel(address: str, options: list[tuple[str, int]]) -> grpc.Channel:
    import grpc

    if not _speaks_tls():
        return grpc.insecure_channel(address, options)
    try:
        authority, key, own = (
            Path(os.environ[f"RAY_TLS_{name}"]).read_bytes() for name in ("CA_CERT", "SERVER_KEY", "SERVER_CERT")
        )
    except (OSError, KeyError) as error:
        raise SecurityError(
            603,
            f"RAY_USE_TLS is set, and a key or certificate is missing: {error}",
            "make them with jobs/certificates.sh, and let RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT "
            "name the files",
        ) from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, own), options)


def _speaks_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _token() -> str:
    if token := os.environ.get(TOKEN):
        return token
    try:
        return _path().read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _path() -> Path:
    return Path(os.environ.get(TOKEN_PATH) or _default_path()).expanduser()


def _default_path() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _make_token() -> None:
    """Sees that there is a token, and that others cannot read it."""
    if not _token():
        try:
            _write_token(_path())
        except OSError:
            # No home to write to: this process and those that it starts know the token, and nobody else.
            os.environ[TOKEN] = secrets.token_hex(32)
    elif TOKEN not in os.environ and _path() == _default_path():
        # Ray writes this file without regard to who may read it.
        with contextlib.suppress(OSError):
            _path().chmod(0o600)


def _write_token(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In one step, so that commands that start at the same time agree on the token.
    mine = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink(missing_ok=True)


def _not_taken(address: str, mode: str) -> SecurityError:
    if mode.lower() != "token":
        shown = f"{MODE} is {mode}"
    else:
        shown = "the one of this user is another" if _token() else "this user has none"
    return SecurityError(
        601,
        f"the Ray at {address} asks for its token: {shown}",
        f"copy the token of the cluster's head (~/.ray/auth_token there) into {_path()}, or name its file in "
        f"{TOKEN_PATH}; a local run is open to its own user only",
    )


def _no_tls(address: str) -> SecurityError:
    ours = "with" if _speaks_tls() else "without"
    return SecurityError(
        602,
        f"what listens at {address} does not answer as the head of a Ray cluster to a call {ours} TLS",
        "see that RAY_USE_TLS and RAY_TLS_* are set as on the cluster's machines (docs/deploy.md), and that the port "
        "is that of the head (6379), not of its dashboard",
    )
