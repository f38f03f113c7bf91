"""Bounds the time of one template rendering, the size of each text and list that it makes, and of all its texts together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from staticllm.errors import PromptError

MAX_SECONDS = 3.0
MAX_CHARS, MAX_ITEMS = 4 << 20, 1 << 18
"""The largest number of characters in one text, and of items in one list, without what lists hold in it."""
MAX_TOTAL_CHARS = 64 << 20
"""The largest number of characters that one rendering may make in total."""
MAX_DEPTH = 64
"""The deepest nesting of lists in a conversation."""
_thread = threading.local()


class TemplateLimitError(Exception):
    """A template exceeds a bound."""


class Budget:
    """The time and the characters that one rendering may still use."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds = clock, seconds
        self._deadline = clock() + seconds
        self.chars = MAX_TOTAL_CHARS

    def tick(self) -> None:
        """Raise ``TemplateLimitError`` after the deadline."""
        if self.seconds_left < 0:
            raise TemplateLimitError(f"it runs for more than {self._seconds:g} s")

    @property
    def seconds_left(self) -> float:
        """The time until the deadline; negative after it."""
        return self._deadline - self._clock()


def limited() -> AbstractContextManager[Budget]:
    """Set one common budget for the templates that this thread renders in the block; an inner block adds nothing to it."""
    return _set(getattr(_thread, "budget", None) or Budget(MAX_SECONDS))


def limited_apart(seconds: float) -> AbstractContextManager[Budget]:
    """Set a budget of its own in the block, whatever block is around it.

    ``seconds`` are time that this thread computes: how much else this machine does changes nothing.
    """
    return _set(Budget(seconds, time.thread_time))


@contextmanager
def _set(budget: Budget) -> Iterator[Budget]:
    before: Budget | None = getattr(_thread, "budget", None)
    _thread.budget = budget
    try:
        yield budget
    finally:
        _thread.budget = before


def tick() -> None:
    """Raise ``TemplateLimitError`` if the time of the enclosing ``limited`` block is over."""
    _thread.budget.tick()


def expect(kind: type, size: int) -> None:
    """Check the length of a text (``str``) or of a list (another kind) before it is made.

    Raises:
        TemplateLimitError: it would be too long, or all texts together would.
    """
    if not issubclass(kind, str):
        if size > MAX_ITEMS:
            raise TemplateLimitError(f"it makes a list of {size:.3g} items, at most {MAX_ITEMS}")
    elif size > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text of {size:.3g} characters, at most {MAX_CHARS}")
    elif size > _thread.budget.chars:
        raise TemplateLimitError(f"it makes texts of more than {MAX_TOTAL_CHARS} characters in all")


def made(value: Any) -> Any:
    """Check the time and the length of a new value, subtract a text from the budget, and return the value."""
    tick()
    if isinstance(value, (str, list, tuple)):
        expect(type(value), len(value))
        _thread.budget.chars -= len(value) if isinstance(value, str) else 0
    return value


def concat(pieces: Iterable[str]) -> str:
    """Join pieces of text, and stop as soon as the time is over or the result is too long."""
    parts, size = [], 0
    for piece in pieces:
        tick()
        parts.append(piece)
        size += len(piece)
        expect(str, size)
    return str(made("".join(parts)))


def listed(items: Iterable[Any]) -> list[Any]:
    """Return the items of an iterator as a list, and stop as soon as the time is over or the list is too long."""
    found: list[Any] = []
    for item in items:
        tick()
        found.append(item)
        expect(list, len(found))
    return found


def copied(value: Any, level: int = 0) -> Any:
    """Return a copy of the caller's value for the template: text, numbers, lists and dicts.

    Raises:
        PromptError: it is nested too deeply or contains an object of another type.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if level > MAX_DEPTH:
        raise PromptError(f"the conversation nests lists deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        return {copied(key, level + 1): copied(item, level + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [copied(item, level + 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise PromptError(f"the conversation holds a {type(value).__name__}: pass text, numbers, lists and dicts")
