"""Tests how often tests read names that the library calls its own: what such a test holds, no reader may change."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.null.door.test_layout import nodes_of, python_files

MAX_READS = 138
NAMING = {"setattr", "getattr", "hasattr", "delattr", "attrgetter", "methodcaller", "object", "patch"}
"""Calls that take an attribute's name as text."""


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined_in(nodes):
    """Yield the private names that a file gives to its functions, classes, variables and attributes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def reads_in(nodes):
    """Yield the private names that a file takes from an object or a module that is not its own."""
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=args) if called in NAMING:
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                names = [text.rpartition(".")[2] for text in texts]
            case _:
                continue
        yield from filter(is_private, names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pipe._engine.runner._rows", ["_engine", "_rows"]),
        ("self._own + cls._own + pipe.__class__", []),
        ("from staticllm.core import _one, Two", ["_one"]),
        ("patch.setattr(place, '_one', 1)", ["_one"]),
        ("patch.setattr('staticllm.core._one', 1)", ["_one"]),
        ("getattr(pipe, '_one')(data['_two'])", ["_one"]),
        ("super()._one()", ["_one"]),
    ],
)
def test_the_count_knows_the_ways_to_a_private_name(source, expected):
    assert sorted(reads_in(list(ast.walk(ast.parse(source))))) == expected


def test_few_tests_read_private_names(root):
    ours = [*python_files(root), *(root / "scripts").rglob("*.py")]
    known = {name for path in ours for name in defined_in(nodes_of(path))}
    reads = {
        path.relative_to(root).as_posix(): [name for name in reads_in(nodes_of(path)) if name in known]
        for path in sorted((root / "tests").rglob("*.py"))
    }
    files = Counter({path: len(names) for path, names in reads.items()})
    names = Counter(name for found in reads.values() for name in found)
    for most in (files, names):
        print(*(f"{count:4} {what}" for what, count in most.most_common(20)), sep="\n")
    assert files.total() <= MAX_READS, "look at what users see, or give the name a door: a property, a public name"
