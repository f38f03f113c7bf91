"""Tests messages and tensors of the daemon's wire: whatever arrives is a message within its limits, or refused in one line."""

from __future__ import annotations

import io
import os
import struct
import sys
from multiprocessing import Pipe

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.wire import tensors
from staticllm.wire.blocks import Block
from staticllm.wire.channel import MAX_FRAMES, Channel
from staticllm.wire.messages import (
    MAX_BODIES,
    MAX_FRAME,
    MAX_PIPED,
    MAX_TEXT,
    Kind,
    Message,
    ProtocolError,
    decode,
    encode,
    read_message,
    write_message,
)  # fmt: skip

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
        os.ftruncate(block._handle, 10)
    block.close()


@pytest.fixture
def channels():
    ours, theirs = map(Channel, Pipe())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_calls_of_the_same_shapes_use_a_frame_again_with_their_own_values(channels):
    ours, theirs = channels
    ours.grow(100_000)
    ours.send(Message(Kind.OK))
    theirs.receive()
    kept = []
    for number, size in enumerate([5, 20_000, 5, 20_000, 5, 0, 7, 20_000]):  # inside the message, and in the block
        array = np.full(size, number, np.float32)
        theirs.send_tensors(Message(Kind.INFER, 3, number, 0.5 * number), [array, array[:2]], [0, "b"])
        message = ours.receive()
        assert (message.kind, message.handle, message.number, message.time) == (Kind.INFER, 3, number, 0.5 * number)
        found = ours.tensors_of(message)
        assert [name for name, _ in found] == [0, "b"]
        np.testing.assert_array_equal(found[0][1], array)
        np.testing.assert_array_equal(found[1][1], array[:2])
        kept.append((found[1][1], array[:2], size))
    for found, array, size in kept:
        if size < 1000:  # a message's own memory does not change with the next one
            np.testing.assert_array_equal(found, array)
    assert len(theirs.frames) == 4
    assert len(ours.bodies) == 4


def test_a_type_a_name_or_a_hint_makes_another_frame(channels):
    ours, theirs = channels
    for body, name, kind in (
        ({}, 0, "<f4"),
        ({"wanted": "last"}, 0, "<f4"),
        ({}, 1, "<f4"),
        ({}, 0, "<i4"),
        ({}, 0, "<f4"),
    ):
        theirs.send_tensors(Message(Kind.INFER, body=body), [np.arange(4).astype(kind)], [name])
        message = ours.receive()
        ((found_name, found),) = ours.tensors_of(message)
        assert (found_name, found.dtype.str, message.body.get("wanted")) == (name, kind, body.get("wanted"))
        np.testing.assert_array_equal(found, np.arange(4))


def test_a_description_that_came_before_is_checked_against_each_payload(channels):
    ours, theirs = channels
    body = {"tensors": [[0, "<f4", [16], 0]]}
    for size in (64, 63, 0, 64):
        theirs.send(Message(Kind.INFER, body=body, payload=bytes(size)))
        message = ours.receive()
        if size < 64:
            with pytest.raises(ProtocolError, match=f"reaches beyond the {size} bytes"):
                ours.tensors_of(message)
        else:
            assert ours.tensors_of(message)[0][1].shape == (16,)


def test_a_description_in_shared_memory_that_came_before_needs_the_block_of_now(channels):
    ours, theirs = channels
    body = {"tensors": [[0, "|u1", [100_000], 0]], "shared": True}
    for wanted in (1 << 17, 1 << 16, 0, 1 << 17):
        if wanted:
            theirs.grow(wanted)
            theirs.send(Message(Kind.OK))
            ours.receive()
        else:
            ours._replace(None)
        theirs.send(Message(Kind.DONE, body=body))
        message = ours.receive()
        assert len(ours.bodies) == 1
        if wanted == 1 << 17:
            assert ours.tensors_of(message)[0][1].nbytes == 100_000
        else:
            with pytest.raises(ProtocolError, match=r"reaches beyond the 65536 bytes|there is none"):
                ours.tensors_of(message)


def test_few_frames_and_bodies_are_kept_and_no_long_ones(channels):
    ours, theirs = channels
    for size in range(1, 3 * MAX_FRAMES):
        theirs.send_tensors(Message(Kind.INFER), [np.zeros(size, np.uint8)], [0])
        ours.receive()
    assert len(theirs.frames) <= MAX_FRAMES
    assert 0 < len(ours.bodies) <= MAX_BODIES
    known = len(ours.bodies)
    theirs.send(Message(Kind.INFER, body={"x": "y" * MAX_TEXT}))
    theirs.send(Message(Kind.PING, body={"x": 1}))
    ours.receive(), ours.receive()
    assert len(ours.bodies) == known


@pytest.mark.skipif(sys.platform == "win32", reason="Windows' pipes keep messages apart themselves")
@pytest.mark.parametrize("length", [-1, -(1 << 31), MAX_FRAME + 1, (1 << 31) - 1])
def test_a_wrong_length_ends_the_connection(channels, length):
    ours, theirs = channels
    os.write(theirs.fileno(), struct.pack("!i", length))
    with pytest.raises(OSError, match="the limit is"):
        ours.receive()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows' pipes keep messages apart themselves")
@pytest.mark.parametrize("count", [0, 1, 3, 4, 20])
def test_a_message_that_ends_early_is_the_end(channels, count):
    ours, theirs = channels
    os.write(theirs.fileno(), (struct.pack("!i", 100) + bytes(100))[:count])
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive()


def test_a_message_comes_through_a_pipe_whole_or_is_refused():
    pipe = io.BytesIO()
    write_message(pipe, Message(Kind.INFER, body={"a": 1}, payload=b"body"))
    whole = pipe.getvalue()
    read = read_message(io.BytesIO(whole * 2))
    assert (read.kind, read.body, bytes(read.payload)) == (Kind.INFER, {"a": 1}, b"body")
    assert read_message(io.BytesIO()) is None
    for cut in range(4, len(whole)):
        with pytest.raises(ProtocolError, match="ended within"):
            read_message(io.BytesIO(whole[:cut]))
    for start in (whole[:3], b"print(1) \n" * 3, struct.pack("!i", MAX_PIPED + 1), struct.pack("!i", -1)):
        with pytest.raises(ProtocolError, match="not the start"):
            read_message(io.BytesIO(start))
    with pytest.raises(ProtocolError, match="the limit is"):
        write_message(pipe, Message(Kind.INFER, payload=memoryview(np.zeros(MAX_PIPED, np.uint8))))
