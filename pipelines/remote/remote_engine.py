"""The ``EngineClient`` of an engine in the daemon: requests go there as plain values, and tokens come back."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from staticllm.core import FinishReason
from staticllm.errors import ClosedError, ConfigError, GenerationConfigError, StaticLLMError, as_ours
from staticllm.kvcache.sequence import AdapterScales
from staticllm.kvcache.snapshot import Identity
from staticllm.pipelines.engine.client import UserProcessors
from staticllm.pipelines.engine.output_queue import CompileTimes, Finished, OutputQueue, output_from_dict
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.profiling.stats import Stats
from staticllm.pipelines.profiling.trace import MAX_RECORDS, Trace
from staticllm.pipelines.remote.daemon_link import DaemonLink, check
from staticllm.threads import check_process, start_thread
from staticllm.wire.messages import LAST, MAX_FRAME, Kind, Message, ProtocolError

QUESTION = 1 << 62
"""Numbers from here on are those of questions; smaller ones are those of requests."""
GONE = "the daemon has gone: load the model again, which starts another one"


class RemoteEngine:
    """Submits requests to model ``handle`` of the daemon. One connection carries all of them; a thread reads it.

    Any thread may call the methods. A daemon that dies ends every request with a ``ClosedError``.
    """

    def __init__(self, link: DaemonLink, handle: int) -> None:
        self._link, self._handle = link, handle
        self._channel = link.connect()
        self._queues: dict[int, OutputQueue] = {}  # by the request's id
        self._left: dict[int, set[int]] = {}  # the answers of each that have not ended
        self._answers: dict[int, Future[Message]] = {}  # by the question's number
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._is_closed = self.has_own_tokenizer = False
        self._pid = os.getpid()
        self._thread = start_thread(self._read, "staticllm-remote")

    def submit(
        self, request: EngineRequest, queue: OutputQueue | None = None, processors: UserProcessors = ()
    ) -> OutputQueue:
        """Submit a request. Its outputs arrive in ``queue``, which is returned; None creates a new one.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting in the daemon's engine.
            ClosedError: the engine was closed, or the daemon has gone.
            GenerationConfigError: there are ``processors``, which cannot go to another process; or the grammar cannot be
                compiled, or has no answer that is short enough; or it needs another tokenizer than the daemon's.
        """
        if processors:
            raise GenerationConfigError(
                "a logits_processor cannot go to the daemon, which is another process: load the model without daemon=True"
            )
        if self.has_own_tokenizer and (request.grammar is not None or request.stop_strings):
            what = "a grammar" if request.grammar is not None else "stop_strings of beams"
            raise GenerationConfigError(
                f"{what} with tokenizer= and daemon=True: the daemon knows only the tokenizer in the model's directory; "
                "leave one of them out"
            )
        queue = queue or OutputQueue()
        with self._lock:
            self._queues[request.id] = queue
            self._left[request.id] = set(range(request.num_sequences))
        try:
            answer = self._ask(Message(Kind.SUBMIT, self._handle, request.id, body={"request": request.to_dict()}))
        except BaseException:
            self._forget(request.id)
            raise
        if (times := answer.body.get("grammar")) is not None:
            queue.compile_times = CompileTimes(**times)
        return queue

    def cancel(self, request: int, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers, before the next device call. Unknown and ended requests are ignored."""
        if os.getpid() != self._pid or request not in self._queues:
            return
        body = {"request": request, "index": index, "reason": str(reason)}
        with contextlib.suppress(ClosedError):  # then the request has ended
            self._ask(Message(Kind.CANCEL, self._handle, body=body))

    def check_process(self) -> None:
        """Check that this is the process that the engine belongs to.

        Raises:
            ClosedError: it is a forked child.
        """
        check_process(self._pid)

    def stats(self) -> Stats:
        """Return the statistics of the daemon's engine, over all programs that use it.

        Raises:
            ClosedError: the daemon has gone.
        """
        return Stats(**self._ask(Message(Kind.STATS, self._handle, body={"of": "engine"})).body)

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Raise an error: a recording holds the calls of all programs, and is made in the daemon.

        Raises:
            StaticLLMError: always.
        """
        raise StaticLLMError("the engine is in the daemon: staticllm daemon trace records its calls")

    def save_snapshot(
        self,
        tokens: list[int],
        path: str | os.PathLike[str],
        identity: Identity,
        key: bytes = b"",
        adapters: AdapterScales = (),
    ) -> int:
        """Save the keys and values of the longest cached prefix of ``tokens``. Return its number of tokens.

        Raises:
            SnapshotError: no cached sequence begins with these tokens, or the file cannot be written.
            ClosedError: the daemon has gone.
        """
        return self._snapshot("save", path, identity, key, adapters, tokens)

    def load_snapshot(
        self, path: str | os.PathLike[str], identity: Identity, key: bytes = b"", adapters: AdapterScales = ()
    ) -> int:
        """Let the daemon read a snapshot. Return its number of tokens.

        Raises:
            SnapshotError: the file is missing, damaged or of another model, or there is no room for its tokens.
            ClosedError: the daemon has gone.
        """
        return self._snapshot("load", path, identity, key, adapters, [])

    def close(self, drain: bool = False) -> None:
        """End this program's requests, or with ``drain`` wait for them, and give the model back. A second call does nothing."""
        if os.getpid() != self._pid:
            return
        if drain:
            self._drain()
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._channel.shut()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._channel.close()
        self._link.close()

    def _snapshot(
        self,
        action: str,
        path: str | os.PathLike[str],
        identity: Identity,
        key: bytes,
        adapters: AdapterScales,
        tokens: list[int],
    ) -> int:
        body = {
            "action": action, "path": str(Path(path).absolute()), "identity": dict(identity), "key": key.hex(),
            "adapters": adapters, "tokens": tokens,
        }  # fmt: skip
        return int(self._ask(Message(Kind.SNAPSHOT, self._handle, body=body)).body["tokens"])

    def _drain(self) -> None:
        with self._lock:
            queues = list(self._queues.values())
        ended = threading.Semaphore(0)
        for queue in queues:
            queue.add_listener(lambda output: ended.release() if isinstance(output, Finished) else None)
        while self._queues and self._thread.is_alive():
            ended.acquire(timeout=0.2)

    def _ask(self, message: Message) -> Message:
        """Send a question and wait for its answer, while outputs of requests go on.

        Raises:
            StaticLLMError: it was refused or failed.
        """
        self.check_process()
        future: Future[Message] = Future()
        with self._lock:
            if self._is_closed or not self._thread.is_alive():
                raise ClosedError("the pipeline is closed: load the model again" if self._is_closed else GONE)
            number = message.number or QUESTION + next(self._numbers)
            self._answers[number] = future
            message = Message(message.kind, message.handle, number, body=message.body)
            try:
                self._channel.send(message)
            except (OSError, ProtocolError) as error:
                del self._answers[number]
                if isinstance(error, OSError):
                    raise ClosedError(GONE) from error
                raise ConfigError(
                    f"a request of more than {MAX_FRAME} bytes cannot go to the daemon: shorten its prompt, grammar or lists of "
                    "tokens, or load without daemon=True"
                ) from None
        answer = future.result()
        check(answer)
        return answer

    def _read(self) -> None:
        """Read outputs and answers until the connection ends; then end everything that waits."""
        error: Exception = ClosedError(GONE)
        try:
            while True:
                self._take(self._channel.receive())
        except (EOFError, OSError):
            pass
        except (ProtocolError, KeyError, TypeError, ValueError) as damaged:
            error = as_ours(damaged)
        with self._lock:
            answers, queues, left = list(self._answers.values()), dict(self._queues), dict(self._left)
            for table in (self._answers, self._queues, self._left):
                table.clear()
        reason = FinishReason.CANCELLED if self._is_closed else FinishReason.ERROR
        for id, queue in queues.items():
            for index in left[id]:
                queue.put(Finished(reason, None if self._is_closed else error, index))
        for future in answers:
            future.set_exception(error)

    def _take(self, message: Message) -> None:
        if message.kind is not Kind.OUTPUT:
            with self._lock:
                future = self._answers.pop(message.number, None)
            if future is not None:
                future.set_result(message)
            return
        queue = self._queues.get(message.number)
        if queue is None:
            return
        for values in message.body["outputs"]:
            output = output_from_dict(values)
            if isinstance(output, Finished):
                self._left[message.number].discard(output.index)
            if message.flags & LAST and values is message.body["outputs"][-1]:
                self._forget(message.number)
            queue.put(output)

    def _forget(self, request: int) -> None:
        with self._lock:
            self._queues.pop(request, None)
            self._left.pop(request, None)
