"""The ``EngineClient`` of an engine in the daemon; it connects again after the daemon has ended, and its requests go on."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from staticllm.children.child import start_daemon
from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError, ProcessLostError, StaticLLMError, pipeline_closed
from staticllm.system.threads import CLOSE_SECONDS, check_process
from staticllm.wire import endpoint
from staticllm.wire.messages import Kind, Message

from ...kvcache.sequence import AdapterScales
from ..engine.client import SnapshotTarget, UserProcessors
from ..engine.request import CompileTimes, EngineRequest, Finished, OutputQueue
from ..profiling.stats import Stats
from ..profiling.trace import MAX_RECORDS, Trace
from .daemon_link import Startable
from .engine_connection import EngineConnection, OnLost
from .recovery import LiveRequest, Recovery
from .remote_windows import RemoteWindows


class RemoteEngine:
    """Submits requests to a model of the daemon. One connection carries all of them.

    ``connect`` loads the model in the daemon and returns a connection, which calls the function that it got when it is lost.
    ``give_up`` lets a ``connect`` that runs raise an error soon. After a daemon was killed, the next request, or ``reconnect``,
    loads the model again, in a daemon that is started if none runs. With ``resumes`` the running requests do so at once, and
    go on there with the same tokens (``Recovery``); else, and if the daemon was stopped as asked, they end with a
    ``ProcessLostError``. ``on_lost`` is called on the connection's thread when the daemon has ended. ``has_own_tokenizer``:
    whether the pipeline has another tokenizer than that of the model's directory. ``windows`` encodes the windows of a speech
    model. Any thread may call.
    """

    def __init__(
        self,
        connect: Callable[[OnLost], EngineConnection],
        give_up: Callable[[], object] = lambda: None,
        resumes: bool = False,
        on_lost: OnLost = lambda: None,
        has_own_tokenizer: bool = False,
    ) -> None:
        self._connect = connect
        self._give_up = give_up
        self._resumes = resumes
        self._on_lost = on_lost
        self._connecting = threading.Lock()  # held while the model is loaded
        self._is_closed = False
        self._has_own_tokenizer = has_own_tokenizer
        self._pid = os.getpid()
        self.live: dict[int, LiveRequest] = {}  # by id; only single operations on it, which need no lock
        self.recovery = Recovery(self.live, self._connected, self._submit_to)
        self.connection = connect(self._lose)
        self.windows = RemoteWindows(self._connected, self.connection.num_cross_windows)

    @property
    def is_connected(self) -> bool:
        """Whether the daemon is still there, as far as is known."""
        return self.connection.is_alive

    def reconnect(self) -> None:
        """Load the model in the daemon again if it has ended. Takes as long as loading does.

        Raises:
            ClosedError: the engine was closed.
            StaticLLMError: the daemon cannot be started, or refuses the model.
        """
        self._connected()

    def submit(
        self, request: EngineRequest, queue: OutputQueue | None = None, processors: UserProcessors = ()
    ) -> OutputQueue:
        """Submit a request. Its outputs arrive in ``queue``, which is returned; None creates a new one.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting in the daemon's engine.
            ClosedError: the engine was closed.
            ProcessLostError: the daemon has ended twice before it accepted the request.
            GenerationConfigError: there are ``processors``, which cannot go to another process; or the grammar cannot be
                compiled, or has no answer that is short enough; or it needs another tokenizer than the daemon's.
        """
        if processors:
            raise GenerationConfigError(
                "a logits_processor cannot go to the daemon, which is another process: load the model without daemon=True"
            )
        if self._has_own_tokenizer and (request.grammar is not None or request.stop_strings):
            what = "a grammar" if request.grammar is not None else "stop_strings of beams"
            raise GenerationConfigError(
                f"{what} with tokenizer= and daemon=True: the daemon knows only the tokenizer in the model's directory; "
                "leave one of them out"
            )
        queue = queue or OutputQueue()
        live = LiveRequest(request, queue, self._forget)
        self.live[request.id] = live
        try:
            try:
                times = self._submit_to(self._connected(), live)
            except ProcessLostError:
                live.rewind()  # its outputs may have been faster than the answer that it is accepted
                times = self._submit_to(self._connected(), live)
        except BaseException:
            self.live.pop(request.id, None)
            raise
        if times is not None:
            queue.compile_times = times
        return queue

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        live = self.live.get(request)
        if os.getpid() != self._pid or live is None:
            return
        live.cancel(index, reason)  # first: the recovery reads it after it has submitted the request again
        connection = self.connection
        if connection.has(request):
            connection.cancel(request, index, reason)
        self.recovery.wake()

    def check_process(self) -> None:
        check_process(self._pid)

    def stats(self) -> Stats:
        self.check_process()
        return Stats(**self.connection.ask(Message(Kind.STATS, body={"of": "engine"})).body)

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what the daemon's engine does, over all programs that use it: ``CallWatch.after`` says what that is.

        Raises:
            ClosedError: the engine was closed, or the daemon has ended.
        """
        self.check_process()
        return self.connection.ask(Message(Kind.STATS, body={"of": "calls", "after": number})).body

    def claim(self, session: str, tokens: Sequence[int], adapters: AdapterScales = ()) -> None:
        self.check_process()
        if self._is_closed:
            raise pipeline_closed()
        name = hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()
        body = {"session": name, "tokens": list(tokens), "adapters": list(adapters)}
        self.connection.tell(Message(Kind.CLAIM, body=body))

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Refuse to record: a recording holds the calls of all programs, and is made in the daemon.

        Raises:
            StaticLLMError: always.
        """
        raise StaticLLMError("the engine is in the daemon: staticllm daemon trace records its calls")

    def save_snapshot(self, tokens: list[int], target: SnapshotTarget) -> int:
        return self._snapshot("save", target, tokens)

    def load_snapshot(self, target: SnapshotTarget) -> int:
        return self._snapshot("load", target, [])

    def close(self, drain: bool = False) -> None:
        """End this program's requests, or with ``drain`` wait for them, and give the model back. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        if drain:
            self._drain()
        self._is_closed = True
        self.recovery.close()
        self.windows.close()
        self._give_up()
        limit = CLOSE_SECONDS if self._resumes else -1  # without: a worker that starts must be there to be ended
        if self._connecting.acquire(timeout=limit):  # otherwise the thread that connects closes the connection
            try:
                self.connection.close()
            finally:
                self._connecting.release()
        for live in list(self.live.values()):
            live.end(FinishReason.CANCELLED)

    def _connected(self) -> EngineConnection:
        """Return a connection that works, as far as is known. Raises ``ClosedError`` and ``StaticLLMError``."""
        self.check_process()
        with self._connecting:
            if self._is_closed:
                raise pipeline_closed()
            if not self.connection.is_alive:
                self.connection.close()
                self.connection = self._connect(self._lose)
            if self._is_closed:  # meanwhile, by a thread that does not wait for long
                self.connection.close()
                raise pipeline_closed()
            return self.connection

    def _submit_to(self, connection: EngineConnection, live: LiveRequest) -> CompileTimes | None:
        """Submit a request, after the window that it sees was encoded there. Raises as ``EngineConnection.submit``."""
        if live.request.cross_window:
            self.windows.bring(connection, live.request.cross_window)
        return connection.submit(live.request, live)

    def _lose(self) -> None:
        """Care for the requests of a connection that has ended, on its thread, which must not wait."""
        lost = self.recovery.lost()
        if self._is_closed:
            for live in lost:
                live.end(FinishReason.CANCELLED)
            return
        if lost and not (self._resumes and not self.connection.was_stopped):
            for live in lost:
                live.fail()
        self.recovery.begin()
        self._on_lost()

    def _forget(self, request: int) -> None:
        """Forget a request that has ended; if that was not by the daemon, end it there as well."""
        self.live.pop(request, None)
        if self.connection.has(request):
            self.connection.cancel(request)

    def _snapshot(self, action: str, target: SnapshotTarget, tokens: list[int]) -> int:
        body = {
            "action": action, "path": str(target.path.absolute()), "identity": dict(target.identity), "key": target.key.hex(),
            "adapters": target.adapters, "tokens": tokens,
        }  # fmt: skip
        message = Message(Kind.SNAPSHOT, body=body)
        try:
            answer = self._connected().ask(message)
        except ProcessLostError:  # maybe long before, unnoticed; what it wrote is no file yet, or a whole one
            answer = self._connected().ask(message)
        return int(answer.body["tokens"])

    def _drain(self) -> None:
        ended = SimpleQueue[None]()
        for live in list(self.live.values()):
            live.queue.add_listener(lambda output: ended.put(None) if isinstance(output, Finished) else None)
        while self.live:
            with suppress(Empty):
                ended.get(timeout=0.2)


class DaemonHome(Startable, Protocol):
    """A daemon: where it listens, how it is started, and what it is told about the engines in it."""

    @property
    def resumes_requests(self) -> bool:
        """Whether the running requests of a daemon that was killed go on in the next one, or end with an error."""
        ...

    def adopt(self, engine: RemoteEngine) -> None:
        """Note an engine that now runs in it."""
        ...

    def on_lost(self) -> object:
        """Note that it has ended. Called on the thread of a connection, and must not wait."""
        ...


class UserDaemon:
    """The daemon that all programs of this user share."""

    resumes_requests = True

    @property
    def folder(self) -> Path:
        return endpoint.runtime_folder()

    def start(self) -> None:
        start_daemon(self.folder)

    def adopt(self, engine: RemoteEngine) -> None:
        """Do nothing: the user's daemon outlives its engines."""

    def on_lost(self) -> object:
        """Do nothing: the next request of an engine connects it again."""
