"""Jinja's immutable sandbox, as transformers uses it, with a deadline and with bounds on the texts and lists that are made.

The time is checked in every loop body, call and filter, and while output is joined. Operations whose result may be
many times their operands are checked before they run. Values inside values are not weighed: ``[a] * 9`` counts nine items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from staticllm.pipelines.conversation.templates import bounds
from staticllm.pipelines.conversation.templates.bounds import TemplateLimitError, expect, listed, made, tick

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
    concat = staticmethod(bounds.concat)
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
            hidden, given = arguments[:num_hidden], [*arguments[num_hidden:]]
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
        return bounds.concat(map(str, pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
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
