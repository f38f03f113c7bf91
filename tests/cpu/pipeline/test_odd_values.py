"""Gives every generation option values of every kind: each is taken, or refused in one line that a terminal can show."""

from __future__ import annotations

import openvino_genai as genai
import pytest
from support.odd_values import VALUES, TwoLines, Unshowable, is_refused

from staticllm.errors import MAX_SHOWN, GenerationConfigError, shown
from staticllm.pipelines.generation.options.extra import EXTRA_NAMES
from staticllm.pipelines.generation.options.requested_grammar import KEYWORDS
from staticllm.pipelines.generation.options.resolve import NAMES, resolve


@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampling", "beams"])
@pytest.mark.parametrize("name", [*NAMES, *EXTRA_NAMES, *KEYWORDS])
def test_a_value_is_taken_or_refused_in_one_line(name, more):
    def call(value):
        resolve(genai.GenerationConfig(), {"max_new_tokens": 3, **more, name: value})

    assert sum(is_refused(call, value) for value in VALUES) >= 3  # arrays and what cannot be compared, of any option


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
