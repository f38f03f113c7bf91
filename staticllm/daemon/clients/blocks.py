"""Sends tensors over a connection, in its block of shared memory if they are large."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from staticllm.daemon.clients.session import Session
from staticllm.daemon.infer_request import Array
from staticllm.wire.blocks import block_size
from staticllm.wire.channel import Channel, NoRoomError
from staticllm.wire.messages import Message


class TensorSender:
    """The block of a connection, which counts for its client, and the tensors that are sent in it. ``lock`` is held to send."""

    def __init__(self, session: Session, channel: Channel, lock: threading.Lock) -> None:
        self._session = session
        self._channel = channel
        self._lock = lock

    def grow(self, wanted: int) -> None:
        """Replace the current block by one of at least ``wanted`` bytes.

        Raises:
            BusyError: the client has too much shared memory.
            OSError: the system gives none.
        """
        old = self._channel.block_bytes
        new = block_size(wanted)
        self._session.count_block(new - old)
        try:
            self._channel.grow(wanted)
        finally:
            self._session.count_block(self._channel.block_bytes - new)

    def send(self, message: Message, arrays: Sequence[Array]) -> None:
        """Send arrays, in a larger block if they need one.

        Raises:
            BusyError: the client has too much shared memory.
            OSError: the system gives none, or the client has gone.
        """
        with self._lock:
            try:
                self._channel.send_tensors(message, arrays, range(len(arrays)))
            except NoRoomError as error:
                self.grow(error.size)
                self._channel.send_tensors(message, arrays, range(len(arrays)))
