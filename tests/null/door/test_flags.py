"""Follows the flags of all commands through the code: each is read by its command, or by a function that gets its options.

A flag that is only declared stands in ``--help`` and does nothing.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from importlib import import_module

import click
import pytest

from staticllm.cli import cli
from staticllm.cli.backends import SAMPLING, ServerBackend, generation_of

CONTEXT = click.Context(cli, info_name="staticllm")


def all_commands(group=cli, names=()):
    for name in group.list_commands(CONTEXT):
        command = group.get_command(CONTEXT, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, (*names, name))
        else:
            yield " ".join((*names, name)), command


COMMANDS = dict(all_commands())


def layers_of(function):
    """Return a function and those that it wraps, as decorators of ``staticllm.cli.options`` do."""
    found = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        found.append(function)
    return found


def tree_of(function):
    """Return the tree of a function itself, not of what it wraps; None for one without source, as dataclasses make them."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function.__code__))).body
    except (OSError, SyntaxError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def imported_in(node):
    """Return what a function imports itself, by name."""
    found = {}
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom) and each.module and each.module.startswith("staticllm."):
            with suppress(ModuleNotFoundError):  # of an extra that is not installed
                module = import_module(each.module)
                found |= {name.asname or name.name: getattr(module, name.name, None) for name in each.names}
    return found


def texts_in(value):
    """Return the texts of a table that a function names: of its keys, or of fields of its rows."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, (tuple, list, set, frozenset)):
        return {text for each in value for text in texts_in(each)}
    if isinstance(value, dict):
        return texts_in(tuple(value))
    return texts_in(tuple(vars(value).values())) if hasattr(value, "__dataclass_fields__") else set()


def read_by(function, seen):
    """Return the names that a function, and the functions that it gives its options to, read."""
    found = set()
    for layer in layers_of(function):
        node = None if layer in seen else tree_of(layer)
        seen.add(layer)
        if node is None:
            continue
        known = {**layer.__globals__, **imported_in(node), **nonlocals(layer)}
        for each in (part for statement in node.body for part in ast.walk(statement)):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
                found |= {each.id} | texts_in(known.get(each.id))
            elif isinstance(each, ast.Attribute):
                found.add(each.attr)
            elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier():
                found.add(each.value)
            elif isinstance(each, ast.Call) and takes_options(each):
                for callee in callees(each.func, known):
                    found |= read_by(callee, seen)
    return found


def nonlocals(function):
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def takes_options(call):
    """Return whether a call gets a whole dict of options, whatever its name is."""
    given = [*call.args, *(each.value for each in call.keywords)]
    return any(isinstance(each, ast.Name) for each in given)


def callees(node, known):
    """Return the functions of ours behind the name of a call: for a class its methods."""
    value = known.get(node.id) if isinstance(node, ast.Name) else None
    if inspect.isclass(value) and value.__module__.startswith("staticllm.cli"):
        return [each for each in vars(value).values() if inspect.isfunction(each)]
    is_ours = inspect.isfunction(value) and value.__module__.startswith("staticllm.")
    return [value] if is_ours else []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_is_read_by_its_command(name):
    command = COMMANDS[name]
    read = read_by(command.callback, set())
    given = {each.name for each in command.params if each.expose_value}
    assert not given - read, f"these are declared and nothing reads them: {sorted(given - read)}"


def test_a_flag_that_is_only_declared_is_found():
    command = COMMANDS["run"]
    flag = click.Option(["--no-such-flag"])
    assert flag.name not in read_by(command.callback, set())


def test_each_sampling_flag_changes_what_is_asked():
    plain = dict.fromkeys([row.name for row in SAMPLING]) | {"raw": False, "max_new_tokens": 5}
    for row in SAMPLING:
        options = {**plain, row.name: 1}
        assert generation_of(options)[row.option] == 1
        assert ServerBackend(None, None, options)._body[row.field] == 1
        assert generation_of(options) != generation_of(plain)
