"""What travels between the ingress and a replica: a request with its body, and the parts of its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]
MAX_PREFIX_CHARS = 8192
"""Characters of a prompt that the router compares: what follows rarely decides."""


@dataclass(frozen=True)
class ReplicaRequest:
    """One HTTP request. Ray's router for prefixes reads ``prompt``, the beginning of what the model will see; never empty."""

    method: str
    path: str
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    body: bytes
    prompt: str
    model: str

    def with_body(self, body: bytes) -> ReplicaRequest:
        """Return this request with another body."""
        headers = tuple((name, value) for name, value in self.headers if name != b"content-length")
        return replace(self, body=body, headers=(*headers, (b"content-length", str(len(body)).encode())))


@dataclass(frozen=True)
class ReplicaHead:
    """The first part of an answer; parts of its body follow as bytes."""

    status: int
    headers: Headers

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, empty if it is missing."""
        return next((value for key, value in self.headers if key.lower() == name), b"")


def prompt_of(body: dict[str, Any]) -> str:
    """Return the beginning of the text of a request, by which requests with the same beginning are known. Never empty."""
    parts: list[str] = []
    for name in ("instructions", "system", "messages", "prompt", "input", "query"):
        _collect(body.get(name), parts)
    return "\n".join(parts)[:MAX_PREFIX_CHARS] or " "


def _collect(value: object, parts: list[str]) -> None:
    if sum(map(len, parts)) >= MAX_PREFIX_CHARS:
        return
    if isinstance(value, str):
        parts.append(value[:MAX_PREFIX_CHARS])
    elif isinstance(value, list):
        for each in value[:MAX_PREFIX_CHARS]:
            _collect(each, parts)
    elif isinstance(value, dict):
        for name in ("role", "content", "text"):
            _collect(value.get(name), parts)
