"""Writes the API page and the tree of errors, for cog in docs/reference/api.md and docs/errors.md."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from typing import Any

import staticllm
from staticllm.errors import StaticLLMError
from staticllm.pipelines.text.handle import GenerationHandle

FIRST = (
    "StaticLLMPipeline", "GenerationHandle", "StaticLLMConfig",
    "StaticEmbeddingPipeline", "EmbeddingHandle", "StaticRerankPipeline", "RerankHandle",
)  # fmt: skip
RETURNED = ("GenerationHandle", "EmbeddingHandle", "RerankHandle")
"""Classes that users receive and do not construct; the page leaves out their constructors."""
SECTIONS = ("Args", "Attributes", "Returns", "Raises")
Member = tuple[str, Any]


def api() -> str:
    """Return the entries of all public names except the errors."""
    return "\n\n".join(text for name, text in entries().items() if not is_error(_public()[name]))


def entries() -> dict[str, str]:
    """Return an entry per public name: its signature, docstring and public methods. Errors are the last ones."""
    public = _public()
    rest = sorted(public.keys() - FIRST, key=lambda name: (is_error(public[name]), name))
    return {name: _entry(name, public[name]) for name in (*FIRST, *rest)}


def summary(name: str) -> str:
    """Return the first sentence about a public name."""
    return _first_sentence(_public()[name])


def _public() -> dict[str, Any]:
    return {name: getattr(staticllm, name) for name in staticllm.__all__} | {"GenerationHandle": GenerationHandle}


def errors() -> str:
    """Return the tree of public errors: one line per error, with the first sentence of its docstring."""
    lines = ["```text", *_branch(StaticLLMError, ""), "```"]
    return "\n".join(lines)


def is_error(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, StaticLLMError)


def _branch(error: type[Exception], indent: str) -> list[str]:
    name = f"{indent}{error.__name__}"
    lines = [f"{name:<30}{_first_sentence(error)}"]
    public = [child for child in error.__subclasses__() if child.__module__ == StaticLLMError.__module__]
    for child in sorted(public, key=lambda child: child.__name__):
        lines += _branch(child, indent + "  ")
    return lines


def _first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "").replace("``", "").split())
    return re.split(r"(?<=\.)\s", text)[0]


def _entry(name: str, thing: Any) -> str:
    if isinstance(thing, type) and issubclass(thing, Enum):
        values = ", ".join(f"`{member.name}`" for member in thing)
        return f"## {name}\n\n{_prose(thing)}\n\nMembers: {values}."
    constructor = "" if name in RETURNED else f"```python\n{name}{_signature(thing)}\n```"
    parts = [f"## {name}", constructor, _prose(thing)]
    if isinstance(thing, type):
        parts += [_attributes(thing)]
        parts += [_member(name, member) for member in _members(thing)]
    return "\n\n".join(part for part in parts if part)


def field_docs(owner: type) -> dict[str, str]:
    """Return what stands under the fields of a class and of its bases among ours, by field."""
    found: dict[str, str] = {}
    for base in reversed([base for base in owner.__mro__ if base.__module__.startswith("staticllm.")]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(written))):
                    found[name] = " ".join(written.split())
    return found


def _attributes(owner: type) -> str:
    entries = [f"- `{name}`: {text}" for name, text in field_docs(owner).items() if not name.startswith("_")]
    lines = [
        textwrap.fill(entry, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for entry in entries
    ]
    return "\n".join(("**Attributes**", "", *lines)).replace("``", "`") if lines else ""


def _members(owner: type) -> list[Member]:
    """Return the public methods and properties in the order of the source, and after them those of its bases among ours."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith("staticllm.")]
    members = {name: value for base in reversed(bases) for name, value in vars(base).items()}
    order = dict.fromkeys(name for base in bases for name in vars(base) if not name.startswith("_"))
    found = [(name, members[name]) for name in order]
    return [(name, value) for name, value in found if isinstance(value, property | classmethod) or callable(value)]


def _member(owner: str, member: Member) -> str:
    name, value = member
    if isinstance(value, property):
        return f"### {owner}.{name}\n\n{_prose(value)}".rstrip()
    function: Callable[..., Any] = value.__func__ if isinstance(value, classmethod) else value
    fields = f"\n\n{_attributes(value)}" if isinstance(value, type) and not issubclass(value, Enum) else ""
    text = f"### {owner}.{name}\n\n```python\n{name}{_signature(function)}\n```\n\n{_prose(function)}"
    return f"{text}{fields}".rstrip()


def _signature(thing: Any) -> str:
    """Return the signature as in the source, without ``self`` and private arguments; one argument per line if it is long."""
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return "(…)"
    parameters = [p for name, p in signature.parameters.items() if name not in ("self", "cls") and name[0] != "_"]
    arguments = [re.sub(r": '([^']*)'(?= = |$)", r": \1", str(p)) for p in parameters]
    arguments = [
        re.sub(r"\b(Size|Count)\b", "int", argument) for argument in arguments
    ]  # their bounds are for stored values
    kinds = [p.kind for p in parameters]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if keyword in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(keyword), "*")
    result = signature.return_annotation
    arrow = "" if result in (inspect.Signature.empty, "None", None) or isinstance(thing, type) else f" -> {result}"
    line = f"({', '.join(arguments)}){arrow}"
    return line if len(line) < 90 else "(\n    " + ",\n    ".join(arguments) + f",\n){arrow}"


def _prose(thing: Any) -> str:
    """Return a docstring as Markdown: sections in bold, and their entries as a list."""
    lines: list[str] = []
    for line in (inspect.getdoc(thing) or "").replace("``", "`").splitlines():
        section = line.rstrip(":")
        if line.endswith(":") and section in SECTIONS:
            lines += [f"**{section}**", ""]
        elif re.match(r" {4}\w[\w, ]*: ", line):
            lines.append(re.sub(r"^ {4}(\w[\w, ]*): ", r"- `\1`: ", line))
        else:
            lines.append(re.sub(r"^ {4}(?=\S)|^ {8}", "  " if line.startswith(" " * 8) else "", line))
    return "\n".join(lines).strip()
