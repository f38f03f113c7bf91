"""Remembers answers, so that a client continues a conversation with the id of the last one."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from staticllm.server.http.errors import ApiError, to_json

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Bytes of all conversations together, as JSON."""
Message = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """An answer: its object, and the conversation that ends with it, without the instructions of its request.

    ``owner`` is the client that may read and continue it. ``items`` are the request's own input items.
    """

    response: dict[str, Any]
    messages: tuple[Message, ...]
    items: tuple[dict[str, Any], ...]
    owner: str


@dataclass(frozen=True)
class _Kept:
    """An answer as it is kept: ``text`` is the JSON of its response, messages and items, ``items`` are the ids of these."""

    text: bytes
    owner: str
    items: tuple[str, ...]

    @classmethod
    def of(cls, stored: StoredResponse) -> _Kept:
        text = to_json([stored.response, stored.messages, stored.items])
        ids = tuple(item["id"] for item in _items_of(stored))
        return cls(
            text.encode(errors="surrogatepass"), stored.owner, ids
        )  # models write halves of pairs into arguments

    def restored(self) -> StoredResponse:
        response, messages, items = json.loads(self.text.decode(errors="surrogatepass"))
        return StoredResponse(response, tuple(messages), tuple(items), self.owner)


class ResponseStore:
    """The last answers, in memory: at most ``MAX_RESPONSES`` with ``MAX_BYTES``. Any thread may call.

    They are kept as JSON, so that these are the bytes that they take: an empty object takes 3 as JSON and 70 as
    a Python object.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._items: dict[tuple[str, str], str] = {}  # (owner, id of an item) → id of its answer

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: StoredResponse) -> None:
        """Keep an answer; the oldest are forgotten."""
        kept = _Kept.of(stored)
        with self._lock:
            id = stored.response["id"]
            self._forget(id)
            self._kept[id] = kept
            self._num_bytes += len(kept.text)
            self._items |= {(kept.owner, item): id for item in kept.items}
            while self._kept and (len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes):
                self._forget(next(iter(self._kept)))

    def _forget(self, id: str) -> None:
        """Forget an answer, if it is there, and its items, except those that a later answer has too. The lock is held."""
        dropped = self._kept.pop(id, None)
        if dropped is None:
            return
        self._num_bytes -= len(dropped.text)
        for item in dropped.items:
            if self._items.get((dropped.owner, item)) == id:
                del self._items[dropped.owner, item]

    def item(self, id: str, owner: str) -> dict[str, Any] | None:
        """Return an item of the input or the output of an answer of this client; None if it is unknown or was forgotten."""
        with self._lock:
            kept = self._kept.get(self._items.get((owner, id), ""))
        found = () if kept is None else _items_of(kept.restored())
        return next((item for item in found if item["id"] == id), None)

    def find(self, id: str, owner: str) -> StoredResponse | None:
        """Return an answer of this client; None if it is unknown or was forgotten."""
        with self._lock:
            found = self._kept.get(id)
            if found is None or found.owner != owner:
                return None
            self._kept.move_to_end(id)
        return found.restored()

    def previous(self, id: str, owner: str) -> StoredResponse:
        """Return the answer that a request continues.

        Raises:
            ApiError: it is unknown or was forgotten (400).
        """
        found = self.find(id, owner)
        if found is None:
            raise ApiError(
                400,
                f"Previous response with id {id[:100]!r} not found: the last {self._max_responses} are kept until the end",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    def get(self, id: str, owner: str) -> StoredResponse:
        """Return an answer.

        Raises:
            ApiError: it is unknown or was forgotten (404).
        """
        found = self.find(id, owner)
        if found is None:
            raise ApiError(
                404, f"Response with id {id[:100]!r} not found", param="response_id", code="response_not_found"
            )
        return found

    def remove(self, id: str, owner: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: it is unknown or was forgotten (404).
        """
        self.get(id, owner)
        with self._lock:
            self._forget(id)


def _items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return the items of an answer that have an id."""
    return [item for item in (*stored.items, *stored.response.get("output", ())) if isinstance(item.get("id"), str)]
