"""A loopback stand-in for the Hugging Face hub: one dataset repository, as far as `datasets` asks for it."""

import hashlib
import http.server
import json
import threading
from typing import Any, ClassVar

REPOSITORY = "someone/corpus"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers with the files and the commit that a test has set."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    commit: ClassVar[str] = "0" * 40

    @classmethod
    def push(cls, commit: str, **files: bytes) -> None:
        cls.commit, cls.files = commit * 40, files

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        request = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.split("?")[0]
        if path.startswith(f"/datasets/{REPOSITORY}/resolve/"):
            self._file(path.split("/", 6)[6])
        elif path.startswith(f"/api/datasets/{REPOSITORY}/tree/"):
            folder = "/".join(path.split("/")[7:])
            self._answer([self._entry(name) for name in self.files] if not folder else [])
        elif path.startswith(f"/api/datasets/{REPOSITORY}/paths-info/"):
            asked = json.loads(request)["paths"] if request[:1] == b"{" else [*self.files]
            self._answer([self._entry(name) for name in asked if name in self.files])
        elif path.startswith(f"/api/datasets/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in self.files]
            self._answer({"id": REPOSITORY, "sha": self.commit, "siblings": siblings, "tags": [], "private": False})
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _file(self, name: str) -> None:
        if name not in self.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})
            return
        content = self.files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.commit}
        asked = self.headers.get("Range")
        if asked is None or self.command == "HEAD":
            self._send(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last or len(content)) + 1]
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        self._send(206, part, headers)

    def _answer(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def start() -> str:
    """Serves on a free port of the loopback device until the process ends; returns the address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
