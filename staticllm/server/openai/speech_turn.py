"""One recording on a speech model: it waits for its turn, is read, transcribed, and given up if its client goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import IO, Any, cast

from starlette.datastructures import UploadFile

from staticllm.errors import ClosedError, ConfigError
from staticllm.pipelines.scheduling.interface import PROACTIVE_PRIORITY
from staticllm.pipelines.speech.audio_stream import read_cancellable
from staticllm.pipelines.speech.log_mel import Samples
from staticllm.pipelines.speech.results import WhisperDecodedResults, later
from staticllm.pipelines.speech.transcription_handle import TranscriptionHandle
from staticllm.pipelines.speech.transcription_watch import Cancellation, WindowHeard
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import SERVER, ApiError
from staticllm.server.models.admission import Admission
from staticllm.server.models.served import ServedModel
from staticllm.server.telemetry import current_record


@dataclass(frozen=True)
class Heard:
    """A transcription that has ended, with the times of its file: its results, its windows in their order, the seconds of sound,
    and the second at which it ends."""

    results: WhisperDecodedResults
    windows: tuple[WindowHeard, ...]
    seconds: float
    end: float


class SpeechTurn:
    """The turn of one recording. ``begin``, ``read``, ``submit`` and ``heard`` follow each other; ``close`` in any case.

    Samples are only in memory for recordings that have their turn; the others wait as files.
    """

    def __init__(self, call: ApiCall, model: ServedModel, is_proactive: bool) -> None:
        self._call = call
        self._state = call.state
        self._model = model
        self._is_proactive = is_proactive
        self._is_acquired = False
        self._admission: Admission | None = None
        self._begin = time.perf_counter()
        self._timer = call.state.metrics.timer(model.spec.name)
        self._cancellation = Cancellation()
        self._samples: Samples | None = None
        self._seconds = 0.0
        self._start = 0.0
        self._handle: TranscriptionHandle | None = None
        self._windows: list[WindowHeard] = []
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()

    async def begin(self) -> None:
        """Load the model if necessary, and wait for the turn.

        Raises:
            ApiError: too many requests wait.
            StaticLLMError: the model cannot be loaded.
        """
        name = self._model.spec.name
        await self._state.hub.acquire(self._model)
        self._is_acquired = True
        admission = self._model.admission_of(self._is_proactive)
        await admission.enter(self._call.client)
        self._admission = admission
        now = time.perf_counter()
        self._state.metrics.queue_time.labels(name).observe(now - self._begin)
        self._state.metrics.running.labels(name).inc()
        self._begin = now

    async def read(self, file: UploadFile) -> None:
        """Read the file in a thread.

        Raises:
            PromptError: it is no recording, damaged or too long.
            ApiError: a package is missing (501).
        """
        content = cast(IO[bytes], file.file)
        limit = self._state.settings.max_audio
        try:
            recording = await self._state.workers.run(
                lambda: read_cancellable(content, self._cancellation, limit), owner=self._model.spec.name
            )
        except ConfigError as error:
            raise ApiError(501, str(error), kind=SERVER, code="not_installed") from None
        except asyncio.CancelledError:
            self._cancellation.cancel()
            raise
        self._samples = recording.samples
        self._start = recording.start
        self._seconds = len(recording.samples) / self._model.speech.sampling_rate

    async def submit(self, options: Mapping[str, Any]) -> None:
        """Begin to transcribe.

        Raises:
            StaticLLMError: an option is impossible.
        """
        samples = self._samples
        assert samples is not None, "read was not called"
        self._samples = None
        loop = asyncio.get_running_loop()
        priority = PROACTIVE_PRIORITY if self._is_proactive else 0

        def on_text(text: str) -> None:
            loop.call_soon_threadsafe(self._note_text, text)

        def submit() -> TranscriptionHandle:
            return self._model.speech.submit(
                samples, on_text=on_text, on_window=self._windows.append, priority=priority, **options
            )

        handle = await self._state.workers.run(submit, TranscriptionHandle.cancel)
        self._handle = handle
        self._state.lifecycle.add(handle)
        handle.future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._texts.put_nowait, None))

    def _note_text(self, text: str) -> None:
        self._timer.begin()
        self._texts.put_nowait(text)

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield text as it is certain, until the end of the transcription."""
        while (text := await self._texts.get()) is not None:
            current_record().note_token()
            yield text

    async def heard(self) -> Heard:
        """Return the transcription at its end.

        Raises:
            StaticLLMError: it failed, or the server is stopping.
        """
        assert self._handle is not None, "submit was not called"
        try:
            results = await self._handle
        except CancelledError:
            raise ClosedError("the server is stopping") from None
        name = self._model.spec.name
        metrics = self._state.metrics
        num_tokens = results.perf_metrics.get_num_generated_tokens()
        metrics.audio_seconds.labels(name).inc(self._seconds)
        metrics.output_tokens.labels(name).inc(num_tokens)
        current_record().output_tokens += num_tokens
        windows = tuple(window.later(self._start) for window in self._windows)
        end = max(0.0, self._start + self._seconds)
        return Heard(later(results, self._start), windows, self._seconds, end)

    async def close(self) -> None:
        """Give up what still runs, and return the turn once its thread has ended. A second call does nothing."""
        self._cancellation.cancel()
        handle = self._handle
        admission = self._admission
        self._handle = None
        self._admission = None
        try:
            if handle is not None:
                handle.cancel()
                self._state.lifecycle.remove(handle)
                with contextlib.suppress(Exception):  # nobody reads it any more
                    await handle
        finally:
            self._samples = None
            if admission is not None:
                self._leave(admission)
            if self._is_acquired:
                self._is_acquired = False
                self._state.hub.release(self._model)

    def _leave(self, admission: Admission) -> None:
        """Return the place. The device time of a recording is not told: as if all that ran had had the same."""
        seconds = time.perf_counter() - self._begin
        admission.shares.charge(self._call.client, seconds / max(1, admission.num_running))
        admission.leave(self._call.client)
        self._state.metrics.running.labels(self._model.spec.name).dec()
