"""Records what clients send to a server of a test."""

from __future__ import annotations

import contextlib
import json

from staticllm.server import process


class Recorder:
    """An ASGI application around another: keeps each request's method, path, headers and body."""

    def __init__(self, app):
        self._app, self.requests = app, []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        entry = {"method": scope["method"], "path": scope["path"], "headers": headers, "body": b""}
        self.requests.append(entry)

        async def noted():
            message = await receive()
            if message["type"] == "http.request":
                entry["body"] += message.get("body", b"")
            return message

        return await self._app(scope, noted, send)

    def take(self):
        """Return the requests since the last call, without those for ``/health``: (method, path, JSON of the body)."""
        found, self.requests = [one for one in self.requests if one["path"] != "/health"], []
        return [(one["method"], one["path"], json.loads(one["body"]) if one["body"] else None) for one in found]


@contextlib.contextmanager
def recording():
    """Record the requests of the servers that are made in a ``with`` block; yields a function that returns the recorder."""
    made, original = [], process.create_app

    def create(state):
        made.append(Recorder(original(state)))
        return made[-1]

    process.create_app = create
    try:
        yield lambda: made[-1]
    finally:
        process.create_app = original
