"""Values of every kind, for options that take few of them: each is taken, or refused in one line that a terminal can show."""

from __future__ import annotations

import numpy as np
import openvino_genai as genai

from staticllm.errors import MAX_SHOWN, StaticLLMError


class Unshowable:
    def __repr__(self):
        raise ValueError("no")


class TwoLines:
    def __repr__(self):
        return "two\nlines"


class Incomparable:
    def __eq__(self, other):
        raise ValueError("no")

    __hash__ = object.__hash__


class Unhashable:
    def __hash__(self):
        raise ValueError("no")


def _refuse(*arguments):
    raise ValueError("no")


ASKED = (
    "__eq__", "__ne__", "__hash__", "__bool__", "__len__", "__iter__", "__contains__", "__getitem__", "__index__", "__int__",
    "__float__", "__repr__", "__str__", "__lt__", "__le__", "__gt__", "__ge__", "__fspath__", "__abs__", "__mod__",
)  # fmt: skip
Hostile = type("Hostile", (), dict.fromkeys(ASKED, _refuse))
"""An object whose every answer is an exception."""
HostileText = type("HostileText", (str,), {"__eq__": _refuse, "__hash__": _refuse, "__repr__": _refuse})
HostileNumber = type("HostileNumber", (int,), {"__eq__": _refuse, "__hash__": _refuse, "__repr__": _refuse})


def nested(make):
    value = make(None)
    for _ in range(3000):
        value = make(value)
    return value


VALUES = [
    None, True, 0, -1, 1.5, float("nan"), float("-inf"), 10**5000, 2**64, np.int64(3), np.float32(0.5), np.bool_(True),
    np.array(3), np.array([1, 2]), np.array([]), "", "abc", "two\nlines", "\ud800", "\0", "x" * 100_000, b"abc", bytearray(b"a"),
    [], [1], [""], [None], ["\ud800"], [[1]], [[]], (), {1}, {"a"}, set(), frozenset(), {}, {"a": 1}, {5: float("nan")}, {-1: 1},
    {True: 2}, {None: 1}, {(): ()}, nested(lambda each: [each]), nested(lambda each: {"a": each}), Unshowable(), [Unshowable()],
    {"a": Unshowable()}, TwoLines(), [TwoLines()], Incomparable(), [Incomparable()], {"a": Incomparable()}, Unhashable(),
    [Unhashable()],
    Hostile(), [Hostile()], {"a": Hostile()}, HostileText("abc"), HostileNumber(3), object, len, iter([1]), 1 + 2j, ...,
    genai.StopCriteria.NEVER, genai.GenerationConfig(), {"a": {1, 2}},
]  # fmt: skip


def is_refused(call, value):
    """Return whether ``call(value)`` refuses the value, which must be in one line, as one of ours."""
    try:
        call(value)
    except StaticLLMError as error:
        assert len(str(error)) < MAX_SHOWN + 200
        assert str(error).isprintable(), str(error)
        return True
    return False
