"""The bodies of the messages that clients send; ``read_body`` checks them, because the daemon trusts no client."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from staticllm.adapters.adapter_set import MAX_ALPHA
from staticllm.config import MAX_SEQS
from staticllm.core import FinishReason
from staticllm.pipelines.engine.request import MAX_PRIORITY as MAX_REQUEST_PRIORITY
from staticllm.system.typed import typed
from staticllm.wire.messages import MAX_PRIORITY, Message, ProtocolError

B = TypeVar("B", bound=Struct)
_NO_ZERO = r"^[^\0]*$"
Text = Annotated[str, Meta(max_length=4096, pattern=_NO_ZERO)]
Name = Annotated[str, Meta(max_length=128, pattern=_NO_ZERO)]
Priority = Annotated[int, Meta(ge=0, le=2 * MAX_PRIORITY)]
"""A priority plus ``MAX_PRIORITY``."""
Number = Annotated[int, Meta(ge=0, le=1 << 62)]
WindowNumber = Annotated[int, Meta(ge=1, le=1 << 62)]
SmallNumber = Annotated[int, Meta(ge=0, le=1 << 16)]
RequestPriority = Annotated[int, Meta(ge=-MAX_REQUEST_PRIORITY, le=MAX_REQUEST_PRIORITY)]
Properties = Annotated[dict[str, Any], Meta(max_length=64)]


class Version(Struct):
    """The part of a ``HELLO`` that is the same in all versions of the protocol."""

    openvino: Name
    protocol: Annotated[int, Meta(ge=0, le=1 << 16)]


class Hello(Struct):
    """A new client, or with ``session`` a further connection of one."""

    pid: Annotated[int, Meta(ge=0, le=1 << 31)]
    program: Annotated[str, Meta(max_length=256, pattern=_NO_ZERO)]
    priority: Priority = MAX_PRIORITY
    session: Name | None = None
    watches: bool = False


class Model(Struct):
    """An IR: its ``path``, or that of its copy for the daemon, ``spool``."""

    mode: Literal["auto", "exact"]
    device: Name
    path: Text = ""
    spool: Text | None = None
    weights: Text | None = None
    stamp: list[list[int]] | None = None
    """Sizes and times of change of its files."""
    config: Properties = {}


class AskedCandidate(Struct):
    """A device, the fields of its config, and those of them that the user gave."""

    device: Text
    config: dict[str, Any]
    explicit: list[str] = []


class Adapters(Struct):
    """The path, the name and the alpha of each adapter."""

    is_fused: bool = False
    members: Annotated[
        list[tuple[Text, Text, Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]]], Meta(max_length=64)
    ] = []


class AskedDraft(Struct):
    """A draft model."""

    directory: Text
    device: Text
    properties: Properties


class Speech(Struct):
    """How a speech model is loaded: the windows that are decoded together, and the layers and heads that find words."""

    num_windows: Annotated[int, Meta(ge=1, le=MAX_SEQS)]
    heads: Annotated[list[tuple[SmallNumber, SmallNumber]], Meta(max_length=1024)] = []


class Language(Struct):
    """A model directory with an engine."""

    directory: Text
    candidates: Annotated[list[AskedCandidate], Meta(min_length=1, max_length=8)]
    adapters: Adapters | None = None
    draft: AskedDraft | None = None
    speech: Speech | None = None
    """What a speech model has besides; None for others."""


class Property(Struct):
    """A property of a model."""

    name: Name


class Request(Struct):
    """An infer request, and the bytes of its block of shared memory."""

    block: Annotated[int, Meta(ge=0, le=1 << 40)] = 0


class State(Struct):
    """A state of an infer request."""

    index: Annotated[int, Meta(ge=0, le=1 << 20)]
    in_place: bool = False


class Submit(Struct):
    """The fields of an ``EngineRequest``, and the client's number of the window that it sees; 0 without one."""

    request: dict[str, Any]
    window: Number = 0


class Encode(Struct):
    """Bands of a window, from ``first`` on."""

    window: WindowNumber
    """The client's number of the window."""
    first: SmallNumber
    priority: RequestPriority = 0
    released: Annotated[list[WindowNumber], Meta(max_length=64)] = []
    """The numbers of windows that ended."""


class Align(Struct):
    """A text about a window."""

    window: WindowNumber
    tokens: Annotated[list[int], Meta(min_length=1, max_length=1 << 16)]
    priority: RequestPriority = 0


class ReleaseWindow(Struct):
    """A window."""

    window: WindowNumber


class Cancel(Struct):
    """A request, or one of its answers."""

    request: Number
    reason: FinishReason
    index: int | None = None


class Snapshot(Struct):
    """A file, and what its writer and its readers share."""

    action: Name
    path: Text
    key: Text
    """Hexadecimal."""
    identity: dict[str, str]
    tokens: list[int]
    adapters: list[float] = []


class Claim(Struct):
    """A conversation of a session."""

    session: Annotated[str, Meta(max_length=64)]
    tokens: list[int]
    adapters: list[float]


class Hint(Struct):
    """The priority of a client."""

    priority: Priority


class AskedStats(Struct):
    """What is asked for: the daemon; ``of`` a model its ``engine``, or its ``calls`` from number ``after`` on."""

    of: Name = ""
    after: Number = 0


class AskedTrace(Struct):
    """``begin``, or the end with the file to write."""

    action: Name
    path: Text = ""


def read_body(message: Message, kind: type[B]) -> B:
    """Return the body of a message.

    Raises:
        ProtocolError: a field is missing, of a wrong type or out of bounds.
    """
    try:
        return typed(message.body, kind)
    except ValueError as error:
        raise ProtocolError(f"{message.kind.name}: {error}") from None
