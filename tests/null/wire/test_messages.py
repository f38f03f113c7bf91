"""Tests messages and tensors of the daemon's wire: whatever arrives is a message within its limits, or refused in one line."""

from __future__ import annotations

import struct
from multiprocessing import Pipe

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.wire import tensors
from staticllm.wire.blocks import Block
from staticllm.wire.channel import Channel
from staticllm.wire.messages import MAX_FRAME, Kind, Message, ProtocolError, decode, encode, text_of, whole_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(list(Kind)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 2**16 - 1),
    st.dictionaries(st.text(max_size=5), JSON, max_size=4),
    st.binary(max_size=200),
)
ARRAYS = st.tuples(
    st.sampled_from(sorted(tensors.ELEMENT_TYPES)), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 255)
).map(lambda each: np.full(each[1], each[2] % 2 if "b" in each[0] else each[2] % 100).astype(each[0]))


@given(MESSAGES)
def test_a_message_survives(message):
    found = decode(encode(message))
    assert (found.kind, found.handle, found.number, found.time) == (
        message.kind,
        message.handle,
        message.number,
        message.time,
    )
    assert (found.flags, found.body, bytes(found.payload)) == (message.flags, message.body, message.payload)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_refused(data):
    try:
        decode(data)
    except ProtocolError as error:
        assert "\n" not in str(error)


@given(MESSAGES, st.data())
def test_a_message_with_a_flipped_byte_is_a_message_or_refused(message, data):
    text = bytearray(encode(message))
    text[data.draw(st.integers(0, len(text) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(text))
    except ProtocolError as error:
        assert "\n" not in str(error)


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match=f"the limit is {MAX_FRAME}"):
        encode(Message(Kind.INFER, payload=bytes(MAX_FRAME)))


def test_deep_json_is_refused():
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ProtocolError, match="not JSON"):
        decode(struct.pack("<HHIQQd", Kind.PING, 0, len(text), 0, 0, 0.0) + text)


def test_fields_are_checked():
    message = Message(Kind.MODEL, body={"text": "a" * 5, "number": 7, "flag": True})
    assert text_of(message, "text") == "aaaaa"
    assert whole_of(message, "number", 7) == 7
    assert whole_of(message, "missing", 7, 3) == 3
    for name, limit in (("text", 4), ("number", 9), ("missing", 9)):
        with pytest.raises(ProtocolError, match=f"MODEL: {name}"):
            text_of(message, name, limit)
    for name, most in (("number", 6), ("flag", 9), ("text", 9), ("missing", 9)):
        with pytest.raises(ProtocolError, match=f"MODEL: {name}"):
            whole_of(message, name, most)


@given(st.lists(ARRAYS, max_size=4))
def test_tensors_survive_inside_a_message_and_in_a_block(arrays):
    names = list(range(len(arrays)))
    described = [[name, kind, list(shape), offset] for name, kind, shape, offset in tensors.describe(arrays, names)]
    payload = tensors.inline(arrays)
    inside = Message(Kind.INFER, body={"tensors": described}, payload=bytes(payload))
    block = bytearray(tensors.size_of(arrays) + 64)
    tensors.write(arrays, block)
    outside = Message(Kind.INFER, body={"tensors": described, "shared": True})
    for message, memory in ((inside, None), (outside, memoryview(block))):
        for name, (found, array) in zip(names, tensors.read(message, memory), strict=True):
            assert found == name
            assert array.dtype == arrays[name].dtype
            np.testing.assert_array_equal(array, arrays[name])


@given(st.lists(JSON | st.tuples(JSON, JSON, JSON, JSON).map(list), max_size=4), st.binary(max_size=64))
def test_any_description_of_tensors_is_within_the_memory_or_refused(described, payload):
    try:
        found = tensors.read(Message(Kind.INFER, body={"tensors": described}, payload=payload), None)
    except ProtocolError as error:
        assert "\n" not in str(error)
        return
    assert sum(array.nbytes for _, array in found) <= len(payload) * max(len(found), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        [0, "<f4", [4], 8],
        [0, "<f4", [1 << 40], 0],
        [0, "<f4", [-1], 0],
        [0, "<f4", [4], -64],
        [0, "<O", [4], 0],
        [0, "|O", [4], 0],
        [0, "<f4", [True], 0],
        [0, "<f4", [1] * 17, 0],
        [0.5, "<f4", [1], 0],
        [0, "<f4", [17], 0],
    ],
)
def test_a_wrong_description_is_refused(wrong):
    with pytest.raises(ProtocolError, match="INFER"):
        tensors.read(Message(Kind.INFER, body={"tensors": [wrong]}, payload=bytes(64)), None)


def test_a_block_is_shared_and_replaced_by_a_larger_one():
    ours, theirs = map(Channel, Pipe())
    ours.grow(100_000)
    ours.send(Message(Kind.OK))
    assert theirs.receive().kind is Kind.OK
    assert theirs.block_bytes == ours.block_bytes == 131072
    for size in (1000, 30_000):
        array = np.random.default_rng(size).normal(size=size).astype(np.float32)
        theirs.send_tensors(Message(Kind.INFER), [array], [0])
        ((_, found),) = ours.tensors_of(ours.receive())
        np.testing.assert_array_equal(found, array)
        del found
    large = np.arange(200_000, dtype=np.int64)
    with pytest.raises(ProtocolError, match="the block has 131072"):
        theirs.send_tensors(Message(Kind.INFER), [large], [0])
    ours.grow(large.nbytes)
    ours.send_tensors(Message(Kind.DONE), [large], [0])
    ((_, found),) = theirs.tensors_of(theirs.receive())
    np.testing.assert_array_equal(found, large)
    ours.close()
    np.testing.assert_array_equal(found, large)  # a view keeps the memory
    theirs.close()
    theirs.close()


def test_a_block_cannot_be_made_shorter():
    import os
    import sys

    if not sys.platform.startswith("linux"):
        pytest.skip("memory files are sealed on Linux")
    block = Block.create(70_000)
    with pytest.raises(PermissionError):
        os.ftruncate(block._source, 10)
    block.close()
