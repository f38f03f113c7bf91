"""Gives every generation option values of every kind: each is taken, or refused in one line that a terminal can show."""

from __future__ import annotations

import numpy as np
import openvino_genai as genai
import pytest

from staticllm.errors import MAX_SHOWN, GenerationConfigError, StaticLLMError, shown
from staticllm.pipelines.generation.options.extra import EXTRA_NAMES
from staticllm.pipelines.generation.options.resolve import NAMES, resolve
from staticllm.pipelines.grammars.requested import KEYWORDS


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


def nested(make):
    value = make(None)
    for _ in range(3000):
        value = make(value)
    return value


VALUES = [
    None, True, 0, -1, 1.5, float("nan"), float("-inf"), 10**5000, 2**64, np.int64(3), np.float32(0.5), np.bool_(True),
    np.array(3), np.array([1, 2]), np.array([]), "", "abc", "two\nlines", "\ud800", "x" * 100_000, b"abc", [], [1], [""], [None],
    ["\ud800"], [[1]], [[]], {1}, {"a"}, {}, {"a": 1}, {5: float("nan")}, {-1: 1}, {True: 2}, {None: 1},
    nested(lambda each: [each]), nested(lambda each: {"a": each}), Unshowable(), [Unshowable()], {"a": Unshowable()}, TwoLines(),
    [TwoLines()], Incomparable(),
    object, len, iter([1]), 1 + 2j, genai.StopCriteria.NEVER, genai.GenerationConfig(), ..., {"a": {1, 2}},
]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampling", "beams"])
@pytest.mark.parametrize("name", [*NAMES, *EXTRA_NAMES, *KEYWORDS])
def test_a_value_is_taken_or_refused_in_one_line(name, more):
    num_refused = 0
    for value in VALUES:
        try:
            resolve(genai.GenerationConfig(), {"max_new_tokens": 3, **more, name: value})
        except StaticLLMError as error:
            assert len(str(error)) < MAX_SHOWN + 200
            assert str(error).isprintable(), str(error)
            num_refused += 1
    assert num_refused >= 3  # arrays and what cannot be compared, also for options without an effect


@pytest.mark.parametrize("name", ["bad_words", "stop_strings", "dry_sequence_breakers"])
def test_texts_are_made_of_whole_characters(name):
    with pytest.raises(GenerationConfigError, match=rf"{name} has half of a surrogate pair, '\\ud800': leave it out"):
        resolve(genai.GenerationConfig(), {name: ["a\ud800"]})


def test_what_a_message_shows_of_a_value():
    assert shown("a") == "'a'"
    assert shown(TwoLines()) == "two lines"
    assert shown(Unshowable()) == "a Unshowable that Python cannot show"
    assert len(shown("x" * 1000)) == MAX_SHOWN
    assert shown(10**5000) == f"a whole number of {(10**5000).bit_length()} bits"
