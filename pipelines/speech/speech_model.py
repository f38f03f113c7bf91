"""A speech model on a device: an engine of its decoder, whose jobs are windows for its encoder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import (
    AlignmentShape,
    CrossWindowShape,
    CrossWindowVariant,
    FinishReason,
    OnProgress,
    ProgressEvent,
)
from staticllm.errors import DeviceError, ModelError, pipeline_closed

from ..engine.client import EngineClient, UserProcessors
from ..engine.job_engine import JobEngine
from ..engine.jobs import JobHost
from ..engine.request import EngineRequest, Finished, TokenOutput
from ..engine.window_jobs import AlignmentJobs, WindowJobs
from ..launch.arguments import Candidate
from ..launch.engine import Launched, launch
from ..loading.kind import Loaded
from ..loading.load import load_job
from ..programs.window_runner import AlignmentRunner, WindowRunner
from ..scheduling.interface import OWN_BOUND, Policy, TokenBound
from .speech_files import SpeechFiles
from .speech_jobs import Heads, speech_jobs
from .transcription_watch import Cancellation

LoadedAlignment: TypeAlias = Loaded[CrossWindowVariant, AlignmentShape, AlignmentRunner]
LoadedEncoder: TypeAlias = Loaded[CrossWindowVariant, CrossWindowShape, WindowRunner]


@dataclass(frozen=True)
class Chosen:
    """One token that was chosen, its log-probability, the moment of the choice, and the seconds of device and of choosing."""

    id: int
    logprob: float
    time: float
    device_seconds: float
    sampling_seconds: float


class WindowEncoder(Protocol):
    """Encodes windows: ``WindowJobs``, or a daemon for this program."""

    @property
    def seconds(self) -> float:
        """The seconds of device time that a window takes."""
        ...

    def encode(self, features: NDArray[np.float32], priority: int = 0) -> Future[int]:
        """Return the future number of a window, ``features [bands, columns]``; ``remove`` must follow once it is there."""
        ...

    def remove(self, window: int) -> None:
        """Give the place of a window to the next one, once the requests that see it have ended."""
        ...


class Alignments(Protocol):
    """Finds what texts look at: ``AlignmentJobs``, or a daemon for this program."""

    def align(self, window: int, tokens: Sequence[int], priority: int = 0) -> Future[NDArray[np.float32]]:
        """Return the future weights ``[heads, tokens, cross_window_len]`` of a text about a window that was encoded."""
        ...


class LaunchedDecoder(Protocol):
    """The decoder of a speech model, in this process or in a daemon: ``Launched``, ``RemoteLaunched``."""

    @property
    def engine(self) -> EngineClient: ...

    @property
    def config(self) -> StaticLLMConfig: ...

    @property
    def vocab_size(self) -> int: ...

    def close(self, drain: bool = False) -> None:
        """End the engine. A second call does nothing."""
        ...


class Window:
    """A window that was encoded: requests of the engine see it until ``SpeechModel.encode`` ends."""

    def __init__(
        self,
        engine: EngineClient,
        window: int,
        seconds: float,
        cancellation: Cancellation,
        alignment: Alignments | None = None,
    ) -> None:
        self._engine = engine
        self._window = window
        self._cancellation = cancellation
        self._alignment = alignment
        self.encode_seconds = seconds

    def align(self, tokens: Sequence[int], priority: int = 0) -> NDArray[np.float32]:
        """Return which frames a text looks at: the weights ``[heads, tokens, cross_window_len]`` of the alignment heads.

        Raises:
            ClosedError: the pipeline was closed.
            DeviceError: a call failed.
            CancelledError: it was cancelled.
        """
        assert self._alignment is not None, "loaded without alignment heads"
        found = self._alignment.align(self._window, tokens, priority)
        with self._cancellation.ending(found.cancel):
            return found.result()

    def generate(self, request: EngineRequest, processors: UserProcessors = ()) -> Iterator[Chosen]:
        """Yield the tokens of a request about this window. Leaving the iteration cancels the request; a cancellation ends it.

        ``processors`` are the logits processors that the user made.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the pipeline was closed.
            StaticLLMError: what ended the request.
        """
        request = replace(request, cross_window=self._window)
        queue = self._engine.submit(request, processors=processors)
        has_ended = False
        try:
            with self._cancellation.ending(lambda: self._engine.cancel(request.id)):
                while True:
                    output = queue.get()
                    if isinstance(output, Finished):
                        has_ended = True
                        if output.error is not None:
                            raise output.error
                        if output.reason is FinishReason.CANCELLED:
                            self._cancellation.check()
                            raise pipeline_closed()  # no half text: nobody else ends the request
                        return
                    if isinstance(output, TokenOutput):
                        seconds = output.device_seconds, output.sampling_seconds
                        yield Chosen(output.id, output.logprob, output.time, *seconds)
        finally:
            if not has_ended:
                self._engine.cancel(request.id)


class SpeechModel:
    """The loaded programs of a speech model. Any thread may call ``encode``; the engine serves all windows together.

    ``own_host``: the host of the engine that is closed with it; None if others own the host. ``on_close`` is called first when it
    is closed.
    """

    def __init__(
        self,
        files: SpeechFiles,
        launched: LaunchedDecoder,
        windows: WindowEncoder,
        features_shape: tuple[int, int],
        alignment: Alignments | None = None,
        own_host: JobEngine | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        """``features_shape``: bands and columns of a window. ``alignment``: None if no words are wanted."""
        self.files = files
        self.launched = launched
        self.features_shape = features_shape
        self.own_host = own_host
        self.windows = windows
        self.alignment = alignment
        self._on_close = on_close

    @property
    def has_alignment(self) -> bool:
        """Whether windows can ``align``."""
        return self.alignment is not None

    @property
    def engine(self) -> EngineClient:
        return self.launched.engine

    @contextmanager
    def encode(
        self,
        features: NDArray[np.float32],
        priority: int = 0,
        cancellation: Cancellation | None = None,
    ) -> Iterator[Window]:
        """Let the device encode a window, ``[bands, columns]``, for the time of a block.

        ``cancellation`` ends the wait for the device, and requests about the window.

        Raises:
            ClosedError: the pipeline was closed.
            DeviceError: a call failed.
            NumericalError: the window cannot be encoded.
            CancelledError: it was cancelled.
        """
        cancellation = cancellation or Cancellation()
        encoded = self.windows.encode(features, priority)
        window = None
        try:
            with cancellation.ending(encoded.cancel):
                window = encoded.result()
            yield Window(self.engine, window, self.windows.seconds, cancellation, self.alignment)
        finally:
            if window is None and not encoded.cancel():
                encoded.add_done_callback(lambda future: remove_late(self.windows, future))
            elif window is not None:
                self.windows.remove(window)

    def close(self) -> None:
        """End all windows, and release the device. A second call does nothing."""
        self._on_close()
        self._on_close = lambda: None  # it held programs
        self.launched.close()
        if self.own_host is not None:
            self.own_host.close()


def remove_late(windows: WindowEncoder, encoded: Future[int]) -> None:
    """Remove a window that has been encoded, or could not be, although it was given up."""
    if not encoded.cancelled() and encoded.exception() is None:
        windows.remove(encoded.result())


def load_speech(
    files: SpeechFiles,
    candidates: Sequence[Candidate],
    num_windows: int,
    heads: Heads,
    policy: Policy,
    on_progress: OnProgress,
    host: JobHost | None = None,
    shared_bound: TokenBound | None = None,
) -> SpeechModel:
    """Load a speech model for the first device that can run it; a device that refuses is reported to ``on_progress``.

    Args:
        files, candidates, policy, on_progress: As for ``launch``.
        num_windows: The windows that are decoded together.
        heads: Layer and head of the attentions that align text and speech; none if no words are wanted.
        host: The engine that owns the first of the devices; None for an engine for jobs alone, as on any other device.
        shared_bound: The bound between two tokens of an engine that shares its device with those of other models, which
            it takes turns with; None if it does not.

    Raises:
        StaticLLMError: as for ``StaticWhisperPipeline``.
    """
    for index, candidate in enumerate(candidates, 1):
        try:
            own = host if index == 1 else None
            return _load_for(files, candidate, num_windows, heads, policy, on_progress, own, shared_bound)
        except DeviceError as error:
            if index == len(candidates):
                raise
            message = f"{error}; trying {candidates[index].device}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            on_progress(ProgressEvent("fallback", index, len(candidates), 0.0, message=message))
    raise DeviceError("no device was given: name one, or several with commas")


def _load_for(
    files: SpeechFiles,
    candidate: Candidate,
    num_windows: int,
    heads: Heads,
    policy: Policy,
    on_progress: OnProgress,
    host: JobHost | None,
    shared_bound: TokenBound | None,
) -> SpeechModel:
    shares = host is not None or shared_bound is not None
    jobs = speech_jobs(files, candidate, num_windows, heads, on_progress, shares_engine=shares)
    encoder: LoadedEncoder = load_job(jobs.encoder)
    alignment: LoadedAlignment | None = None
    own_host = None if shares else JobEngine()  # the windows that wait are encoded first, and then decoded together
    try:
        if encoder.programs.shape.cross_window_len != files.cross_window_len:
            raise ModelError(
                f"config.json says max_source_positions={files.cross_window_len}, the encoder computes "
                f"{encoder.programs.shape.cross_window_len} frames: they are of different models"
            )
        if jobs.alignment is not None:
            alignment = load_job(jobs.alignment)
        bound = shared_bound or OWN_BOUND
        launched = launch(
            files.directory, [jobs.decoder], policy, on_progress, token_bound=bound, host=own_host or host
        )
    except BaseException:
        if own_host is not None:
            own_host.close()
        encoder.runner.close()
        if alignment is not None:
            alignment.runner.close()
        raise
    return _serving(files, launched, encoder, alignment, own_host)


def _serving(
    files: SpeechFiles,
    launched: Launched,
    encoder: LoadedEncoder,
    alignment: LoadedAlignment | None,
    own_host: JobEngine | None,
) -> SpeechModel:
    """Return the loaded programs as a model, whose encoder and alignment are jobs of the decoder's engine."""
    windows = WindowJobs(encoder.runner, launched.engine)
    launched.engine.add_jobs(windows)
    texts = None
    if alignment is not None:
        texts = AlignmentJobs(alignment.runner, launched.engine)
        launched.engine.add_jobs(texts)
    shape = encoder.programs.shape
    return SpeechModel(files, launched, windows, (shape.bands, shape.columns), texts, own_host, encoder.keep_costs)
