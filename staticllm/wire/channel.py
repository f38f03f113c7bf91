"""A connection that carries messages and blocks of shared memory, used by one thread at a time on each side."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import tensors
from .blocks import Block
from .messages import BLOCK, MAX_FRAME, Message, ProtocolError, decode, encode
from .tensors import Array


class Channel:
    """A connection with the block of shared memory that belongs to it. The daemon creates and enlarges the block.

    It takes none itself (``takes_blocks``): a client could make one shorter later, and reading that would end the daemon.
    """

    def __init__(self, connection: Any, takes_blocks: bool = True) -> None:
        self._connection, self._takes_blocks = connection, takes_blocks
        self._block: Block | None = None
        self._is_unsent = False  # the peer has not got the block yet
        self._closing = (
            threading.Lock()
        )  # or ``shut`` could end another connection, which has got the number of this one

    @property
    def block_bytes(self) -> int:
        """The size of the block in bytes; 0 without one."""
        return 0 if self._block is None else len(self._block)

    def fileno(self) -> int:
        """Return the handle on which messages arrive."""
        number: int = self._connection.fileno()
        return number

    def send(self, message: Message) -> None:
        """Send a message, and after it the block if it is new.

        Raises:
            ProtocolError: it is longer than ``MAX_FRAME``.
            OSError: the peer has gone.
        """
        if not self._is_unsent or self._block is None:
            self._connection.send_bytes(encode(message))
            return
        body = {**message.body, "block_size": len(self._block)}
        self._connection.send_bytes(encode(replace(message, flags=message.flags | BLOCK, body=body)))
        self._block.send(self._connection)
        self._is_unsent = False

    def receive(self) -> Message:
        """Wait for the next message; a block that follows it replaces the current one.

        Raises:
            ProtocolError: it is not a message.
            EOFError, OSError: the peer has gone, or sent more than ``MAX_FRAME`` bytes.
        """
        message = decode(self._connection.recv_bytes(MAX_FRAME))
        if message.flags & BLOCK and not self._takes_blocks:
            raise ProtocolError(f"{message.kind.name}: shared memory from a client, the daemon gives it out")
        if message.flags & BLOCK:
            size = message.body.get("block_size")
            if not isinstance(size, int) or not 0 < size < 1 << 40:
                raise ProtocolError(f"{message.kind.name}: a block of {size!r} bytes")
            self._replace(Block.receive(self._connection, size))
        return message

    def poll(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` for a message or the end of the connection; return whether there is one."""
        found: bool = self._connection.poll(seconds)
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
            ProtocolError: the block is too small.
        """
        body = {**message.body, "tensors": tensors.describe(arrays, names)}
        payload = tensors.inline(arrays)
        if payload is None:
            body["shared"] = True
            if self._block is None or tensors.size_of(arrays) > len(self._block):
                raise ProtocolError(f"tensors of {tensors.size_of(arrays)} bytes, the block has {self.block_bytes}")
            tensors.write(arrays, self._block.memory)
        self.send(replace(message, body=body, payload=b"" if payload is None else bytes(payload)))

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
                self._connection.close()
                return
            with socket.socket(fileno=os.dup(self._connection.fileno())) as peer:
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and the block. A second call does nothing."""
        with self._closing, contextlib.suppress(OSError):
            self._connection.close()
        self._replace(None)

    def _replace(self, block: Block | None) -> None:
        old, self._block = self._block, block
        if old is not None:
            old.close()
