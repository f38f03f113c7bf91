"""The messages between the daemon and its clients: a header of fixed size, a JSON object, and raw bytes.

Nothing is unpickled or evaluated. Whatever a peer sends either decodes to plain values within the limits of this module or
raises ``ProtocolError``.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import IO, Any

PROTOCOL = 11
"""The version of the messages; client and daemon must have the same."""
MAX_PRIORITY = 100
"""Priorities are from ``-MAX_PRIORITY`` to ``MAX_PRIORITY``; messages hold their sum with ``MAX_PRIORITY``."""
MAX_FRAME = 1 << 20
"""The most bytes of one message; larger tensors lie in shared memory."""
MAX_PIPED = 1 << 28
"""The most bytes of a message on a pipe to a child process, which has no shared memory."""
MAX_INLINE = 1 << 16
"""The most bytes of tensors inside a message."""
MAX_BODIES = 16
"""The most bodies that a connection keeps for repeated messages."""
MAX_TEXT = 2048
"""The most bytes of the text of a body that is kept."""
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_HEADER = struct.Struct("<HHIQQd")  # kind, flags, bytes of JSON, handle, number, seconds
HEADER_BYTES = _HEADER.size
LENGTH = struct.Struct("!i")
"""Before each message on a socket or pipe, as ``multiprocessing.connection`` writes it."""


class ProtocolError(RuntimeError):
    """A message that is damaged, too long, or not allowed at this place."""


class Kind(IntEnum):
    """What a message asks or answers; the comments name the fields of its body."""

    HELLO = 1  # protocol, openvino, pid, program, priority, session (to add a connection to a client)
    WELCOME = 2  # session, openvino, limits
    OK = 3  # the result, by names that depend on the question
    FAILED = 4  # type, bases, text, fields: the exception that the call raised (errors.to_wire)
    REFUSED = 5  # reason, and as FAILED: the daemon does not take this client or model; it may run natively
    MODEL = 6  # path or spool, weights, device, config, mode; or directory, candidates -> OK: model, mode, …
    REQUEST = 7  # handle: model -> OK: request
    INFER = 8  # handle: request; tensors, block -> DONE
    DONE = 9  # tensors; its time is that of the device
    RESET = 10  # handle: request -> OK; nothing if QUIET
    RELEASE = 11  # handle: a model or a request -> OK; nothing if QUIET
    GET_PROPERTY = 12  # handle: model; name -> OK: value
    SET_PROPERTY = 13  # handle: model; values -> OK
    STATES = 14  # handle: request -> OK: names
    GET_STATE = 15  # handle: request; index -> DONE
    SET_STATE = 16  # handle: request; index, tensors, in_place -> OK
    RESET_STATE = 17  # handle: request; index -> OK
    PROFILE = 18  # handle: request -> OK: nodes
    EXPORT = 19  # handle: model -> OK: path
    HINT = 20  # priority -> OK
    SUBMIT = 21  # handle: model; number of the request; request, window -> OK, and then OUTPUT, OUTPUT, …
    OUTPUT = 22  # number of the request; outputs; flag LAST when the request has ended
    CANCEL = 23  # request, index, reason -> OK
    STATS = 24  # -> OK: the daemon's statistics; of: engine, or of: calls with after, handle: model -> OK: those of its engine
    STOP = 25  # -> OK; the daemon ends
    PING = 26  # -> OK
    TRACE = 28  # action: begin -> OK; action: end, path -> OK: events
    SNAPSHOT = 27  # handle: model; action, path, identity, key, tokens -> OK: tokens
    CLAIM = 29  # handle: model; session, tokens, adapters -> OK
    # handle: model; window, first, priority, released, a tensor: bands of the window -> OK; when it was encoded
    ENCODE = 30
    ALIGN = 31  # handle: model; window, tokens, priority -> DONE
    RELEASE_WINDOW = 32  # window -> OK


_KINDS = {int(kind): kind for kind in Kind}
_REPEATED = (Kind.INFER, Kind.DONE)
LAST = 1
"""Flag of the last ``OUTPUT`` of a request."""
BLOCK = 2
"""Flag of a message that is followed by a handle of shared memory; its body has ``block_size`` in bytes."""
QUIET = 4
"""Flag of a ``RESET`` or ``RELEASE`` that gets no answer. Other messages must not have it."""
EARLIER = 8
"""Flag of a ``FAILED`` that reports a quiet ``RESET`` before the question; the question was not carried out."""


class Body(dict[str, Any]):
    """The body of a message whose text is repeated; it must not be changed."""

    __slots__ = ("layout",)
    layout: Any
    """What ``tensors.read`` found in it when it read the text for the first time."""


@dataclass(slots=True)  # a frozen one takes four times as long to make
class Message:
    """One message; it must not be changed."""

    kind: Kind
    handle: int = 0
    """Names the object that it concerns."""
    number: int = 0
    """Names the call that it belongs to."""
    time: float = 0.0
    """A duration in seconds whose meaning depends on the kind."""
    flags: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    payload: bytes | memoryview = b""
    """Raw bytes, such as small tensors."""


def encode(message: Message, limit: int = MAX_FRAME) -> bytes:
    """Return the bytes of a message.

    Raises:
        ProtocolError: they are more than ``limit``.
    """
    text = text_of_body(message.body)
    size = HEADER_BYTES + len(text) + len(message.payload)
    if size > limit:
        raise ProtocolError(f"a message of {size} bytes, the limit is {limit}: put its tensors into shared memory")
    header = _HEADER.pack(message.kind, message.flags, len(text), message.handle, message.number, message.time)
    return b"".join((header, text, message.payload))


def text_of_body(body: dict[str, Any]) -> bytes:
    return _to_json(body).encode() if body else b""


def write_header(message: Message, text_bytes: int, target: bytearray, offset: int) -> None:
    """Write the header of a message, whose text has ``text_bytes`` bytes, into ``target``."""
    kind = message.kind
    flags = message.flags
    _HEADER.pack_into(target, offset, kind, flags, text_bytes, message.handle, message.number, message.time)


def decode(data: bytes, bodies: dict[bytes, Body] | None = None) -> Message:
    """Return the message of these bytes.

    ``bodies`` are those of earlier calls and their results on the same connection, by their text: most have the same shapes
    as those before.

    Raises:
        ProtocolError: they are not one.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a message of {len(data)} bytes is shorter than its header")
    kind, flags, length, handle, number, time = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    if end > len(data):
        raise ProtocolError(f"a message of {len(data)} bytes says that its text has {length}")
    if not math.isfinite(time):
        raise ProtocolError("a message whose time is not a finite number")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"a message of the unknown kind {kind}")
    text = data[_HEADER.size : end]
    if bodies is not None and known in _REPEATED:
        body: dict[str, Any] = bodies.get(text) or _repeated_body(text, bodies)
    else:
        body = _body(text)
    return Message(known, handle, number, time, flags, body, memoryview(data)[end:])


