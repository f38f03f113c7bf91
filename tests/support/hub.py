"""A small hub on loopback: the endpoints of Hugging Face that ``huggingface_hub`` uses to bring a model."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


def git_digest(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    """The files of a model. Files of ``large`` are kept outside git, and served from another host after a redirect."""

    files: dict[str, bytes]
    large: tuple[str, ...] = ()
    commit: str = COMMIT
    token: str = ""  # who may have it
    is_gated: bool = False

    def digest(self, name):
        data = self.files[name]
        return hashlib.sha256(data).hexdigest() if name in self.large else git_digest(data)


@dataclass
class Hub:
    """The state of a hub: its repositories, the requests that came, and what goes wrong.

    ``fail``: status of every answer; ``cut``: bytes after which a body of a file ends, once; ``damage`` changes the bytes of a
    file; ``listed`` changes the listing; ``speed``: seconds before each piece of a body.
    """

    url: str = ""
    cdn: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list = field(default_factory=list)
    fail: int = 0
    page: str = ""
    cut: dict[str, int] = field(default_factory=dict)
    is_cut_forever: bool = False
    damage: object = None
    listed: object = None
    speed: float = 0.0
    hang: bool = False
    redirects: bool = False
    sent: threading.Event = field(default_factory=threading.Event)

    def of_kind(self, method, part=""):
        return [each for each in list(self.requests) if each.method == method and part in each.path]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict
    host: str


def listing(name, repository):
    siblings = []
    for path, data in repository.files.items():
        entry = {"rfilename": path, "size": len(data), "blobId": git_digest(data)}
        if path in repository.large:
            entry["lfs"] = {"sha256": repository.digest(path), "size": len(data), "pointerSize": 134}
        siblings.append(entry)
    return {
        "_id": "1", "id": name, "modelId": name, "sha": repository.commit, "private": False, "gated": False, "tags": [],
        "downloads": 0, "likes": 0, "siblings": siblings,
    }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self._serve()

    def do_GET(self):
        self._serve()

    def _serve(self):
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append(Request(self.command, path, headers, self.headers["Host"]))
        if hub.hang:
            self.server.closing.wait(30)
            self.close_connection = True
        elif hub.redirects:
            self._send(302, b"", Location=self.path + "x")
        elif hub.page:
            self._send(200, hub.page.encode(), **{"Content-Type": "text/html"})
        elif hub.fail:
            self._send(hub.fail, b"<html>no</html>")
        else:
            self._route(hub, path)

    def _route(self, hub, path):
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            repository = hub.repositories["/".join(parts[1:3])]
            self._file(hub, repository, "/".join(parts[3:]), {})
            return
        is_listing = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_listing else parts[:2])
        repository = hub.repositories.get(name)
        revision = "/".join(parts[5:]) if is_listing else parts[3]
        if repository is None or not self._may(repository, is_listing):
            is_known = repository is not None
            code = "GatedRepo" if is_known and repository.is_gated else "RepoNotFound"
            self._send(403 if is_known and "Authorization" in self.headers else 401, b"{}", **{"X-Error-Code": code})
        elif revision not in ("", "main", repository.commit):
            self._send(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        elif is_listing:
            found = listing(name, repository)
            self._send(200, json.dumps(hub.listed(found) if hub.listed else found).encode())
        else:
            self._resolve(hub, name, repository, "/".join(parts[4:]))

    def _may(self, repository, is_listing):
        is_known = self.headers.get("Authorization") == f"Bearer {repository.token}"
        return not repository.token or is_known or (is_listing and repository.is_gated)

    def _resolve(self, hub, name, repository, path):
        if path not in repository.files:
            self._send(404, b"{}", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
            return
        own = {"X-Repo-Commit": repository.commit, "ETag": f'"{repository.digest(path)}"'}
        if path in repository.large:
            size = str(len(repository.files[path]))
            linked = {"X-Linked-Etag": own["ETag"], "X-Linked-Size": size, "Location": f"{hub.cdn}/cdn/{name}/{path}"}
            self._send(302, b"", **own, **linked)
        else:
            self._file(hub, repository, path, own)

    def _file(self, hub, repository, path, headers):
        data = repository.files[path] if hub.damage is None else hub.damage(path, repository.files[path])
        begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
        self.send_response(206 if begin else 200)
        body = data[begin:]
        more = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        for key, value in {**headers, **more, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = hub.cut.get(path) if hub.is_cut_forever else hub.cut.pop(path, None)
        body = body if limit is None else body[: max(0, limit - begin)]
        for place in range(0, len(body), 1 << 16):
            if self.server.closing.wait(hub.speed):
                break
            try:
                self.wfile.write(body[place : place + (1 << 16)])
            except OSError:  # the client has ended
                break
            hub.sent.set()
        self.close_connection = True

    def _send(self, status, body, **headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving():
    """Yield a hub, whose large files come from another port."""
    hub = Hub()
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
    for server in servers:
        server.hub = hub
        server.closing = threading.Event()
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.closing.set()
            server.shutdown()
            server.server_close()


def wait_for(is_true, seconds=30.0):
    """Wait until something is true, at most for so long; the test fails then."""
    until = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.02)
