"""A stand-in for the Hub on the loopback: one model's listing and files, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40


@dataclass
class HubServer:
    """What is served, and what was asked for."""

    repo_id: str
    folder: Path
    url: str = ""
    cut_after: int | None = None
    """Close the connection after this many bytes of a weight file, once."""
    status: int = 200
    """Answer everything with this."""
    error_code: str = ""
    """The Hub's own name for the fault, sent as a header."""
    needs_token: str = ""
    """Answer like a private repository to whoever doesn't send this token."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of each."""

    def downloads(self, name: str) -> list[str]:
        """Ranges asked of one file, empty for the whole."""
        return [
            asked for method, path, asked in self.requests if method == "GET" and path.endswith(f"/{name}")
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the test's output quiet."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.needs_token and self.headers.get("Authorization") != f"Bearer {self.hub.needs_token}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)
        elif self.hub.status != 200:
            self._send(self.hub.status, b"{}", {"X-Error-Code": self.hub.error_code}, with_body)
        elif path.startswith(f"/api/models/{self.hub.repo_id}/tree/"):
            self._send(200, json.dumps(self._tree()).encode(), {}, with_body)
        elif path.startswith(f"/api/models/{self.hub.repo_id}"):
            self._send(200, json.dumps(self._info()).encode(), {}, with_body)
        elif path.startswith(f"/{self.hub.repo_id}/resolve/"):
            self._send_file(self.hub.folder / path.rpartition("/")[2], with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in self._files()]
        return {"id": self.hub.repo_id, "modelId": self.hub.repo_id, "sha": COMMIT, "siblings": siblings}

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)[:40]}
            for path in self._files()
        ]

    def _files(self) -> list[Path]:
        return sorted(self.hub.folder.iterdir())

    def _send_file(self, path: Path, with_body: bool) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0] or 0)
        if asked:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.hub.cut_after if with_body and path.suffix == ".safetensors" else None
        if cut is not None:
            self.hub.cut_after = None
            self._send(200, content, headers, with_body, only=cut)
            self.close_connection = True
        else:
            self._send(206 if asked else 200, content[start:], headers, with_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool, only: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:only])


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving(repo_id: str, folder: Path) -> Iterator[HubServer]:
    """Serve ``folder`` as ``repo_id``."""
    hub = HubServer(repo_id, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
