"""The files of the web page, the headers that they are sent with, and their routes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.endpoint import Answer, bodiless
from staticllm.server.state import ServerState

FOLDER = "/page/"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = (
    "page.css", "page.js", "chat.js", "conversations.js", "dictation.js", "documents.js", "dom.js", "markdown.js",
    "markdown-it.js", "scheduler.js", "server.js",
)  # fmt: skip
"""The scripts are modules with one task each, so that what shows hostile text (``markdown.js``) can be read and tested alone."""
ASSETS = {"/": "index.html", **{FOLDER + name: name for name in _FILES}}
"""From the paths of the page to its files. No other file can be asked for."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the icon; images of answers are not loaded
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy: only our own files, no inline script or style, and no HTML from strings at all."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page. ``tag`` identifies its contents (``ETag``)."""

    data: bytes
    media_type: str
    tag: str


def read_asset(path: str) -> Asset:
    """Return the file of a path in ``ASSETS``."""
    name = ASSETS[path]
    data = files("staticllm.server").joinpath("page", name).read_bytes()
    media_type = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
    return Asset(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def add_page_files(app: FastAPI, state: ServerState) -> None:
    """Add the routes of the files to an application."""
    for path in ASSETS:
        answer = _file(state, read_asset(path))
        app.add_api_route(path, answer, methods=["GET", "HEAD"], include_in_schema=False, response_model=None)


def _file(state: ServerState, asset: Asset) -> Answer:
    headers = {**HEADERS, "ETag": asset.tag}

    async def file(request: Request) -> Response:
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        return Response(asset.data, headers=headers, media_type=asset.media_type)

    return bodiless(state, file)
