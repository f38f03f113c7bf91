"""Takes one answer from a replica, and asks another one if the first is lost."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from staticllm.pipelines.daemon_client.delivered import DivergedError
from staticllm.server.http.errors import SERVER, ApiError
from staticllm.server.ray_app.messages import ReplicaHead, ReplicaRequest
from staticllm.server.ray_app.replay import EventReplay, lost_event

MAX_ATTEMPTS = 4
LOST = (NodeDiedError, ObjectLostError, RayActorError, TaskCancelledError, WorkerCrashedError)
"""What a caller sees of a replica whose process or machine has gone."""
STREAMS = (b"text/event-stream", b"application/x-ndjson")
_log = logging.getLogger("ray.serve")


class LostError(Exception):
    """All replicas that were asked were lost."""


class Relay:
    """One answer. ``replay`` is what continues a stream; without it, a stream that has begun is not continued."""

    def __init__(self, handle: DeploymentHandle, request: ReplicaRequest, replay: EventReplay | None = None) -> None:
        self.handle = handle.options(stream=True, method_name="answer", multiplexed_model_id=request.model)
        self.request = request
        self.replay = replay
        self._num_attempts = 0
        self._is_stream = False
        self._whole = b""

    async def begin(self) -> ReplicaHead:
        """Return the head of the answer. An answer that is no stream has come whole then.

        Raises:
            ApiError: too many requests wait (503), or every replica that was asked was lost (502).
        """
        try:
            head = await self._begin()
            self._is_stream = head.header(b"content-type").startswith(STREAMS)
            while not self._is_stream:
                try:
                    self._whole = b"".join([part async for part in self._body()])
                    break
                except LOST:
                    head = await self._begin()
            return head
        except LostError as error:
            self._cancel()
            raise ApiError(502, f"{error}: send the request again", kind=SERVER, code="replica_lost") from None
        except BaseException:
            self._cancel()
            raise

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the answer. The call of the replica is cancelled if the generator is closed before its end."""
        if not self._is_stream:
            yield self._whole
            return
        try:
            async for part in self._streamed():
                yield part
        finally:
            self._cancel()

    async def _streamed(self) -> AsyncIterator[bytes]:
        replay = self.replay
        while True:
            try:
                async for part in self._body():
                    if new := part if replay is None else replay.take(part):
                        yield new
                return
            except LOST:
                if replay is None or not replay.can_resume:
                    if replay is not None:
                        yield lost_event("the machine that answered was lost")
                    return
            except DivergedError:
                yield lost_event("the machine that answered was lost, and another answered differently")
                return
            if replay.is_complete:
                return
            try:
                head = await self._begin()
            except (LostError, ApiError) as error:
                yield lost_event(str(error))
                return
            if head.status != 200:
                yield lost_event(f"the machine that answered was lost, and another refused ({head.status})")
                return
            replay.restart()

    async def _body(self) -> AsyncIterator[bytes]:
        async for part in self._answer:
            yield part

    async def _begin(self) -> ReplicaHead:
        """Ask a replica, and return the head of its answer.

        Raises:
            LostError: every replica that was asked was lost.
            ApiError: too many requests wait.
        """
        while self._num_attempts < MAX_ATTEMPTS:
            if self._num_attempts:
                _log.warning("a replica was lost, the request is sent to another")
                await asyncio.sleep(0.1 * 2**self._num_attempts)
            self._num_attempts += 1
            try:
                self._answer = self.handle.remote(self.request)
                head: ReplicaHead = await self._answer.__anext__()
                return head
            except LOST:
                continue
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise _overloaded(error) from None
        raise LostError(f"{MAX_ATTEMPTS} machines in a row were lost")

    def _cancel(self) -> None:
        """End the call of the replica, if there is one. Does nothing after its end."""
        answer = getattr(self, "_answer", None)
        if answer is not None:
            answer.cancel()


def _overloaded(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        message = "too many requests wait for a machine: try again later, or raise max_queued or max_replicas"
        return ApiError(503, message, kind=SERVER, code="busy", headers={"Retry-After": "5"}, knob="max_queued")
    message = "no machine serves this kind of model now: try again later"
    return ApiError(503, message, kind=SERVER, code="unavailable", headers={"Retry-After": "5"})
