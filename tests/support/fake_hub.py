"""A Hugging Face hub in one thread: enough of its HTTP for huggingface_hub to download a model.

Remembers what was asked for. Folders are repositories: `root/org/name/<revision>/files`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FakeHub(ThreadingHTTPServer):
    """Listens on a free port of the loopback."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        """Names of the files whose bytes were sent."""

    @property
    def url(self) -> str:
        """What HF_ENDPOINT must be."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def fake_hub(root: Path) -> Iterator[FakeHub]:
    """A running hub; stopped at the end."""
    hub = FakeHub(root)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    """/api/models/org/name/revision/R, /api/models/org/name/tree/R, /org/name/resolve/R/file."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def _answer(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        if is_api:
            parts = parts[2:]
        repository = self.server.root / "/".join(parts[:2])
        if not repository.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        if "/".join(parts[:2]) in self.server.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        kind, name = (parts[2], parts[3]) if len(parts) > 3 else ("revision", "main")
        folder = self._revision(repository, name)
        if folder is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "resolve":
            self._send_file(folder, "/".join(parts[4:]))
        else:
            self._send_json(_listing(folder) if kind == "tree" else _info(repository, folder))

    def _revision(self, repository: Path, name: str) -> Path | None:
        """The folder of a branch, or of the commit that stands for it."""
        for folder in repository.iterdir():
            if name in (folder.name, commit_of(folder)):
                return folder
        return None

    def _send_file(self, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        body = path.read_bytes()
        if self.command == "GET":
            self.server.downloads.append(name)
        headers = {
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": commit_of(folder),
        }
        self._send(200, body, headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def commit_of(folder: Path) -> str:
    """The 40 digits that name a revision's contents."""
    return hashlib.sha1(str(folder).encode()).hexdigest()


def _info(repository: Path, folder: Path) -> dict[str, object]:
    name = "/".join(repository.parts[-2:])
    siblings = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
    return {"_id": "0", "id": name, "modelId": name, "sha": commit_of(folder),
            "siblings": siblings, "private": False, "tags": [], "downloads": 0}  # fmt: skip


def _listing(folder: Path) -> list[dict[str, object]]:
    return [
        {
            "type": "file",
            "path": path.name,
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.iterdir())
    ]
