"""Bodies that would hold the interpreter's lock for seconds are refused before they are parsed; long texts never are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.server import endpoint
from staticllm.server.http import limits as json_limits
from staticllm.server.http.errors import ApiError
from staticllm.server.openai.completions import CompletionRequest

MAX_BODY = 16 << 20


def filled(element, before=b'{"prompt":[', after=b"1]}"):
    """Return a body of the largest size, with as many of an element as it can have."""
    return before + element * ((MAX_BODY - len(before) - len(after)) // len(element)) + after


@pytest.mark.parametrize(
    "body, words",
    [
        (filled(b"[],"), "100000 arrays"),
        (filled(b"{},"), "100000 arrays"),
        (filled(b'{"a":[[]]},'), "100000 arrays"),
        (filled(b'"a":1,', b"{", b'"b":1}'), "100000 arrays, objects and keys"),
        (filled(b"1,"), "500000 elements"),
        (filled(b'"",'), "500000 elements"),
        (filled(b'"\\"[ long enough ",'), "500000 elements"),
        (filled(b"1" * 4000 + b","), "100 digits"),
        (filled(b"1," + b"1" * 250 + b","), "100 digits"),
        (filled(b"\\\\", b'{"prompt":"', b'"}'), "escapes"),
    ],
)
def test_a_body_that_takes_seconds_is_refused_before_it_is_parsed(monkeypatch, body, words):
    """The lock is held while it is parsed: the streams of all clients would stand still."""
    monkeypatch.setattr(endpoint, "from_json", lambda *_, **__: pytest.fail("it is parsed"))
    with pytest.raises(ApiError) as refused:
        endpoint.parsed(CompletionRequest, body)
    assert refused.value.status == 400 and refused.value.code == "body_too_complex"
    assert words in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize(
    "text",
    [
        b"[],{}:,[1,2,3],",
        b'\\"[{,:, [\\\\{ and a few more characters',
        b"\\u00e9",
        b"12345678901234567890",
        b"\\n, [x]: {y}\xc3\xa9",
        b"a",
    ],
)
@pytest.mark.parametrize("shift", range(3))
def test_a_text_of_the_largest_size_passes(text, shift):
    """Whatever it holds; shifts move its escapes over the edges of the slices."""
    body = filled(text, b'{"prompt":"' + b"b" * shift, b'"}')
    found = endpoint.parsed(CompletionRequest, body)
    assert found.prompt == json.loads(body)["prompt"] and len(body) > MAX_BODY - 100


def test_bodies_at_the_limits_pass():
    ids = [1] * (json_limits.MAX_VALUES - 1)
    assert endpoint.parsed(CompletionRequest, json.dumps({"prompt": ids, "n": 1}).encode()).prompt == ids
    with pytest.raises(ApiError, match="elements"):
        endpoint.parsed(CompletionRequest, json.dumps({"prompt": [*ids, 1, 1], "n": 1}).encode())


VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.text(alphabet='a",:[]{}\\\n\u00e9')
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a",:[]{}\\'), inner),
    max_leaves=20,
)


def size_of(value):
    """Return the arrays, objects and keys of a value, and the commas of its JSON."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    is_container = isinstance(value, (dict, list))
    parts = [size_of(each) for each in inner]
    own = is_container + (len(value) if isinstance(value, dict) else 0)
    commas = max(0, len(value) - 1) if is_container else 0
    return own + sum(part[0] for part in parts), commas + sum(part[1] for part in parts)


@settings(deadline=None)
@given(value=VALUES, is_ascii=st.booleans(), width=st.integers(1, 7))
def test_what_is_outside_of_texts_is_found_at_every_edge(value, is_ascii, width):
    data = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_SLICE", width)
        outside = b"".join(json_limits.outside_texts(data))
    assert json_limits._num_structures(outside) == size_of(value)[0]
    assert outside.count(b",") == size_of(value)[1]
