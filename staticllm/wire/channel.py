"""A connection that carries messages and blocks of shared memory, used by one thread at a time on each side."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from . import endpoint, tensors
from .blocks import Block
from .messages import (
    BLOCK,
    HEADER_BYTES,
    LENGTH,
    MAX_FRAME,
    MAX_INLINE,
    PROTOCOL,
    Body,
    Kind,
    Message,
    ProtocolError,
    decode,
    encode,
    text_of_body,
    write_header,
)  # fmt: skip
from .tensors import Array

MAX_FRAMES = 16
"""How many frames are kept for calls of the same shapes."""


class NoRoomError(ProtocolError):
    """Tensors of ``size`` bytes need a larger block of shared memory."""

    def __init__(self, size: int, block_bytes: int) -> None:
        super().__init__(f"tensors of {size} bytes, the block has {block_bytes}")
        self.size = size


class Frame(NamedTuple):
    """A message with tensors, to be sent again and again with other values: its bytes, and views into them or the block."""

    data: bytearray
    text_bytes: int
    views: list[Array]


class Channel:
    """A connection with the block of shared memory that belongs to it. The daemon creates and enlarges the block.

    It takes none itself (``takes_blocks``): a client could make one shorter later, and reading that would end the daemon.
    """

    def __init__(self, connection: Any, takes_blocks: bool = True) -> None:
        self.connection = connection
        self._takes_blocks = takes_blocks
        self._block: Block | None = None
        self._is_unsent = False  # the peer has not got the block yet
        self.frames: dict[object, Frame] = {}  # by what is the same in all messages of a frame
        self.bodies: dict[bytes, Body] = {}
        self._check: Callable[[], object] | None = None
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Make the lock, for a new channel or in a forked child."""
        # without it ``shut`` could end another connection, which has got the number of this one
        self._closing = threading.Lock()

    @property
    def block_bytes(self) -> int:
        """The size of the block in bytes; 0 without one."""
        return 0 if self._block is None else len(self._block)

    def watch(self, check: Callable[[], object]) -> None:
        """Call ``check`` whenever ``receive`` or ``send`` has waited for ``endpoint.PROBE_SECONDS``.

        It returns if they shall go on to wait, and raises if not; they raise the same. The connection is of no use then.
        """
        self._check = check
        if sys.platform == "win32":
            return
        seconds, rest = divmod(endpoint.PROBE_SECONDS, 1)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))  # a timeval
        with socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """Return the handle on which messages arrive."""
        number: int = self.connection.fileno()
        return number

    def send(self, message: Message) -> None:
        """Send a message, and after it the block if it is new.

        Raises:
            ProtocolError: the message is too long.
            OSError: the peer has gone.
        """
        if not self._is_unsent or self._block is None:
            data = encode(message)
            self.write(bytearray(LENGTH.pack(len(data)) + data))
            return
        body = {**message.body, "block_size": len(self._block)}
        data = encode(replace(message, flags=message.flags | BLOCK, body=body))
        self.write(bytearray(LENGTH.pack(len(data)) + data))
        self._block.send(self.connection)
        self._is_unsent = False

    def receive(self) -> Message:
        """Wait for the next message; a block that follows it replaces the current one.

        Raises:
            ProtocolError: it is not a message.
            EOFError, OSError: the peer has gone, or sent more than ``MAX_FRAME`` bytes.
        """
        message = decode(self._read(), self.bodies)
        if message.flags & BLOCK and not self._takes_blocks:
            raise ProtocolError(f"{message.kind.name}: shared memory from a client, the daemon gives it out")
        if message.flags & BLOCK:
            size = message.body.get("block_size")
            if not isinstance(size, int) or not 0 < size < 1 << 40:
                raise ProtocolError(f"{message.kind.name}: a block of {size!r} bytes")
            self._replace(Block.receive(self.connection, size))
        return message

    def poll(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` for a message or the end of the connection; return whether there is one."""
        found: bool = self.connection.poll(seconds)
        return found

    def grow(self, size: int) -> None:
        """Create a block of at least ``size`` bytes in place of the current one; the next message carries it to the peer.

        Raises:
            OSError: there is no memory for it.
        """
        self._replace(Block.create(size))
        self._is_unsent = True

    def send_tensors(self, message: Message, arrays: Sequence[Array], names: Sequence[int | str]) -> None:
        """Send a message with tensors; large ones go into the block, which must have room for them.

        Raises:
            NoRoomError: the block is too small.
        """
        key = (*names, *message.body.items(), *[(array.dtype, array.shape) for array in arrays])
        frame = self.frames.get(key)
        if frame is None:
            if len(self.frames) >= MAX_FRAMES:
                self.frames.clear()
            frame = self._frame(message, arrays, names)
            self.frames[key] = frame
        for view, array in zip(frame.views, arrays, strict=True):
            view[...] = array
        write_header(message, frame.text_bytes, frame.data, LENGTH.size)
        if self._is_unsent:
            self.send(decode(bytes(frame.data[LENGTH.size :])))
        else:
            self.write(frame.data)

    def _frame(self, message: Message, arrays: Sequence[Array], names: Sequence[int | str]) -> Frame:
        body = {**message.body, "tensors": tensors.describe(arrays, names)}
        size = tensors.size_of(arrays)
        is_shared = size > MAX_INLINE
        if is_shared:
            body["shared"] = True
            if self._block is None or size > len(self._block):
                raise NoRoomError(size, self.block_bytes)
        text = text_of_body(body)
        begin = LENGTH.size + HEADER_BYTES
        data = bytearray(begin + len(text) + (0 if is_shared else size))
        LENGTH.pack_into(data, 0, len(data) - LENGTH.size)
        data[begin : begin + len(text)] = text
        if is_shared and self._block is not None:
            return Frame(data, len(text), tensors.views(arrays, self._block.memory, 0))
        return Frame(data, len(text), tensors.views(arrays, data, begin + len(text)))

    def tensors_of(self, message: Message) -> list[tuple[int | str, Array]]:
        """Return the tensors of a received message: views, valid until the next message that uses the block.

        Raises:
            ProtocolError: a description is wrong.
        """
        return tensors.read(message, None if self._block is None else self._block.memory)

    def shut(self) -> None:
        """End the connection for both sides; a thread that waits in ``receive`` returns. Any thread may call."""
        with self._closing, contextlib.suppress(OSError, ValueError):
            if sys.platform == "win32":
                self.connection.close()
                return
            with socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and the block. A second call does nothing."""
        with self._closing, contextlib.suppress(OSError):
            self.connection.close()
        self._replace(None)

    def write(self, data: bytearray) -> None:
        """Write a message, with its length before it."""
        if sys.platform == "win32":
            self.connection.send_bytes(memoryview(data)[LENGTH.size :])
            return
        handle = self.connection.fileno()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(handle, rest) :]
            except BlockingIOError:
                self._go_on()

    def _read(self) -> bytes:
        """Read a message. Two system calls, because more could be a handle of shared memory."""
        if sys.platform == "win32":
            while self._check is not None and not self.connection.poll(endpoint.PROBE_SECONDS):
                self._check()
            whole: bytes = self.connection.recv_bytes(MAX_FRAME)
            return whole
        handle = self.connection.fileno()
        (size,) = LENGTH.unpack(self._read_exactly(handle, LENGTH.size))
        if not 0 <= size <= MAX_FRAME:
            raise OSError(f"a message of {size} bytes, the limit is {MAX_FRAME}")
        return self._read_exactly(handle, size)

    def _read_exactly(self, handle: int, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = os.read(handle, size - len(data))
            except BlockingIOError:
                self._go_on()
                continue
            if not more:
                raise EOFError
            data = data + more if data else more
        return data

    def _go_on(self) -> None:
        """Decide whether a message that has been waited for is waited for on."""
        if self._check is not None:
            self._check()

    def _replace(self, block: Block | None) -> None:
        self.frames.clear()  # their views would keep the block
        old = self._block
        self._block = block
        if old is not None:
            old.close()


class Joined(NamedTuple):
    """A connection to the daemon, and its answer to ``HELLO``."""

    channel: Channel
    answer: Message


def join_daemon(folder: Path, check: Callable[[], object], **more: Any) -> Joined:
    """Connect to the daemon of a folder, and say which program this is; ``more`` are fields of ``HELLO``, ``check`` is watched.

    Raises:
        SilentError: it does not answer.
        EndpointError: none listens.
        ProtocolError, EOFError, OSError: it has gone.
    """
    from openvino._pyopenvino import get_version

    channel = Channel(endpoint.connect(folder))
    program = Path(sys.argv[0] if getattr(sys, "argv", None) else "").name or "python"
    body = {"protocol": PROTOCOL, "openvino": get_version()[:128], "pid": os.getpid(), "program": program[:256], **more}
    try:
        channel.send(Message(Kind.HELLO, body=body))
        if not channel.poll(endpoint.ANSWER_SECONDS):
            raise endpoint.SilentError(endpoint.silence_of(folder))
        channel.watch(check)
        return Joined(channel, channel.receive())
    except BaseException:
        channel.close()
        raise


class Renewable(Protocol):
    """An object with locks."""

    def renew(self) -> None:
        """Make its locks anew, and forget what threads of the parent were about to do. Must not wait."""
        ...


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(renewable: Renewable) -> None:
    """Call ``renew`` in every forked child, as long as the object lives."""
    _renewables.add(renewable)


def _renew_all() -> None:
    for each in list(_renewables):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
