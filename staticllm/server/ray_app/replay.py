"""Continues a streamed answer whose replica was lost: another replica makes it again, and what was sent is left out.

The ingress gives such a request a seed, so that the second answer is the first one again. Where it is another one after all
(numbers differ in their last bits in other calls, and a draw lies at the border of two tokens), the stream ends with an
error.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from typing import Any

from staticllm.pipelines.daemon_client.delivered import Delivered, DivergedError
from staticllm.server.http.errors import SERVER, ApiError, to_json

TEXTS = ("content", "reasoning_content", "text")
RESUMED_PATHS = ("/chat/completions", "/completions")
LARGEST_SEED = 2**31 - 1


def seeded(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a stream with a seed, if it has none, or a negative one, which is random."""
    seed = body.get("seed")
    is_random = seed is None or (isinstance(seed, (int, float)) and seed < 0)
    return {**body, "seed": secrets.randbelow(LARGEST_SEED)} if is_random else body


class EventReplay:
    """The events of one streamed answer of OpenAI's API, over all replicas that make it."""

    def __init__(self) -> None:
        self._rest = b""
        self._first: dict[str, Any] | None = None  # the id and the moment that all chunks have
        self._texts: dict[tuple[int, str], Delivered[str]] = defaultdict(lambda: Delivered(""))  # by choice and field
        self._is_again = False
        self._others: set[str] = set()  # deltas without text that were sent: roles, reasons
        self._ended: set[int] = set()  # the choices whose last chunk had text and was sent
        self._has_usage = False
        self._can_resume = True
        self._is_complete = False

    @property
    def can_resume(self) -> bool:
        """Whether another replica may continue: only text was sent."""
        return self._can_resume

    @property
    def is_complete(self) -> bool:
        """Whether the mark of the end was sent."""
        return self._is_complete

    def restart(self) -> None:
        self._rest = b""
        self._is_again = True
        for each in self._texts.values():
            each.restart()

    def take(self, part: bytes) -> bytes:
        """Return what of a part of the answer is new.

        Raises:
            DivergedError: the texts differ from those that were sent.
        """
        *events, self._rest = (self._rest + part).split(b"\n\n")
        return b"".join(self._event(event) for event in events)

    def _event(self, event: bytes) -> bytes:
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            self._is_complete = True
        if data in (event, b"[DONE]"):  # a comment, or the end
            return event + b"\n\n"
        chunk = json.loads(data)
        if "error" in chunk:
            self._can_resume = False
            return event + b"\n\n"
        if self._first is None:
            self._first = {name: chunk[name] for name in ("id", "created") if name in chunk}
        choices = [kept for choice in chunk.get("choices", ()) if (kept := self._choice(choice)) is not None]
        if not self._is_again:
            self._has_usage = self._has_usage or not choices
            return event + b"\n\n"
        if not choices and (chunk.get("choices") or self._has_usage):
            return b""
        self._has_usage = self._has_usage or not choices
        return f"data: {to_json({**chunk, **self._first, 'choices': choices})}\n\n".encode()

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Note what a choice of a chunk says, and return its new part; None if all of it was sent."""
        delta = choice.get("delta", choice)
        texts = {name: delta[name] for name in TEXTS if isinstance(delta.get(name), str) and delta[name]}
        if delta.get("tool_calls") or choice.get("logprobs"):
            if self._is_behind(choice["index"]):
                raise DivergedError
            self._can_resume = False
        if not texts:
            return self._other(choice)
        new = {name: self._texts[choice["index"], name].take(text) for name, text in texts.items()}
        is_end = choice.get("finish_reason") is not None and choice["index"] not in self._ended
        if is_end:
            self._ended.add(choice["index"])
        if not any(new.values()) and not is_end:
            return None
        if delta is choice:
            return {**choice, **new}
        return {**choice, "delta": {**delta, **new}}

    def _other(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return a choice without text, unless it was sent before."""
        key = to_json(choice)
        if choice.get("finish_reason") is not None and self._is_behind(choice["index"]):
            raise DivergedError  # it ends before what was sent
        if self._is_again and key in self._others:
            return None
        self._others.add(key)
        return choice

    def _is_behind(self, index: int) -> bool:
        """Return whether the answer that is made again has not yet said all that was sent."""
        return any(text.is_behind for key, text in self._texts.items() if key[0] == index)


def lost_event(reason: str) -> bytes:
    """Return the events that end a stream that cannot be continued."""
    error = ApiError(502, f"{reason}: send the request again", kind=SERVER, code="replica_lost")
    return f"data: {to_json(error.body())}\n\ndata: [DONE]\n\n".encode()