def write_message(stream: IO[bytes], message: Message) -> None:
    """Write a message to a pipe and flush it.

    Raises:
        ProtocolError: it is too long.
        OSError: the pipe is closed.
    """
    data = encode(message, MAX_PIPED)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> Message | None:
    """Return the next message of a pipe; None at its end.

    Raises:
        ProtocolError: it is no message, too long, or ends within.
    """
    start = stream.read(LENGTH.size)
    if not start:
        return None
    size = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else -1
    if not 0 <= size <= MAX_PIPED:
        raise ProtocolError(f"{start!r} is not the start of a message")
    data = stream.read(size)
    if len(data) < size:
        raise ProtocolError("the pipe ended within a message")
    return decode(data)


def _repeated_body(text: bytes, bodies: dict[bytes, Body]) -> Body:
    body = Body(_body(text))
    body.layout = None
    if len(text) <= MAX_TEXT:
        if len(bodies) >= MAX_BODIES:
            bodies.clear()
        bodies[text] = body
    return body


def _body(text: bytes) -> dict[str, Any]:
    if not text:
        return {}
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the text of a message is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"the text of a message is a {type(body).__name__}, not a JSON object")
    return body


def encode_value(value: Any) -> Any:
    """Return a property's value as JSON types, from which ``decode_value`` makes an equal one."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [encode_value(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode_value(each) for each in value]}
    if isinstance(value, dict):
        return {"$dict": [[str(key), encode_value(each)] for key, each in value.items()]}
    return _encode_object(value)


def _encode_object(value: Any) -> Any:
    kind = type(value)
    if kind.__module__.split(".")[0] == "openvino":
        if hasattr(value, "get_type_name"):
            return {"$type": value.get_type_name()}
        if isinstance(getattr(value, "name", None), str):
            return {"$enum": [kind.__module__, kind.__qualname__, value.name]}
    return str(value)


def decode_value(value: Any) -> Any:
    """Return the value that ``encode_value`` was given; names that this OpenVINO does not have stay text."""
    if isinstance(value, list):
        return [decode_value(each) for each in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, given),) = value.items()
    decode = _DECODERS.get(kind)
    return value if decode is None else decode(given)


def _set(given: list[Any]) -> set[Any]:
    return {decode_value(each) for each in given}


def _dict(given: list[list[Any]]) -> dict[str, Any]:
    return {key: decode_value(each) for key, each in given}


def _type(given: str) -> Any:
    from openvino._pyopenvino import Type

    return getattr(Type, given, given)


def _member(given: list[str]) -> Any:
    """Return a member of an enumeration of OpenVINO; its name if there is none."""
    module, path, name = given
    found: Any = sys.modules.get(module) if module.split(".")[0] == "openvino" else None
    for part in path.split("."):
        found = getattr(found, part, None)
    members = getattr(found, "__members__", {})
    return members.get(name, name)


_DECODERS: dict[str, Callable[[Any], Any]] = {"$set": _set, "$dict": _dict, "$type": _type, "$enum": _member}
