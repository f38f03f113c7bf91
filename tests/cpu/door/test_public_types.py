"""The types of everything that ``import staticllm`` gives: every parameter and result has one, and none is ``Any``."""

from __future__ import annotations

import functools
import inspect
import typing
from dataclasses import fields, is_dataclass

import pytest

import staticllm
from staticllm.adapters.adapter_set import AdapterSet

UNTYPED = {"self", "cls"}
LATER = {"AdapterSet": AdapterSet}
"""Types whose modules are imported only when they are needed."""


def members_of(owner):
    """Names and public functions of a class, those of its bases in our packages included; of a function itself."""
    if inspect.isfunction(owner):
        yield owner.__name__, owner
        return
    for kind in owner.__mro__:
        if not kind.__module__.startswith("staticllm"):
            continue
        for name, value in vars(kind).items():
            if not name.startswith("_") or name in ("__init__", "__call__", "__iter__", "__enter__"):
                for function in functions_of(value):
                    yield f"{kind.__name__}.{name}", function


def functions_of(value):
    """The functions that a member of a class stands for, with all overloads."""
    if isinstance(value, (property, functools.cached_property)):
        value = value.fget if isinstance(value, property) else value.func
    value = getattr(value, "__func__", value)
    if inspect.isfunction(value) and value.__module__.startswith("staticllm"):
        yield value
        yield from typing.get_overloads(value) if hasattr(typing, "get_overloads") else ()


def is_vague(hint):
    """Whether a type is ``Any``, or has it as an argument."""
    if hint is typing.Any:
        return True
    if isinstance(hint, list):
        return any(map(is_vague, hint))
    return not is_of_numpy(hint) and any(map(is_vague, typing.get_args(hint)))


def is_of_numpy(hint):
    """An array of any element type: numpy has no other word for it."""
    return getattr(typing.get_origin(hint), "__module__", "").startswith("numpy")


@pytest.mark.parametrize("name", staticllm.__all__)
def test_a_public_name_has_types_that_say_something(name):
    public = getattr(staticllm, name)
    vague = []
    for place, function in members_of(public):
        hints = typing.get_type_hints(function, localns=LATER, include_extras=True)
        wanted = set(inspect.signature(function).parameters) - UNTYPED
        wanted |= {"return"} if function.__name__ != "__init__" else set()
        vague += [f"{place}: {item} has no type" for item in sorted(wanted - set(hints))]
        vague += [f"{place}: {item} is {hint}" for item, hint in hints.items() if is_vague(hint)]
    if is_dataclass(public):
        hints = typing.get_type_hints(public, localns=LATER, include_extras=True)
        vague += [f"{name}.{item.name} is {hints[item.name]}" for item in fields(public) if is_vague(hints[item.name])]
    assert not vague, "\n".join(vague)
