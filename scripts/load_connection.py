"""One HTTP connection of ``load_server.py``, over which a client can also misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import h11


class Connection:
    """One HTTP/1.1 connection, over which a client can also misbehave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, port: int, limit: int = 1 << 16) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def post(self, body: bytes, kind: str = "application/json", length: int | None = None) -> None:
        """Send a request; ``length`` may claim another length than that of the body."""
        headers = [
            ("Host", "127.0.0.1"), ("Content-Type", kind), ("Content-Length", str(len(body) if length is None else length)),
        ]  # fmt: skip
        request = h11.Request(method="POST", target="/v1/chat/completions", headers=headers)
        self.writer.write(self._http.send(request) or b"")
        with contextlib.suppress(h11.LocalProtocolError):  # the length is a lie
            self.writer.write(self._http.send(h11.Data(data=body)) or b"")
            self.writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self.writer.drain()

    async def events(self) -> AsyncIterator[h11.Event]:
        """Yield the response and its data until its end."""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.reader.read(65536))
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return
            else:
                assert isinstance(event, h11.Event)
                yield event

    async def whole(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the response."""
        status, headers, data = 0, {}, b""
        async for event in self.events():
            if isinstance(event, h11.Response):
                status, headers = event.status_code, {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                data += bytes(event.data)
        return status, headers, data
