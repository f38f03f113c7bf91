"""Bounds the time of one template rendering and the size of every value that it creates, singly and in total.

Jinja's sandbox keeps a template away from files and attributes, but not from ``"a" * 10**9`` or a loop that never ends.
Here each value is weighed when it is created: a list counts with everything in it, and an element that occurs twice counts
twice. Any single operation of Python on such a value (compare, hash, print) is therefore short, and nothing has to interrupt
it from outside: neither a trace function, which would disturb debuggers, nor an exception from another thread, which may
arrive after the template has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jinja2 import pass_context
from jinja2.runtime import Context, Macro

from staticllm.errors import PromptError

MAX_SECONDS = 3.0
MAX_CHARS, MAX_ITEMS = 4 << 20, 1 << 18
"""The largest number of characters in one text, and of items in one list including the lists in it."""
MAX_TOTAL_CHARS, MAX_TOTAL_ITEMS = 64 << 20, 2 << 20
"""The largest numbers of characters and of items that one rendering may create in total."""
MAX_DEPTH = 64
"""The deepest nesting of lists in lists."""
MAX_BITS = 4096
"""The most bits of a whole number."""
_PIECE_CHARS, _CONTAINER_ITEMS, _OBJECT_CHARS = 32, 8, 64
"""The fixed cost of one output fragment, of an empty list and of an object, without their content."""
_EMPTY: dict[str, Any] = {}
_ITEMS_VIEW = type(_EMPTY.items())
VIEWS: tuple[type, ...] = (type(_EMPTY.keys()), type(_EMPTY.values()), _ITEMS_VIEW)
_CONTAINERS = (list, tuple, dict, *VIEWS)
_thread = threading.local()


class TemplateLimitError(Exception):
    """A template exceeds a bound."""


class Weight(NamedTuple):
    """The size of a value with everything in it: nesting depth, number of items, number of characters."""

    depth: int
    items: int
    chars: int


class Budget:
    """The time, characters and items that one rendering may still use."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds = clock, seconds
        self._deadline = clock() + seconds
        self.chars, self.items = MAX_TOTAL_CHARS, MAX_TOTAL_ITEMS
        # A template cannot change its lists. Each is kept here with its weight, so that no other object reuses its id.
        self._weights: dict[int, tuple[Any, Weight]] = {}

    def tick(self) -> None:
        """Raise ``TemplateLimitError`` after the deadline."""
        if self.seconds_left < 0:
            raise TemplateLimitError(f"it runs for more than {self._seconds:g} s")

    @property
    def seconds_left(self) -> float:
        """The time until the deadline; negative after it."""
        return self._deadline - self._clock()

    def spend_chars(self, size: int) -> None:
        """Subtract ``size`` characters; raise ``TemplateLimitError`` if fewer are left."""
        self.chars -= size
        if self.chars < 0:
            raise TemplateLimitError(f"it makes texts of more than {MAX_TOTAL_CHARS} characters in all")

    def spend_items(self, size: int) -> None:
        """Subtract ``size`` items; raise ``TemplateLimitError`` if fewer are left."""
        self.items -= size
        if self.items < 0:
            raise TemplateLimitError(f"it makes lists of more than {MAX_TOTAL_ITEMS} items in all")

    def weigh(self, value: Any, level: int = 0) -> Weight:
        """Return the weight of a value; the items of each list are subtracted from the budget once.

        Raises:
            TemplateLimitError: the value is too large, or the budget or the time is used up.
        """
        if not isinstance(value, _CONTAINERS):
            return Weight(0, 1, _leaf_chars(value))
        known = self._weights.get(id(value))
        if known is None:
            if level > MAX_DEPTH:
                raise TemplateLimitError(f"it nests lists deeper than {MAX_DEPTH}")
            parts = _parts(value)
            check_items(len(parts))
            self.spend_items(len(parts) + _CONTAINER_ITEMS)
            known = self._weights[id(value)] = value, self.together(parts, level)
        return known[1]

    def together(self, parts: Sequence[Any], level: int = 0) -> Weight:
        """Return the weight that a list of these parts would have.

        Raises:
            TemplateLimitError: the list would be too large, or the budget or the time is used up.
        """
        depth, items, chars = 0, 1, 0
        for part in parts:
            if isinstance(part, str):
                items += 1
                chars += len(part)
            else:
                weight = self.weigh(part, level + 1)
                depth, items, chars = max(depth, weight.depth), items + weight.items, chars + weight.chars
        self.tick()
        if depth >= MAX_DEPTH:
            raise TemplateLimitError(f"it nests lists deeper than {MAX_DEPTH}")
        check_items(items)
        check_size(chars)
        return Weight(depth + 1, items, chars)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [part for pair in value for part in pair] if isinstance(value, _ITEMS_VIEW) else list(value)


