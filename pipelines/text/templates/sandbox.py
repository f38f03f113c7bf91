"""Extends Jinja's sandbox so that every expression of a template is subject to the bounds.

Expressions that Jinja compiles to plain Python (lists, slices, comparisons, ``~``, pieces of text) are compiled to calls of
``bounds``; operators, calls, attributes, filters and tests pass through the methods of the environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from staticllm.pipelines.text.templates import bounds
from staticllm.pipelines.text.templates.bounds import TemplateLimitError, budget, listed, made, tick
from staticllm.pipelines.text.templates.operations import (
    FILTER_CHECKS,
    FILTERS,
    ITERATING,
    METHODS,
    check_format,
    check_method,
    check_operands,
)

_MAX_KEY_ITEMS = 64
_OF_JINJA = ("_loop_vars", "_block_vars")
"""Arguments that Jinja's compiler adds to calls."""


class _Namespace(Namespace):
    """A namespace whose text omits its values, because namespaces may contain each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _namespace(values: dict[str, Any] | None = None, /, **named: Any) -> Namespace:
    return _Namespace(_dict(values, **named))


def _dict(values: dict[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
    if not isinstance(values, (dict, type(None))):
        raise TypeError("dict() and namespace() take names with values, or one dict")
    return {**(values or {}), **named}


def _cycler(*items: Any) -> Cycler:
    return Cycler(*items)


def _joiner(between: str = ", ") -> Joiner:
    return Joiner(between)


class _Instrument(NodeTransformer):
    """Adds a check of the time to the body of every loop."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (the visitor asks for this name)
        self.generic_visit(node)
        look = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        return node


class _BoundedCode(CodeGenerator):
    """Compiles expressions that create or compare values to calls of the bounds."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        tick()
        return super().visit(node, *args, **kwargs)

    def _wrapped(self, function: str, write: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{function}(")
        write(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._wrapped("made", super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._wrapped("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("environment.made({")
        for item in node.items:
            self._wrapped("key", self.visit, item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.join_pieces((")
        for piece in node.nodes:
            self.visit(piece, frame)
            self.write(", ")
        self.write("))")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802
        self.write(f" {operators[node.op]} ")
        self._wrapped("ticked", self.visit, node.expr, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._wrapped("made", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _output_const_repr(self, group: Any) -> str:
        return f"environment.text({super()._output_const_repr(group)})"

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:  # noqa: N802
        """Refuse ``autoescape``, which lengthens texts after they were measured."""
        self.fail("a prompt needs no autoescape", node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment that bounds the time, sizes and numbers of its templates; to be used inside ``limited``."""

    intercepted_binops = frozenset(["*", "**", "+", "-", "%", "//", "/"])
    code_generator_class = _BoundedCode
    concat = staticmethod(bounds.concat)
    tick, ticked, made = staticmethod(bounds.tick), staticmethod(bounds.ticked), staticmethod(bounds.made)
    text, join_pieces = staticmethod(bounds.text), staticmethod(bounds.join_pieces)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=bounds.shown, optimized=False, **options)
        self.filters["sum"] = self._sum
        self.filters = {name: self.bounded_filter(name, self.filters[name]) for name in FILTERS}
        self.tests = {name: _timed(function) for name, function in self.tests.items()}
        self.globals = {
            "namespace": _namespace,
            "range": self.globals["range"],
            "dict": _dict,
            "cycler": _cycler,
            "joiner": _joiner,
        }

    def key(self, value: Any) -> Any:
        """Return a dict key after a check: hashing a large one is slow, and Python hashes it at each access.

        Raises:
            TemplateLimitError: the key is too large.
        """
        tick()
        if not isinstance(value, str) and budget().weigh(value).items > _MAX_KEY_ITEMS:
            raise TemplateLimitError(f"it makes a key of more than {_MAX_KEY_ITEMS} items")
        return value

    def bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the filter with a check of its arguments before it runs, and of its result.

        It runs when it is called and not when its result is read: a long chain of lazy filters would exhaust the stack.
        """
        original = inspect.unwrap(function)  # Jinja wraps some, and the wrapper takes one more argument
        signature, num_hidden = inspect.signature(original), int(hasattr(function, "jinja_pass_arg"))
        num_dropped = num_hidden - int(hasattr(original, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            tick()
            given = list(arguments)
            if name in ITERATING and len(given) > num_hidden:
                given[num_hidden] = _iterable(name, given[num_hidden])
            for argument in (*given[num_hidden:], *named.values()):
                bounds.expect_chars(bounds.text_size(argument))
            if name in FILTER_CHECKS:
                FILTER_CHECKS[name](signature.bind(*given[num_dropped:], **named).arguments)
            result = function(*given, **named)
            if isinstance(result, Iterator):
                return iter(listed(result))
            return result if any(result is argument for argument in given) else made(result)

        return bounded

    def _sum(self, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        total = start
        for item in iterable:
            part = item
            for name in str(attribute).split(".") if attribute is not None else ():
                part = self.getitem(part, int(name) if name.isdigit() else name)
            total = self._operate("+", total, part)
        return total

    def _operate(self, operator: str, left: Any, right: Any) -> Any:
        check_operands(operator, left, right)
        return made(self.binop_table[operator](left, right))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self._operate(operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        tick()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        tick()
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        tick()
        named = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
        if args or named:
            budget().together((*args, *named.values()))
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (_iterable(name, args[0]), *args[1:])
            check_method(owner, name, args, named)
        result = super().call(__context, __obj, *args, **kwargs)
        is_new = not isinstance(__obj, Macro) and not (isinstance(owner, dict) and name == "get")
        return made(result) if is_new else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ != "format":
            raise TemplateLimitError(f"it calls {value.__name__}()")

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        instrumented: nodes.Template = _Instrument().visit(parsed)
        return instrumented


def _iterable(name: str, items: Any) -> Any:
    """Return the items that a filter iterates over: an iterator as a list, and a text only if it is not too long."""
    if name == "join" and isinstance(items, Iterable) and not isinstance(items, (list, tuple, dict, str)):
        return listed(items)
    if isinstance(items, Iterator) and not isinstance(items, LoopContext):
        return listed(items)
    if isinstance(items, str) and name not in ("join", "reverse"):
        bounds.check_items(len(items))
    return items


def _timed(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def timed(*arguments: Any, **named: Any) -> Any:
        tick()
        return function(*arguments, **named)

    return timed
