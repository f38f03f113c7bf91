"""Tests what errors say about JSON of others: the place, its value, and what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from staticllm.system.typed import json_of, typed


@dataclass
class Part:
    share: Annotated[float, Meta(ge=0, le=1e6)]
    mode: Literal["slow", "fast"] = "slow"
    count: Annotated[int, Meta(ge=1)] | None = None
    sizes: dict[str, int] | None = None


@dataclass
class Whole:
    version: Literal[1]
    parts: list[Part]


def test_a_value_is_made_of_json():
    found = typed(
        json_of(b'{"version": 1, "parts": [{"share": 2, "mode": "fast", "sizes": {"a": 3}, "more": 0}]}'), Whole
    )
    assert found == Whole(1, [Part(2.0, "fast", None, {"a": 3})])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ('{"share": -1}', "parts[0].share is -1: must be float >= 0.0"),
        ('{"share": NaN}', "parts[0].share is NaN: must be float"),
        ('{"share": -1e999}', "parts[0].share is -1e999: must be float"),
        (
            f'{{"share": 1{"0" * 400}}}',
            "parts[0].share is a whole number of 1329 bits: must be a number of at most 64 bits",
        ),
        ('{"share": true}', "parts[0].share is True: must be float"),
        ("{}", "parts[0].share is missing"),
        ('{"share": 1, "mode": "x"}', "parts[0].mode is 'x': must be one of fast, slow"),
        ('{"share": 1, "count": 0}', "parts[0].count is 0: must be int >= 1"),
        ('{"share": 1, "sizes": {"a": "b"}}', "a value of parts[0].sizes: must be int"),
        ("3", "parts[0] is 3: must be object"),
    ],
)
def test_an_error_names_place_value_and_limit(part, said):
    with pytest.raises(ValueError, match="parts") as error:
        typed(json_of(f'{{"version": 1, "parts": [{part}]}}'.encode()), Whole)
    assert str(error.value) == said


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"", b"7" * 5000, b"[]", b'{"version": 2, "parts": []}'])
def test_what_is_no_such_json_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r".") as error:
        typed(json_of(text), Whole)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
