"""Jinja's sandbox with bounds on time, on the size of every value, and on numbers.

The sandbox keeps a template away from files and attributes, but not from ``"a" * 10**9`` or a loop that never ends. Here
each pass of a loop, each call, filter and operator looks at the clock and at the sizes, so that nothing needs to be stopped
from outside: neither a trace function, which would disturb debuggers, nor an exception from another thread, which may
arrive after the template has ended.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 3.0
MAX_CHARS, MAX_ITEMS = 4 << 20, 1 << 18
"""Of any text, and of any list, that a template makes."""
MAX_WIDTH = 9999
"""Of an indent, a count or a padding."""
MAX_BITS = 4096
"""Of a whole number."""
_DIGITS = re.compile(r"\d{5,}")
_TAKES_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")
_WIDTH_FILTERS = frozenset(["center", "indent", "wordwrap", "batch", "slice", "truncate", "round", "tojson", "pprint"])
_WIDTH_METHODS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
_clock = threading.local()


class TemplateLimitError(Exception):
    """A template exceeds a bound."""


@contextmanager
def limited(seconds: float | None = None) -> Iterator[None]:
    """Within this block, templates of this thread have ``seconds``; a block inside another does not prolong it."""
    before = getattr(_clock, "deadline", None)
    _clock.deadline = time.monotonic() + (MAX_SECONDS if seconds is None else seconds) if before is None else before
    try:
        yield
    finally:
        _clock.deadline = before


def tick() -> None:
    """
    Raises:
        TemplateLimitError: the time is over.
    """
    deadline = getattr(_clock, "deadline", None)
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} s")


def checked(value: Any) -> Any:
    """The value, if it is no larger than a template may make one.

    Raises:
        TemplateLimitError: it is, or the time is over.
    """
    tick()
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"it makes a number of {value.bit_length()} bits, at most {MAX_BITS}")
    elif isinstance(value, (str, bytes)):
        _check_size(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _check_items(len(value))
    return value


def _check_size(size: float) -> None:
    if size > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text of {size:.3g} characters, at most {MAX_CHARS}")


def _check_items(size: int) -> None:
    if size > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of {size:.3g} items, at most {MAX_ITEMS}")


def _check_widths(arguments: Iterable[Any]) -> None:
    """Widths, counts and indents."""
    for argument in arguments:
        if isinstance(argument, (int, float)) and abs(argument) > MAX_WIDTH:
            raise TemplateLimitError(f"it asks for a width of {argument:.3g}, at most {MAX_WIDTH}")


def _concat(pieces: Iterable[str]) -> str:
    """Join pieces of text; stop before the memory is full."""
    parts, size = [], 0
    for piece in pieces:
        tick()
        parts.append(piece)
        size += len(piece)
        _check_size(size)
    return "".join(parts)


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_join(items: Any, between: Any) -> None:
    if isinstance(items, (list, tuple, str, dict)):
        sizes = (len(item) if isinstance(item, str) else 1 for item in items)
        _check_size(sum(sizes) + len(items) * (len(between) if isinstance(between, str) else 0))


def _check_repeated(text: Any, separator: str, widths: Iterable[Any]) -> None:
    """A width that each line or tab of a text gets."""
    for width in widths:
        if isinstance(text, str) and isinstance(width, int):
            _check_size(len(text) + (text.count(separator) + 1) * width)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Look at what an operator would make before it makes it."""
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if abs(left) > 1 and abs(left).bit_length() * right > MAX_BITS:
            raise TemplateLimitError(f"it raises a number to the power of {right:.3g}")
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, bytes)) and isinstance(times, int):
                _check_size(len(items) * times)
            elif isinstance(items, (list, tuple)) and isinstance(times, int):
                _check_items(len(items) * times)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        _check_size(len(left) + len(right))
    elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        _check_items(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))


def _check_format(pattern: str, arguments: Iterable[Any]) -> None:
    """A pattern of ``%`` or ``format``: widths in it, and widths that it takes from its arguments."""
    if found := _DIGITS.search(pattern):
        raise TemplateLimitError(f"it formats to a width of {found.group()[:12]}, at most {MAX_WIDTH}")
    if _TAKES_WIDTH.search(pattern):
        _check_widths(arguments)
    _check_size(len(pattern) + sum(len(item) for item in arguments if isinstance(item, str)) * _count_fields(pattern))


def _count_fields(pattern: str) -> int:
    return max(pattern.count("%"), pattern.count("{"), 1)


def _check_filter(name: str, given: list[Any], named: dict[str, Any]) -> None:
    """Look at what a filter would make before it makes it."""
    rest = [*given[1:], *named.values()]
    if name in _WIDTH_FILTERS:
        _check_widths(rest)
    if name in ("indent", "tojson"):
        _check_repeated(given[0], "\n", rest)
    elif name == "replace" and len(given) > 2:
        _check_replacement(*given[:3])
    elif name == "join":
        _check_join(given[0], given[1] if len(given) > 1 else named.get("d", ""))
    elif name == "format" and isinstance(given[0], str):
        _check_format(given[0], rest)


def shown(value: Any) -> Any:
    """The value, if its text is no larger than a template may make one: lists may hold the same list many times."""
    pending, size = [value], 0
    while pending:
        item = pending.pop()
        if isinstance(item, (list, tuple, dict)):
            _check_items(len(pending) + len(item))
            pending += [*item, *item.values()] if isinstance(item, dict) else item
            tick()
        size += len(item) if isinstance(item, (str, bytes, list, tuple, dict)) else 1
        _check_size(size)
    return value


class _Instrument(NodeTransformer):
    """Put a look at the clock into every loop, and a look at the size into every ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (the visitor asks for this name)
        self.generic_visit(node)
        look = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("join_pieces")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates whose time, sizes and numbers are bounded; use inside ``limited``."""

    intercepted_binops = frozenset(["*", "**", "+", "-", "%", "//", "/"])
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=shown, **options)
        self.tick = tick
        self.filters = {name: self.bounded_filter(name, function) for name, function in self.filters.items()}
        for name in ("random", "urlize", "xmlattr"):  # nothing for a prompt
            self.filters.pop(name, None)

    def join_pieces(self, *pieces: Any) -> str:
        """What ``~`` makes."""
        return _concat(str(shown(piece)) for piece in pieces)

    def bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that looks at its arguments before it runs, and at its result."""

        is_of_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            tick()
            hidden, given = (arguments[:1], list(arguments[1:])) if is_of_context else ((), list(arguments))
            if name == "join" and isinstance(given[0], Iterable) and not isinstance(given[0], str):
                given[0] = list(given[0])
            for argument in given:
                shown(argument)
            _check_filter(name, given, named)
            return checked(function(*hidden, *given, **named))

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, (str, bytes)):
            if name in _WIDTH_METHODS:
                _check_widths([*args, *kwargs.values()])
            if name == "expandtabs":
                _check_repeated(owner, "\t", [*args, *kwargs.values()])
            elif name == "replace" and len(args) > 1:
                _check_replacement(owner, args[0], args[1])
            elif name == "join" and args:
                _check_join(args[0], owner)
        return checked(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            named = args[0] if value.__name__ == "format_map" and args else kwargs
            _check_format(value.__self__, [*args, *named.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        instrumented: nodes.Template = _Instrument().visit(parsed)
        return instrumented