def _leaf_chars(value: Any) -> int:
    """Return the characters of a value that is not a list; small numbers count only as an item."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 if value.bit_length() > 64 else 0
    if value is None or isinstance(value, float):
        return 0
    return _OBJECT_CHARS + (len(str(value.name)) if isinstance(value, Macro) else 0)


@contextmanager
def limited(seconds: float | None = None) -> Iterator[None]:
    """Set one common budget for the templates that this thread renders in the block; an inner block adds nothing to it."""
    before: Budget | None = getattr(_thread, "budget", None)
    _thread.budget = before or Budget(MAX_SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        _thread.budget = before


@contextmanager
def limited_apart(seconds: float) -> Iterator[Budget]:
    """Set a budget of its own in the block, whatever block is around it.

    ``seconds`` are time that this thread computes: how much else this machine does changes nothing.
    """
    before: Budget | None = getattr(_thread, "budget", None)
    own = _thread.budget = Budget(seconds, time.thread_time)
    try:
        yield own
    finally:
        _thread.budget = before


def budget() -> Budget:
    """Return the budget of the enclosing ``limited`` block."""
    found: Budget | None = getattr(_thread, "budget", None)
    assert found is not None, "templates run inside limited()"
    return found


def tick() -> None:
    """Check the time.

    Raises:
        TemplateLimitError: the time is over.
    """
    budget().tick()


def ticked(value: Any) -> Any:
    """Check the time and return the value."""
    tick()
    return value


def made(value: Any) -> Any:
    """Subtract a new value from the budget and return it.

    Raises:
        TemplateLimitError: the value is too large, or the budget or the time is used up.
    """
    tick()
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"it makes a number of {value.bit_length()} bits, at most {MAX_BITS}")
        budget().spend_chars(value.bit_length() // 8)
    elif isinstance(value, (str, bytes)):
        check_size(len(value))
        budget().spend_chars(len(value))
    elif isinstance(value, _CONTAINERS):
        budget().weigh(value)
    return value


def check_size(size: float) -> None:
    """Raise ``TemplateLimitError`` if one text of ``size`` characters is too long."""
    if size > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text of {size:.3g} characters, at most {MAX_CHARS}")


def check_items(size: float) -> None:
    """Raise ``TemplateLimitError`` if one list of ``size`` items is too long."""
    if size > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of {size:.3g} items, at most {MAX_ITEMS}")


def expect_chars(size: int) -> None:
    """Check that the budget allows a text of up to ``size`` characters; to be called before the text is created.

    Raises:
        TemplateLimitError: it does not.
    """
    check_size(size)
    if size > budget().chars:
        budget().spend_chars(size)


def expect_items(size: int) -> None:
    """Check that the budget allows a list of up to ``size`` items; to be called before the list is created.

    Raises:
        TemplateLimitError: it does not.
    """
    check_items(size)
    if size > budget().items:
        budget().spend_items(size)


def text_size(value: Any) -> int:
    """Estimate the characters of a value's text; with quotes and escapes it may be several times longer."""
    if isinstance(value, str):
        return len(value)
    weight = budget().weigh(value)
    return weight.chars + 4 * weight.items


def as_text(value: Any) -> str:
    """Return the text of a value, and subtract it from the budget."""
    if isinstance(value, str):
        return value
    expect_chars(text_size(value))
    return str(made(str(value)))


@pass_context
def shown(_context: Context, value: Any) -> Any:
    """Return a value as the prompt shows it. (Jinja evaluates nothing in advance for a function that takes a context.)"""
    tick()
    budget().spend_chars(_PIECE_CHARS)
    return value if isinstance(value, str) else as_text(value)


def text(piece: str) -> str:
    """Count one piece of the template's own text, which goes into the prompt unchanged."""
    tick()
    budget().spend_chars(_PIECE_CHARS)
    return piece


def concat(pieces: Iterable[str]) -> str:
    """Join pieces of text, and stop as soon as the result is too long."""
    parts, size = [], 0
    for piece in pieces:
        tick()
        parts.append(piece)
        size += len(piece)
        check_size(size)
    budget().spend_chars(size)
    return "".join(parts)


def join_pieces(pieces: Iterable[Any]) -> str:
    """Return the result of the operator ``~``."""
    return concat([as_text(piece) for piece in pieces])


def listed(items: Iterable[Any]) -> list[Any]:
    """Return the items of an iterator as a list, and subtract them from the budget."""
    found: list[Any] = []
    for item in items:
        tick()
        found.append(item)
        check_items(len(found))
    budget().weigh(found)
    return found


def copied(value: Any, level: int = 0) -> Any:
    """Return a copy of the caller's value for the template: text, numbers, lists and dicts.

    Raises:
        PromptError: it is nested too deeply or contains an object of another type.
        TemplateLimitError: it is too large.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if level > MAX_DEPTH:
        raise PromptError(f"the conversation nests lists deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        budget().spend_items(len(value) + 1)
        return {copied(key, level + 1): copied(item, level + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        budget().spend_items(len(value) + 1)
        items = [copied(item, level + 1) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    raise PromptError(f"the conversation holds a {type(value).__name__}: pass text, numbers, lists and dicts")
