"""The docstrings of public classes have one form: Google's sections, and what a field means in a string under it."""

import ast
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import staticllm


def classes():
    """Return the syntax trees of the public classes, by name."""
    found = {}
    for name in staticllm.__all__:
        text = Path(find_spec(f"staticllm.{staticllm._LAZY[name]}").origin).read_text("utf-8")
        found |= {
            node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name
        }
    return found


CLASSES = classes()


def fields_of(node):
    """Return the fields of a class: whether a string stands under each."""
    return {
        field.target.id: isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        for field, after in pairwise([*node.body, ast.Pass()])
        if isinstance(field, ast.AnnAssign)
    }


@pytest.mark.parametrize("name", CLASSES)
def test_fields_are_documented_under_them(name):
    fields = fields_of(CLASSES[name])
    sections = re.findall(r"^    (\w+): |(?:^|[.;] )``(\w+)``: ", ast.get_docstring(CLASSES[name]) or "", re.MULTILINE)
    assert not fields.keys() & {field for pair in sections for field in pair}


@pytest.mark.parametrize("name", ["Device", "Stats", "View"])
def test_every_field_of_what_a_policy_and_a_reader_see_has_its_text(name):
    assert all(fields_of(CLASSES[name]).values())


@pytest.mark.parametrize("name", CLASSES)
def test_errors_are_in_a_section(name):
    functions = [node for node in ast.walk(CLASSES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    told = {node.name: ast.get_docstring(node) or "" for node in functions if not node.name.startswith("_")}
    assert [function for function, text in told.items() if re.search(r"\b[Rr]aises? (``|as |what )", text)] == []
