"""Runs a chat template, which is foreign code, in Jinja's immutable sandbox with the settings that transformers uses.

There is a deadline, and there are bounds on the texts and lists that a template makes.
The time is checked in every loop body, call and filter, and while output is joined. Operations whose result may be
many times their operands are checked before they run. Values inside values are not weighed: ``[a] * 9`` counts nine items.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

import jinja2
import jinja2.debug  # which Jinja would import with the first exception of a template
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from staticllm.errors import PromptError

MAX_SECONDS = 3.0
MAX_CHARS = 4 << 20
MAX_ITEMS = 1 << 18
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
        self._clock = clock
        self._seconds = seconds
        self._deadline = clock() + seconds
        self.chars = MAX_TOTAL_CHARS

    def tick(self) -> None:
        """Check the deadline.

        Raises:
            TemplateLimitError: it is over.
        """
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
    """Check the deadline of the enclosing ``limited`` block.

    Raises:
        TemplateLimitError: it is over.
    """
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
    parts = []
    size = 0
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


MAX_WIDTH = 9999
"""The largest indent, count or padding."""
MAX_BITS = 4096
"""The most bits of a whole number."""
_NUMBER_CHARS = 400 + MAX_BITS
"""The most characters of a formatted number; ``'%f' % 1e308`` has 316, and a number in binary one for each bit."""
_TAKES_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_SIZED = (str, list, tuple)
_WIDENING = frozenset(
    ["batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "tojson", "wordwrap", "zfill"]
)
"""Filters and methods that take a width, a count or an indent, as a number or as text."""


class _Instrument(NodeTransformer):
    """Adds a check of the time to the body of every loop, and joins the operands of ``~`` within the bounds."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (the visitor asks for this name)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return self._call("join_pieces", node.nodes, node.lineno)

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=line)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment that bounds the time and the sizes of its templates; to be used inside ``limited``."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(concat)
    tick = staticmethod(tick)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self.filters = {name: self.bounded_filter(name, value) for name, value in self.filters.items()}
        del self.globals["lipsum"]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse the attributes of classes too: ``dict.update`` would change what it is given."""
        return not isinstance(obj, type) and super().is_safe_attribute(obj, attr, value)

    def bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with a check of its arguments before it runs, and of its result.

        It runs when it is called and not when its result is read: a long chain of lazy filters would exhaust the stack.
        """
        num_hidden = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            tick()
            hidden = arguments[:num_hidden]
            given = [*arguments[num_hidden:]]
            if name == "join" and given:
                given[0] = _joinable(given[0], _argument(given, named, 1, "d"))
            elif name == "format" and given:
                _check_format(str(given[0]), [*given[1:], *named.values()])
            elif given:
                _check_text(name, given[0], given[1:], named)
            result = function(*hidden, *given, **named)
            return iter(listed(result)) if isinstance(result, Iterator) else made(result)

        return bounded

    @staticmethod
    def join_pieces(*pieces: Any) -> str:
        """Return the result of the operator ``~``."""
        return concat(map(str, pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        tick()
        owner = getattr(__obj, "__self__", None)
        name = getattr(__obj, "__name__", "")
        if not isinstance(owner, (str, int)):
            return super().call(__context, __obj, *args, **kwargs)
        if name == "join" and args:
            args = (_joinable(args[0], owner), *args[1:])
        else:
            _check_text(name, owner, args, kwargs)
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            _check_format(value.__self__, [*args[0].values()] if value.__name__ == "format_map" else values)
            return str(made(wrapped(*args, **kwargs)))

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        instrumented: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return instrumented


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and abs(left) > 1 and bits > MAX_BITS:
            raise TemplateLimitError(f"a product or power makes a number of {bits:.3g} bits, at most {MAX_BITS}")
    elif operator == "*":
        value, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(value, _SIZED) and isinstance(times, int):
            expect(type(value), len(value) * times)
    elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, type(left)):
        expect(type(left), len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(
            left, [*right.values()] if isinstance(right, dict) else right if isinstance(right, tuple) else [right]
        )


def _check_text(name: str, value: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check the filter or method ``name`` of a value before it runs."""
    text = value if isinstance(value, str) else ""
    if name in _WIDENING:
        width = max((_width(each) for each in (*args, *named.values())), default=8)
        expect(str, len(text) + (1 + sum(map(text.count, "\t" if name == "expandtabs" else _LINE_ENDS))) * width)
    elif name == "replace":
        old, new = (str(_argument(args, named, place, key)) for place, key in enumerate(("old", "new")))
        count = _argument(args, named, 2, "count")
        found = text.count(old)
        expect(str, len(text) + len(new) * (min(found, count) if isinstance(count, int) and count >= 0 else found))


def _joinable(items: Any, between: Any) -> list[Any]:
    found = listed(items)
    expect(str, sum(len(item) for item in found if isinstance(item, str)) + len(found) * len(str(between or "")))
    return found


def _check_format(pattern: str, values: Sequence[Any]) -> None:
    """Check a pattern of ``%`` or ``format``: its fields, its widths, and the widths that it takes from its values."""
    widths = [_width(int(found[:12])) for found in re.findall(r"\d+", pattern)]
    if _TAKES_WIDTH.search(pattern):
        widths += [_width(value) for value in values if isinstance(value, int)]
    sizes = [len(value) if isinstance(value, str) else _NUMBER_CHARS for value in values]
    num_fields = pattern.count("%") + pattern.count("{")
    expect(str, len(pattern) + num_fields * (max(widths, default=0) + max(sizes, default=0)))


def _argument(args: Sequence[Any], named: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else named.get(name)


def _width(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, (int, float)) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"it asks for a width of {value:.3g}, at most {MAX_WIDTH}")
    return int(abs(value)) if isinstance(value, (int, float)) else 0


MAX_TEMPLATE_CHARS = 1 << 16
MAX_DATE_CHARS = 256
NAME = "<chat template>"
codecs.lookup("unicode-escape")  # read now, and not with the first template, when files may be scarce
_FILTERED: type[Any] = type(iter([]))
"""What filters give: the sandbox has made lists of their generators."""


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateError(jinja2.TemplateError):
    """A template called its function ``raise_exception``."""


def run(template: str, context: Mapping[str, Any]) -> str:
    """Return what a template makes of these variables, within the bounds of the enclosing ``limited`` block.

    Raises:
        TemplateError: the template called ``raise_exception``.
        PromptError: it is too long.
        Exception: whatever else a template, which is foreign code, raises.
    """
    code = compiled(template)
    return code.environment.concat(code.generate(**context))


def outside_cause(error: BaseException | None) -> BaseException | None:
    """Return the exception behind this one that is not the template's fault, which Jinja may have wrapped; None without one.

    No ordinary template raises it: it reads no file, and its texts are bounded. Nothing that fails so is remembered.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, (OSError, ImportError, MemoryError)):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


@lru_cache(maxsize=8)
def compiled(template: str) -> jinja2.Template:
    """Return a compiled template, within the bounds of the enclosing ``limited`` block.

    Raises:
        PromptError: it is too long.
        jinja2.TemplateSyntaxError: it has an error.
    """
    if len(template) > MAX_TEMPLATE_CHARS:
        raise PromptError(f"the chat template has {len(template)} characters: at most {MAX_TEMPLATE_CHARS}")
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = environment.bounded_filter("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    code = environment.compile(template, filename=NAME)
    tick()
    return environment.template_class.from_code(environment, code, environment.globals)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    layout: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, default=_listed, **layout)
    return encoder.encode(value) if indent is None else concat(encoder.iterencode(value))


def _listed(value: Any) -> list[Any]:
    """Return what a filter such as ``map`` gives as a list, as llamacpp's templates have it."""
    if isinstance(value, _FILTERED):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_CHARS:  # the C library fills fields up to any width, to 256 times the pattern
        raise TemplateLimitError(f"it formats a date to {len(pattern)} characters, at most {MAX_DATE_CHARS}")
    return datetime.now().strftime(pattern)
