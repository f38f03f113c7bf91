"""``StaticWhisperPipeline`` takes the place of ``openvino_genai.WhisperPipeline``, and serves many recordings at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.config import MAX_SEQS, Scheduler, StaticLLMConfig, whole
from staticllm.core import CrossWindows, OnProgress, ProgressEvent
from staticllm.errors import ConfigError, GenerationConfigError, shown
from staticllm.metrics import MICRO, RawPerfMetrics
from staticllm.model_dir import joins_tokens
from staticllm.system.load_progress import LoadProgress, check_receiver
from staticllm.system.threads import check_may_wait, close_when_collected

from .daemon_client.remote_engine import DaemonHome
from .daemon_client.remote_launch import RemoteSpeech, check_sendable, remote_launcher
from .engine.engine import Engine
from .engine.jobs import JobHost, checked_host
from .engine.request import check_priority
from .launch.arguments import Candidate, read_tokenizer, resolve_candidates
from .profiling.stats import Stats
from .scheduling.interface import Policy
from .scheduling.planner import make_policy
from .speech.audio import check_samples
from .speech.log_mel import read_mel_config
from .speech.results import (
    WhisperDecodedResults,
    WhisperPerfMetrics,
    WhisperRawPerfMetrics,
    chunks_of,
)
from .speech.speech_files import SpeechFiles, speech_files
from .speech.speech_jobs import take_fall_back, take_has_words, take_num_windows
from .speech.speech_model import SpeechModel, load_speech
from .speech.transcription import ParallelWindows, Timings, Transcriber
from .speech.transcription_handle import TranscriptionHandle
from .speech.transcription_watch import TranscriptionWatch, WindowHeard
from .speech.voice import voice_detector
from .speech.whisper_config import (
    WhisperGenerationConfig,
    WhisperOptions,
    alignment_heads,
    completed,
    copy_whisper_config,
    whisper_options,
)
from .speech.words import with_whole_characters
from .text.detokenizer import IncrementalDetokenizer
from .text.streamers import TokenSink, make_sink
from .text.tokenizer_tools import TokenizerTools

RawSpeech: TypeAlias = Sequence[float] | NDArray[Any]
Status = genai.StreamingStatus


class StaticWhisperPipeline:
    """Writes what is said in recordings, with a speech model as programs of fixed shape, for many recordings at once.

    Args:
        models_path: A directory exported by optimum-intel for ``automatic-speech-recognition-with-past``:
            ``openvino_encoder_model.xml``, ``openvino_decoder_model.xml`` with states, and the OpenVINO tokenizer.
        device: ``CPU`` (the default), ``NPU``, ``GPU`` … Of several (``NPU,CPU``) the first one that can run the model is used.
        config: A mapping of properties, or a ``StaticLLMConfig``.
        engine: The engine of another pipeline on the same device, of several the first one: ``engine=llm.engine``. Its scheduler
            then decides which pipeline uses the device next. None: the device is this pipeline's alone.
        on_progress: Called with a ``ProgressEvent`` after each part of loading; an exception in it aborts the loading.
        scheduler: Scheduling policy: a name, or an object with a method ``plan(view)`` (docs/scheduling.md).
        daemon: Whether the model runs in the daemon, which programs of this user share, or a ``DaemonHome`` (docs/daemon.md).
        properties: GenAI's and OpenVINO's properties; ``word_timestamps``, whether calls find the times of words by default;
            ``MAX_WINDOWS``: how many windows of 30 s, of one recording or of several, are decoded together (4); and
            ``TEMPERATURES``, ``COMPRESSION_RATIO_THRESHOLD``, ``LOGPROB_THRESHOLD`` and ``NO_SPEECH_THRESHOLD``, the options of
            calls that do not say them.

    Raises:
        ModelError: the directory is missing, half-written or not a speech model.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, or it refused a program.
        ConfigError: a property is unknown or has an impossible value, or ``engine`` is none.
        ClosedError: ``engine`` was closed.

    Any thread may call the methods. One thread owns the device and serves all recordings together; ``close`` ends it, and so
    does leaving a ``with`` block, deleting the pipeline or ending the process.
    """

    def __init__(
        self,
        models_path: str | bytes | os.PathLike[str],
        device: str = "CPU",
        *,
        config: Mapping[str, object] | StaticLLMConfig | None = None,
        engine: JobHost | None = None,
        on_progress: Callable[[ProgressEvent], None] | None = None,
        scheduler: Scheduler | Policy | None = None,
        daemon: bool | DaemonHome = False,
        **properties: object,
    ) -> None:
        begin = time.perf_counter()
        check_receiver(on_progress)
        host = None if engine is None else checked_host(engine)
        if daemon:
            check_sendable(scheduler)
            if host is not None:
                raise ConfigError("engine= and daemon=: the daemon's engine shares its device by itself; leave one out")
        given = dict(config) if isinstance(config, Mapping) else config
        num_windows = take_num_windows(properties, given)
        has_words = take_has_words(properties, given)
        fall_back = take_fall_back(properties, given)
        files = speech_files(models_path)
        candidates = resolve_candidates(device, given, properties)
        policy = make_policy(candidates[0].config.scheduler if scheduler is None else scheduler)
        mel = read_mel_config(files.directory)
        self._generation_config = WhisperGenerationConfig(files.file)
        self._generation_config.update_generation_config(**fall_back)
        if has_words:
            self._generation_config.word_timestamps = True  # as GenAI's constructor does
        tokenizer = read_tokenizer(files.directory)
        self._tools = TokenizerTools(tokenizer, joins_tokens(files.directory), "")
        heads = alignment_heads(self._generation_config) if has_words else ()
        self._heads = heads
        tell = LoadProgress(on_progress, num_loads=1 if daemon else 3 if heads else 2)
        if daemon:
            self._model = _in_daemon(daemon, files, candidates, RemoteSpeech(num_windows, heads), policy, tell)
        else:
            self._model = load_speech(files, candidates, num_windows, heads, policy, tell, host)
        close_when_collected(self, SpeechModel.close, self._model)
        self._mel = mel
        try:
            self._transcriber = Transcriber(self._model, mel, partial(_encode, self._tools), self._tools.decode)
        except BaseException:
            self._model.close()
            raise
        self._load_ms = (time.perf_counter() - begin) * 1e3

    @property
    def config(self) -> StaticLLMConfig:
        """The resolved configuration of the decoder."""
        return self._model.launched.config

    @property
    def engine(self) -> Engine:
        """The engine of the decoder; embedding pipelines may share its device (``engine=``).

        Raises:
            ConfigError: the engine is in the daemon.
        """
        if not isinstance(self._model.engine, Engine):
            raise ConfigError("the engine is in the daemon: other models of this program do not run on it")
        return self._model.engine

    @property
    def shared_engine(self) -> JobHost | None:
        """The engine of ``engine``; None if the pipeline has none."""
        engine = self._model.engine
        return engine.step_host.host if self._model.own_host is None and isinstance(engine, Engine) else None

    def generate(
        self,
        raw_speech_input: RawSpeech,
        generation_config: genai.WhisperGenerationConfig | Mapping[str, object] | None = None,
        streamer: Callable[[str], object] | genai.StreamerBase | None = None,
        *,
        priority: int = 0,
        parallel_windows: int | None = None,
        **kwargs: object,
    ) -> WhisperDecodedResults:
        """Write what is said in a recording.

        Args:
            raw_speech_input: Samples in [-1, 1], mono, at 16 kHz: ``[n]`` floats.
            generation_config: Replaces the pipeline's own for this call.
            streamer: A callable that takes text, or an ``openvino_genai.StreamerBase`` that takes lists of tokens, as they come.
                It runs in the calling thread; its exceptions reach the caller, and the pipeline stays usable.
            priority: Recordings with a higher priority are served first; those below 0 are proactive: nobody waits for them.
            parallel_windows: Cut the recording where there is silence, and transcribe this many of its windows together. None:
                each begins where the text of the one before it ended, as in GenAI.
            kwargs: Fields of ``WhisperGenerationConfig``, which override both configs.

        Raises:
            PromptError: the samples are empty, not finite, of more than one channel, or too many.
            GenerationConfigError: an option is unknown or has an impossible value.
            ConfigError: ``parallel_windows`` is no number from 1 to 64, or the package that finds silence is not installed.
            BusyError, ClosedError, DeviceError, NumericalError: as for ``StaticLLMPipeline.generate``.
        """
        check_may_wait()
        check_priority(priority)
        samples = check_samples(raw_speech_input)
        options = self._options(generation_config, kwargs)
        stream = _Stream(None if streamer is None else make_sink(streamer), self._tools.decode)
        parallel = _parallel(parallel_windows)
        found = self._run(samples, options, priority, TranscriptionWatch(stream.push), parallel)
        stream.end()
        return found

    def submit(
        self,
        raw_speech_input: RawSpeech,
        generation_config: genai.WhisperGenerationConfig | Mapping[str, object] | None = None,
        *,
        on_text: Callable[[str], object] | None = None,
        on_window: Callable[[WindowHeard], object] | None = None,
        priority: int = 0,
        parallel_windows: int | None = None,
        **kwargs: object,
    ) -> TranscriptionHandle:
        """Begin to write what is said in a recording, and return its handle.

        Args:
            raw_speech_input: As for ``generate``, like ``generation_config``, ``priority``, ``parallel_windows`` and ``kwargs``.
            on_text: Receives text as it is certain, on a thread of the transcription; an exception in it ends the transcription.
            on_window: Receives each window of the recording at its end, on the same thread.

        Raises:
            PromptError, GenerationConfigError, ConfigError: as for ``generate``; others come from the handle's ``result``.
        """
        check_priority(priority)
        _check_callable("on_text", on_text, "a str")
        _check_callable("on_window", on_window, "a WindowHeard")
        samples = check_samples(raw_speech_input)
        if samples is raw_speech_input or samples.base is not None:
            samples = samples.copy()  # the caller's buffer may get its next sound before this one was read
        options = self._options(generation_config, kwargs)
        stream = _Stream(None if on_text is None else make_sink(lambda text: _told(on_text, text)), self._tools.decode)
        watch = TranscriptionWatch(stream.push, (lambda window: None) if on_window is None else on_window)
        parallel = _parallel(parallel_windows)

        def run() -> WhisperDecodedResults:
            found = self._run(samples, options, priority, watch, parallel)
            stream.end()
            return found

        return TranscriptionHandle(run, watch.cancellation)

    def _run(
        self,
        samples: NDArray[np.float32],
        options: WhisperOptions,
        priority: int,
        watch: TranscriptionWatch,
        parallel: ParallelWindows | None,
    ) -> WhisperDecodedResults:
        begin = time.perf_counter()
        found = self._transcriber.transcribe(samples, options, priority, watch, parallel)
        decode = self._tools.decode
        clock = time.perf_counter()
        text = decode(found.tokens)
        chunks = chunks_of(found.segments, decode) if options.return_timestamps else None
        found.timings.text = time.perf_counter() - clock
        return WhisperDecodedResults(
            texts=[text],
            scores=[1.0],
            language=found.language,
            chunks=chunks,
            words=with_whole_characters(found.words, decode) if options.word_timestamps else None,
            perf_metrics=_metrics_of(found.timings, len(found.tokens), begin, self._load_ms),
        )

    __call__ = generate

    def get_generation_config(self) -> WhisperGenerationConfig:
        """Return a copy of the options that calls start from."""
        return copy_whisper_config(self._generation_config)

    def set_generation_config(self, config: genai.WhisperGenerationConfig) -> None:
        """Replace the options that calls start from.

        Raises:
            GenerationConfigError: ``config`` is something else, or has an impossible value.
        """
        if not isinstance(config, genai.WhisperGenerationConfig):
            raise GenerationConfigError(f"config is a {type(config).__name__}: must be a WhisperGenerationConfig")
        own = completed(config, self._generation_config)
        own.validate()
        self._generation_config = own

    @property
    def num_windows(self) -> int:
        """The windows, of one recording or of several, that are decoded together."""
        windows = self.config.cross_windows
        assert windows is not None, "load_speech sets them"
        return windows.num_cross_windows

    @property
    def has_words(self) -> bool:
        """Whether the pipeline was loaded with ``word_timestamps=True``, so that calls may ask for the times of words."""
        return self._model.has_alignment

    @property
    def sampling_rate(self) -> int:
        """Samples per second that the model takes."""
        return self._mel.sampling_rate

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tools.decode(list(tokens))

    def get_tokenizer(self) -> genai.Tokenizer:
        """Return the tokenizer."""
        return self._tools.tokenizer

    def stats(self) -> Stats:
        """Return statistics of all windows and calls since the pipeline was made."""
        return self._model.engine.stats()

    def close(self) -> None:
        """End all transcriptions, and release the device. A second call does nothing."""
        self._model.close()

    def __enter__(self) -> StaticWhisperPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _options(self, config: object, kwargs: Mapping[str, object]) -> WhisperOptions:
        base = self._generation_config
        given = kwargs
        if isinstance(config, Mapping):
            given = {**config, **kwargs}
        elif isinstance(config, genai.WhisperGenerationConfig):
            base = completed(config, self._generation_config)
        elif config is not None:
            raise GenerationConfigError(
                f"generation_config is a {type(config).__name__}: must be a WhisperGenerationConfig or a dict"
            )
        options = whisper_options(base, given)
        options.check_ids(self._model.launched.vocab_size)
        if options.word_timestamps and not self.has_words:
            raise GenerationConfigError(
                "word_timestamps=True for a pipeline that was loaded without: give the constructor word_timestamps=True"
            )
        if options.word_timestamps and options.alignment_heads != self._heads:
            raise GenerationConfigError(
                f"alignment_heads={shown(options.alignment_heads)}: the pipeline was loaded with those of the model's "
                "generation_config.json; change them there"
            )
        own = options.generation
        return replace(options, generation=replace(own, sampling=self._tools.word_tokens.complete(own)))


def _encode(tools: TokenizerTools, text: str) -> list[int]:
    return [int(token) for token in tools.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]]


def _in_daemon(
    daemon: bool | DaemonHome,
    files: SpeechFiles,
    candidates: Sequence[Candidate],
    speech: RemoteSpeech,
    policy: Policy,
    on_progress: OnProgress,
) -> SpeechModel:
    """Return a speech model of a daemon, which computes everything but features and text. Raises as ``remote_launcher``."""
    launched = remote_launcher(daemon, speech=speech)(files.directory, candidates, policy, on_progress)
    spec = CrossWindows(files.decoder, files.cross_window_len, speech.num_windows)
    launched = replace(launched, config=replace(launched.config, cross_windows=spec))
    windows = launched.engine.windows
    return SpeechModel(files, launched, windows, launched.features_shape, windows if speech.heads else None)


def _parallel(count: int | None) -> ParallelWindows | None:
    """Return how a recording is cut for an option of a call. Raises ``ConfigError``."""
    if count is None:
        return None
    return ParallelWindows(whole("parallel_windows", count, 1, MAX_SEQS), voice_detector())


def _check_callable(name: str, function: object, of: str) -> None:
    if function is not None and not callable(function):
        raise GenerationConfigError(f"{name}={shown(function)}: must be a function of {of}, or None")


def _told(function: Callable[[str], object], text: str) -> None:
    function(text)


class _Stream:
    """Passes tokens, and the text that they add, to the streamer of a call, if there is one."""

    def __init__(self, sink: TokenSink | None, decode: Callable[[list[int]], str]) -> None:
        self._sink = sink
        self._text = IncrementalDetokenizer(decode)

    def push(self, tokens: Sequence[int]) -> bool:
        """Take tokens, and return whether to go on."""
        if self._sink is None:
            return True
        text = "".join([self._text.push(token) for token in tokens]) if self._sink.takes_text else ""
        return bool(self._sink.write(list(tokens), text) == Status.RUNNING)

    def end(self) -> None:
        if self._sink is not None:
            if self._sink.takes_text and (rest := self._text.finish()):
                self._sink.write([], rest)
            self._sink.end()


def _metrics_of(timings: Timings, num_tokens: int, begin: float, load_ms: float) -> WhisperPerfMetrics:
    """Return the timings of a transcription that began at a moment of ``time.perf_counter`` and ends now."""
    us = MICRO
    times = timings.token_times
    raw = RawPerfMetrics(
        generate_durations=[(time.perf_counter() - begin) * us],
        m_times_to_first_token=[(times[0] - begin) * us] if times else [],
        m_durations=[(after - before) * us for before, after in pairwise(times)],
        m_new_token_times=[moment * 1e3 for moment in times],
        m_batch_sizes=[1] * len(times),
        token_infer_durations=[seconds * us for seconds in timings.decode],
        inference_durations=[(sum(timings.decode) + sum(timings.encode)) * us],
        sampling_durations=[seconds * us for seconds in timings.sampling],
        tokenization_durations=[0.0],  # prompts are tokens
        detokenization_durations=[timings.text * us],
    )
    own = WhisperRawPerfMetrics(
        features_extraction_durations=[timings.features * us],
        word_level_timestamps_processing_durations=[timings.words * us],
        encode_inference_durations=[seconds * us for seconds in timings.encode],
        decode_inference_durations=[seconds * us for seconds in timings.decode],
    )
    metrics = WhisperPerfMetrics(load_ms, raw, own)
    metrics.count(0, num_tokens, 0)
    return metrics
