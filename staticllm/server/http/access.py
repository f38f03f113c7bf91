"""Access to the server: API keys, origins of web pages, and the host names that clients use."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from staticllm.server.http.errors import ApiError
from staticllm.server.settings import ServerSettings, client_name, is_local_name

LOCAL_ORIGINS = (
    r"(app|tauri|file|vscode-webview|vscode-file)://.*"
    r"|https?://([a-z0-9-]+\.)*localhost(:\d+)?|https?://127\.\d+\.\d+\.\d+(:\d+)?|https?://\[::1\](:\d+)?"
)
"""Origins that may always send requests: desktop apps, and pages of this machine."""
OPAQUE = "null"
"""The origin of a file, and of a sandboxed frame of any page: a browser does not say which."""
CLIENT = "staticllm.client"
"""The entry of a request's scope that names its client for fairness."""
METHODS = ("GET", "POST", "DELETE", "OPTIONS")


class Origins:
    """The origins of web pages that may send requests."""

    def __init__(self, settings: ServerSettings) -> None:
        self.allows_all = "*" in settings.allowed_origins
        self.listed = tuple(origin.rstrip("/").lower() for origin in settings.allowed_origins)
        self.allows_opaque = bool(settings.keys)
        self._local = re.compile(LOCAL_ORIGINS, re.IGNORECASE)

    def allows(self, origin: str) -> bool:
        """Return whether a page of this origin may send requests. Files may if a key proves that they are not of any page."""
        if origin.lower() == OPAQUE and self.allows_opaque:
            return True
        return self.allows_all or bool(self._local.fullmatch(origin)) or origin.rstrip("/").lower() in self.listed


class Preflights(CORSMiddleware):
    """Starlette's CORS, with the origins of the settings; preflights are answered with status 204. ``on_refusal`` gets errors."""

    def __init__(self, app: ASGIApp, origins: Origins, on_refusal: Callable[[ApiError], object]) -> None:
        super().__init__(
            app,
            allow_methods=METHODS,
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["Retry-After"],
        )
        self._origins = origins
        self._on_refusal = on_refusal

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allows(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code != 200:
            message = bytes(response.body).decode()
            error = ApiError(403, message, code="origin_not_allowed", knob="--allowed-origins")
            self._on_refusal(error)
            return error.response()
        headers = {
            name: value for name, value in response.headers.items() if name not in ("content-length", "content-type")
        }
        return Response(status_code=204, headers=headers)


class AccessMiddleware:
    """Refuses requests with a wrong key, of a foreign origin, or for a foreign host name; names the client of the others.

    A web page that rebinds its own host name to this machine has an origin that equals the host name, so without keys a server
    that only this machine can reach answers to local host names only. ``on_refusal`` gets the errors; ``open_paths`` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        origins: Origins,
        on_refusal: Callable[[ApiError], object],
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._origins = origins
        self._on_refusal = on_refusal
        self._open_paths = open_paths
        self._keys = [_digest(key) for key in settings.keys]
        self._clients = settings.clients
        self._checks_host = settings.is_local and not settings.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self.refusal(scope)
        if error is not None:
            self._on_refusal(error)
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request is refused; None if it is not. Then the scope names its client."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        origin = headers.get("origin")
        if self._checks_host and not is_local_name(_name_of(host)):
            return ApiError(403, f"the host name {host[:200]!r} is not local: use 127.0.0.1", code="host_not_allowed")
        is_same = bool(host) and origin is not None and urlsplit(origin).netloc == host
        if origin is not None and not is_same and not self._origins.allows(origin):
            return _foreign(origin)
        number = self._key_of(headers.get("authorization", ""), headers.get("x-api-key"))
        if self._keys and number is None and scope["path"] not in self._open_paths:
            return ApiError(
                401,
                "Incorrect API key provided: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        address = (scope.get("client") or ("",))[0]
        scope[CLIENT] = f"address {address}" if number is None or len(self._keys) == 1 else f"key {number}"
        if number is not None and (place := number - len(self._keys) + len(self._clients)) >= 0:
            scope[CLIENT] = client_name(self._clients[place])
        return None

    def _key_of(self, authorization: str, other: str | None) -> int | None:
        """Return the number of the key that a client sent; None if it is none of ours. All keys are compared."""
        scheme, _, token = authorization.partition(" ")
        given = token if scheme.lower() == "bearer" else other
        if given is None:
            return None
        digest = _digest(given.strip())
        found = None
        for number, key in enumerate(self._keys):
            if hmac.compare_digest(digest, key):
                found = number
        return found


def _foreign(origin: str) -> ApiError:
    message = f"the origin {origin[:200]!r} is not allowed: serve with --allowed-origins"
    if origin.lower() == OPAQUE:
        message = (
            "the origin 'null' is that of files, and of sandboxed frames of any page: serve with --api-key, or with "
            "--allowed-origins null"
        )
    return ApiError(403, message, code="origin_not_allowed", knob="--allowed-origins")


def _digest(key: str) -> bytes:
    """Return a digest of a key: all have the same length, so that comparing them takes the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name_of(host: str) -> str:
    """Return the name in a ``Host`` header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
