"""Transcribes one recording: window after window is encoded, decoded by Whisper's rules, and cut into segments."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ModelError
from staticllm.system.threads import ThreadPool

from ..engine.request import EngineRequest
from ..generation.logits_processors import copies_for
from ..generation.options.resolve import GenerationOptions
from ..generation.options.table import SamplingParams
from ..generation.speech_rules import SpeechRules
from .fall_back import DecodedWindow, FallBackVerdict, best_of, may_be_silent, options_at, verdict
from .log_mel import MelConfig, log_mel, window_of
from .results import WhisperWordTiming
from .segments import SpeechSegment, WindowSegments, WindowTimes, segments_of
from .speech_model import Chosen, SpeechModel, Window
from .transcription_watch import Cancellation, TranscriptionWatch, WindowHeard
from .voice import Detector, Interval, windows_as_found
from .whisper_config import WhisperOptions
from .whisper_prompt import (
    NO_LANGUAGE,
    ContextTokens,
    WindowPrompt,
    context_tokens,
    start_tokens,
    window_prompt,
)
from .whisper_rules import language_of, language_rules, no_speech_rules, whisper_rules
from .window_end import StopStrings
from .words import alignment_tokens, text_tokens_of, token_starts, words_of


@dataclass
class Timings:
    """Seconds that the parts of a transcription took."""

    features: float = 0.0
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    words: float = 0.0
    text: float = 0.0

    def add(self, later: Timings) -> None:
        """Add those of a later part of the recording."""
        self.features += later.features
        self.encode += later.encode
        self.decode += later.decode
        self.sampling += later.sampling
        self.token_times += later.token_times
        self.words += later.words


@dataclass
class Transcript:
    """What was said: the language, the tokens of the text, its segments and words."""

    language: str = NO_LANGUAGE
    tokens: list[int] = field(default_factory=list)
    segments: list[SpeechSegment] = field(default_factory=list)
    words: list[WhisperWordTiming] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    is_cancelled: bool = False

    def add(self, later: Transcript) -> None:
        """Add what was said in a later part of the recording."""
        self.tokens += later.tokens
        self.segments += later.segments
        self.words += later.words
        self.timings.add(later.timings)
        self.is_cancelled = self.is_cancelled or later.is_cancelled


@dataclass(frozen=True)
class ParallelWindows:
    """That a recording is cut at silences, which ``detect`` finds, and that ``count`` of its parts are transcribed together."""

    count: int
    detect: Detector


@dataclass(frozen=True)
class _Run:
    """One transcription, or a part of it: what was asked for, who follows it, the text before windows, and what was found.

    It begins at frame ``start`` of the recording, and ends before frame ``end``, after ``seconds``.
    """

    options: WhisperOptions
    has_timestamps: bool
    priority: int
    watch: TranscriptionWatch
    context: ContextTokens
    start: int
    end: int
    seconds: float
    found: Transcript
    stops: StopStrings
    is_first: bool = True
    """Whether it has the first window of the recording."""

    def is_certain(self, no_speech: float | None) -> bool:
        """Return whether the text of a window is kept whatever it is, so that its tokens can be told as they are chosen."""
        params = self.options.fall_back
        return not self.has_timestamps and len(params.temperatures) == 1 and not may_be_silent(no_speech, params)


@dataclass(frozen=True)
class _TranscribedPart:
    """What was said in a part of a recording, and its windows."""

    found: Transcript
    windows: list[WindowHeard]


def _tell(part: _TranscribedPart, run: _Run) -> None:
    """Add a part to the transcription of the whole, and tell its caller."""
    run.found.add(part.found)
    if part.found.tokens and not run.watch.on_tokens(part.found.tokens):
        run.found.is_cancelled = True
    for window in part.windows:
        run.watch.on_window(window)


class Transcriber:
    """Transcribes recordings with one speech model. Any thread may call ``transcribe``; recordings share the device."""

    def __init__(
        self,
        model: SpeechModel,
        mel: MelConfig,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._model = model
        self._mel = mel
        self._encode = encode
        self._decode_text = decode
        bands, columns = model.features_shape
        if (bands, columns) != (mel.feature_size, mel.window_frames):
            raise ModelError(
                f"the encoder takes windows of {bands} bands and {columns} frames, the model's files describe "
                f"{mel.feature_size} and {mel.window_frames}: export the model again"
            )

    def transcribe(
        self,
        samples: NDArray[np.float32],
        options: WhisperOptions,
        priority: int,
        watch: TranscriptionWatch,
        parallel: ParallelWindows | None = None,
    ) -> Transcript:
        """Return what is said in a recording, ``[n]`` samples in [-1, 1] at the model's rate.

        A recording of more than one window always gets timestamps, because they say where the next window begins. Of one that was
        cancelled, what was transcribed so far is returned. With ``parallel``, windows begin where there is silence, and are
        transcribed together; without it, each begins where the one before it ended.

        Raises:
            ClosedError: the pipeline was closed.
            DeviceError: a call failed.
            NumericalError: a window has infinite values or no numbers.
            BusyError: ``MAX_WAITING`` requests are waiting.
        """
        found = Transcript()
        begin = time.perf_counter()
        try:
            features = log_mel(samples, self._mel, watch.cancellation.check)
        except CancelledError:
            found.is_cancelled = True
            return found
        found.timings.features = time.perf_counter() - begin
        is_long = len(samples) > self._mel.window_samples
        has_timestamps = is_long or options.return_timestamps
        seconds = len(samples) / self._mel.sampling_rate
        end = self._end_frame(features.shape[1], len(samples), options)
        context = context_tokens(options, self._encode)
        own = options.generation
        stops = StopStrings(own.stop_strings, own.include_stop_str_in_output, self._encode, self._decode_text)
        run = _Run(options, has_timestamps, priority, watch, context, 0, end, seconds, found, stops)
        found.language = options.language or NO_LANGUAGE
        if parallel is None:
            return self._transcribe(features, run)
        parts = windows_as_found(samples, parallel.detect, self._mel.window_samples, watch.cancellation.check)
        try:
            self._transcribe_together(features, run, parts, parallel.count)
        except CancelledError:
            if not watch.cancellation.is_cancelled:  # a function of the caller raised it
                raise
            found.is_cancelled = True
        return found

    def _end_frame(self, num_frames: int, num_samples: int, options: WhisperOptions) -> int:
        """Return the frame before which the recording ends. The model encodes zeros after it.

        Where silence is to be found, it is treated as by openai-whisper and faster-whisper, for which the thresholds were chosen:
        zeros follow its last frame. Else, as by GenAI and transformers, silence follows a recording of less than a window.
        """
        end = -(-num_samples // self._mel.hop_length) if options.fall_back.finds_silence else num_frames
        return max(1, min(end, num_frames))

    def _transcribe(self, features: NDArray[np.float32], run: _Run) -> Transcript:
        """Add what is said from the start of a run to its end, window after window, and return what was found."""
        start = run.start
        while start < run.end and not run.found.is_cancelled:
            window = window_of(features[:, : run.end], start, self._mel.window_frames)
            try:
                start += self._window(window, start, run)
            except CancelledError:
                if not run.watch.cancellation.is_cancelled:  # a function of the caller raised it
                    raise
                run.found.is_cancelled = True
        return run.found

    def _transcribe_together(
        self, features: NDArray[np.float32], run: _Run, parts: Iterable[Interval], count: int
    ) -> None:
        """Add what is said in parts of a recording, of which ``count`` are transcribed together. They are told in their order.

        The first ones are transcribed while later ones are looked for. The first one finds the language, if it is not given. An
        error in one of them ends the others.
        """
        cancellation = Cancellation()
        futures = deque[Future[_TranscribedPart]]()  # of the parts that are not told yet
        with (
            ThreadPool(count, "staticllm-window") as pool,
            run.watch.cancellation.ending(cancellation.cancel),
        ):
            try:
                for index, part in enumerate(parts):
                    futures.append(pool.submit(self._transcribe_part, features, run, part, cancellation, index == 0))
                    if index == 0 and run.options.language is None and run.options.tokens.is_multilingual:
                        run.found.language = futures[0].result().found.language
                    while futures and futures[0].done() and not run.found.is_cancelled:
                        _tell(futures.popleft().result(), run)
                    if run.found.is_cancelled:
                        break
                while futures and not run.found.is_cancelled:
                    _tell(futures.popleft().result(), run)
            finally:
                cancellation.cancel()
                for future in futures:
                    future.cancel()

    def _transcribe_part(
        self, features: NDArray[np.float32], run: _Run, part: Interval, cancellation: Cancellation, is_first: bool
    ) -> _TranscribedPart:
        """Return what is said in a part of a recording."""
        windows: list[WindowHeard] = []
        watch = TranscriptionWatch(on_window=windows.append, cancellation=cancellation)
        start = part.start // self._mel.hop_length
        end = max(start + 1, part.end // self._mel.hop_length)
        seconds = part.end / self._mel.sampling_rate
        found = Transcript(run.found.language)
        own = replace(run, watch=watch, start=start, end=end, seconds=seconds, is_first=is_first, found=found)
        return _TranscribedPart(self._transcribe(features, own), windows)

    def _window(self, features: NDArray[np.float32], start: int, run: _Run) -> int:
        """Add the text of the window that begins at frame ``start``, and return the frames to the next one."""
        found = run.found
        options = run.options
        watch = run.watch
        with self._model.encode(features, run.priority, cancellation=watch.cancellation) as window:
            found.timings.encode.append(window.encode_seconds)
            is_first = run.is_first and start == run.start
            if is_first and options.language is None:
                found.language = self._language(window, options, run)
            prompt = window_prompt(
                run.context, options, found.language, is_first, run.has_timestamps, self._model.files.max_positions
            )
            decoded = self._decode_well(window, prompt, run)
            kept = self._kept(decoded.tokens, start, run)
            if options.word_timestamps:
                self._find_words(window, kept, start, run)
        found.segments += kept.segments
        found.tokens += kept.text
        untold = kept.text[decoded.num_told :]
        if untold and not found.is_cancelled and not watch.on_tokens(untold):
            found.is_cancelled = True
        watch.on_window(
            WindowHeard(
                seconds=self._end_of(kept, start, run),
                start=start / self._mel.frames_per_second,
                segments=kept.segments,
                avg_logprob=decoded.mean_log_probability,
                temperature=decoded.temperature,
                no_speech_prob=decoded.no_speech,
            )
        )
        return kept.advance

    def _kept(self, tokens: Sequence[int], start: int, run: _Run) -> WindowSegments:
        """Return what is kept of the tokens of the window that begins at frame ``start``."""
        own = run.options.tokens
        if not run.has_timestamps:
            return WindowSegments(advance=run.end - start, text=tuple(text_tokens_of(tokens, own)))
        times = WindowTimes.of(own, self._mel, self._model.files.cross_window_len)
        return segments_of(tokens, times, start / self._mel.frames_per_second, run.seconds)

    def _end_of(self, kept: WindowSegments, start: int, run: _Run) -> float:
        """Return the second of the recording at which a window ends that begins at frame ``start``."""
        return min((start + kept.advance) / self._mel.frames_per_second, run.seconds)

    def _language(self, window: Window, options: WhisperOptions, run: _Run) -> str:
        if not options.tokens.is_multilingual:
            return NO_LANGUAGE
        tokens = options.tokens
        return language_of(self._first(window, (tokens.decoder_start,), language_rules(tokens), run).id, tokens)

    def _find_words(self, window: Window, kept: WindowSegments, start: int, run: _Run) -> None:
        """Add the words of the window that begins at frame ``start``: those of its text, as openai-whisper (GenAI also has those
        of the text that the next window says again). Frames after the end of the recording are not looked at.

        Of a text that fills all positions, the last token gets no place of its own, because the marks before and after the text
        take places too.
        """
        own = run.options.tokens
        begin = start_tokens(own, run.found.language, run.options.task)
        num_marks = len(alignment_tokens(begin, (), own))
        text = kept.text[: self._model.files.max_positions - num_marks]
        if not text:
            return
        weights = window.align(alignment_tokens(begin, text, own), run.priority)
        clock = time.perf_counter()
        times = WindowTimes.of(own, self._mel, self._model.files.cross_window_len)
        num_frames = min(int(run.seconds * self._mel.frames_per_second) - start, self._mel.window_frames)
        starts = token_starts(weights, len(begin), num_frames // times.frames_per_token)
        offset = start / self._mel.frames_per_second
        end = self._end_of(kept, start, run)
        run.found.words += words_of(
            kept.text, starts, self._decode_text, run.found.language, offset, end, times.seconds_per_token
        )
        run.found.timings.words += time.perf_counter() - clock

    def _decode_well(self, window: Window, prompt: WindowPrompt, run: _Run) -> DecodedWindow:
        """Return the tokens of a window at the first temperature whose text is good; none if there is no speech in it."""
        options = run.options
        params = options.fall_back
        vocab_size = self._model.launched.vocab_size
        no_speech = None if params.no_speech_threshold is None else self._no_speech(window, prompt, run)
        tried: list[DecodedWindow] = []
        for temperature in params.temperatures:
            own = options_at(options.generation, temperature)
            decoded = self._decode(window, prompt, own, run, run.is_certain(no_speech))
            decoded = replace(decoded, no_speech=no_speech, temperature=temperature)
            found_verdict = verdict(decoded, params, vocab_size)
            if found_verdict is FallBackVerdict.SILENCE:
                return replace(decoded, tokens=())
            if found_verdict is not FallBackVerdict.AGAIN or run.found.is_cancelled:
                return decoded
            tried.append(decoded)
        return best_of(tried, params, vocab_size)

    def _no_speech(self, window: Window, prompt: WindowPrompt, run: _Run) -> float:
        """Return the probability that there is no speech in a window."""
        rules = no_speech_rules(run.options.tokens)
        return math.exp(self._first(window, prompt.tokens[: prompt.start + 1], rules, run).logprob)

    def _first(self, window: Window, prompt: tuple[int, ...], rules: SpeechRules, run: _Run) -> Chosen:
        """Return the first token after a prompt, with its log-probability before the rules. Raises ``CancelledError``."""
        sampling = SamplingParams(wants_logprobs=True)
        request = EngineRequest(prompt, sampling, max_new_tokens=1, rules=rules, priority=run.priority)
        found = list(window.generate(request))
        run.watch.cancellation.check()
        return found[0]

    def _decode(
        self, window: Window, prompt: WindowPrompt, generation: GenerationOptions, run: _Run, is_certain: bool
    ) -> DecodedWindow:
        """Return the tokens of a window, without its end. ``is_certain``: whether the caller gets its text as it is chosen."""
        end = run.options.tokens.eos
        tokens: list[int] = []
        logprobs: list[float] = []
        num_told = 0
        request = self._request(prompt, generation, run)
        for chosen in window.generate(request, copies_for(generation.extra.logits_processors, prompt.tokens, 1)):
            self._count(chosen, run.found)
            logprobs.append(chosen.logprob)
            if chosen.id == end and end in generation.stop_token_ids:
                continue
            tokens.append(chosen.id)
            num_cut = run.stops.num_cut(tokens)
            if num_cut is not None:
                del tokens[len(tokens) - num_cut :]
                break
            if is_certain:
                certain = tokens[: max(0, len(tokens) - run.stops.num_held)]
                text = text_tokens_of(certain, run.options.tokens)[num_told:]
                num_told += len(text)
                if text and not run.watch.on_tokens(text):
                    run.found.is_cancelled = True
                    tokens = certain
                    break
        run.watch.cancellation.check()
        return DecodedWindow(tokens, logprobs, num_told=num_told)

    def _request(self, prompt: WindowPrompt, generation: GenerationOptions, run: _Run) -> EngineRequest:
        """Return the request for the text of a window."""
        return EngineRequest(
            prompt=prompt.tokens,
            sampling=replace(generation.sampling, wants_logprobs=True),
            seed=generation.sampling.rng_seed,
            max_new_tokens=generation.max_tokens_after(len(prompt.tokens), self._model.files.max_positions),
            stop_token_ids=generation.stop_token_ids,
            late_token_ids=generation.ignored_token_ids,
            min_new_tokens=generation.min_new_tokens,
            priority=run.priority,
            beams=generation.beams,
            rules=whisper_rules(run.options, run.has_timestamps),
        )

    @staticmethod
    def _count(chosen: Chosen, found: Transcript) -> None:
        found.timings.decode.append(chosen.device_seconds)
        found.timings.sampling.append(chosen.sampling_seconds)
        found.timings.token_times.append(chosen.time)
