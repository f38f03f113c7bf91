"""Remembers answers, so that a client continues a conversation with the id of the last one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from staticllm.server.api_error import ApiError, to_json

MAX_RESPONSES = 1024
MAX_CHARS = 64 << 20
"""Characters of all conversations together, as JSON."""
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


class ResponseStore:
    """The last answers, in memory: at most ``MAX_RESPONSES`` with ``MAX_CHARS``. Any thread may call."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses, self._max_chars, self._num_chars = max_responses, max_chars, 0
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}  # (owner, id) → id of its answer, item

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Keep an answer; the oldest are forgotten."""
        size = sum(len(to_json(part)) for part in (stored.messages, stored.response, stored.items))
        with self._lock:
            if stored.response["id"] in self._stored:
                self._forget(stored.response["id"])
            self._stored[stored.response["id"]] = stored, size
            self._items |= {(stored.owner, item["id"]): (stored.response["id"], item) for item in _items_of(stored)}
            self._num_chars += size
            while self._stored and (len(self._stored) > self._max_responses or self._num_chars > self._max_chars):
                self._forget(next(iter(self._stored)))

    def _forget(self, id: str) -> None:
        """Forget an answer and its items, except those that a later answer has too. The lock is held."""
        stored, size = self._stored.pop(id)
        self._num_chars -= size
        for item in _items_of(stored):
            if self._items.get((stored.owner, item["id"]), ("",))[0] == id:
                del self._items[stored.owner, item["id"]]

    def item(self, id: str, owner: str) -> dict[str, Any] | None:
        """Return an item of the input or the output of an answer of this client; None if it is unknown or was forgotten."""
        with self._lock:
            found = self._items.get((owner, id))
        return None if found is None else found[1]

    def find(self, id: str, owner: str) -> StoredResponse | None:
        """Return an answer of this client; None if it is unknown or was forgotten."""
        with self._lock:
            found = self._stored.get(id)
            if found is None or found[0].owner != owner:
                return None
            self._stored.move_to_end(id)
            return found[0]

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
            if id in self._stored:
                self._forget(id)


def _items_of(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return the items of an answer that have an id."""
    return [item for item in (*stored.items, *stored.response.get("output", ())) if isinstance(item.get("id"), str)]
