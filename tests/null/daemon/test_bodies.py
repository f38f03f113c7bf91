"""Tests that the fields of the messages of clients are checked before they are used."""

from __future__ import annotations

import math

import pytest

from staticllm.core import FinishReason
from staticllm.daemon import bodies
from staticllm.daemon.bodies import read_body
from staticllm.wire.messages import Kind, Message, ProtocolError

HELLO = {"pid": 1, "program": "test"}
CANCEL = {"request": 1, "reason": "stop"}
SNAPSHOT = {"action": "save", "path": "/x", "key": "", "identity": {}, "tokens": []}


def test_a_body_has_its_fields_and_defaults():
    found = read_body(Message(Kind.HELLO, body={**HELLO, "more": [1]}), bodies.Hello)
    assert (found.pid, found.program, found.priority, found.session) == (1, "test", bodies.MAX_PRIORITY, None)
    assert read_body(Message(Kind.CANCEL, body=CANCEL), bodies.Cancel).reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        (bodies.Hello, {"pid": 1}, "program"),
        (bodies.Hello, {**HELLO, "pid": True}, "pid"),
        (bodies.Hello, {**HELLO, "pid": -1}, "pid"),
        (bodies.Hello, {**HELLO, "pid": 1.0}, "pid"),
        (bodies.Hello, {**HELLO, "pid": 1 << 70}, "pid"),
        (bodies.Hello, {**HELLO, "priority": 2 * bodies.MAX_PRIORITY + 1}, "priority"),
        (bodies.Hello, {**HELLO, "program": "a\0b"}, "program"),
        (bodies.Hello, {**HELLO, "program": "a" * 257}, "program"),
        (bodies.Hello, {**HELLO, "session": 5}, "session"),
        (bodies.Property, {"name": "a" * 129}, "name"),
        (bodies.Request, {"block": (1 << 40) + 1}, "block"),
        (bodies.State, {"index": "0"}, "index"),
        (bodies.Cancel, {**CANCEL, "reason": "other"}, "reason"),
        (bodies.Cancel, {**CANCEL, "index": "x"}, "index"),
        (bodies.AskedStats, {"after": -1}, "after"),
        (bodies.Snapshot, {**SNAPSHOT, "tokens": [1, "2"]}, "tokens"),
        (bodies.Snapshot, {**SNAPSHOT, "identity": {"a": 5}}, "identity"),
        (bodies.Adapters, {"members": [["a", "b", math.nan]]}, "members"),
        (bodies.Model, {"mode": "other", "device": "CPU"}, "mode"),
        (bodies.Model, {"mode": "auto", "device": "CPU", "config": dict.fromkeys(map(str, range(65)))}, "config"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(kind, body, name):
    with pytest.raises(ProtocolError, match=f"^HELLO: .*{name}") as caught:
        read_body(Message(Kind.HELLO, body=body), kind)
    assert "\n" not in str(caught.value)
