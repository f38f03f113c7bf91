"""The results of a transcription, with the attributes of GenAI's classes of the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from staticllm.metrics import MICRO, MeanStdPair, PerfMetrics, RawPerfMetrics
from staticllm.pipelines.speech.transcription import Timings, Transcript


@dataclass(frozen=True)
class WhisperDecodedResultChunk:
    """A segment: seconds of its begin and its end in the recording, and its text. ``end_ts`` is -1.0 if it was cut."""

    start_ts: float
    end_ts: float
    text: str


@dataclass(frozen=True)
class WhisperWordTiming:
    """A word: seconds of its begin and its end, and its tokens."""

    start_ts: float
    end_ts: float
    word: str
    token_ids: list[int] = field(default_factory=list)


@dataclass
class WhisperRawPerfMetrics:
    """Single measurements of speech, in microseconds."""

    features_extraction_durations: list[float] = field(default_factory=list)  # per recording
    encode_inference_durations: list[float] = field(default_factory=list)  # per window
    decode_inference_durations: list[float] = field(default_factory=list)  # per token
    word_level_timestamps_processing_durations: list[float] = field(default_factory=list)  # per recording


class WhisperPerfMetrics(PerfMetrics):
    """The timings of a transcription."""

    def __init__(self, load_time_ms: float = 0.0, raw: RawPerfMetrics | None = None) -> None:
        super().__init__(load_time_ms, raw)
        self.whisper_raw_metrics = WhisperRawPerfMetrics()

    def get_features_extraction_duration(self) -> MeanStdPair:
        """Return the time to compute the features of a recording, ms."""
        return _ms(self.whisper_raw_metrics.features_extraction_durations)

    def get_encode_inference_duration(self) -> MeanStdPair:
        """Return the time in which the device hears a window, ms."""
        return _ms(self.whisper_raw_metrics.encode_inference_durations)

    def get_decode_inference_duration(self) -> MeanStdPair:
        """Return the time of the device's calls for a token, ms."""
        return _ms(self.whisper_raw_metrics.decode_inference_durations)

    def get_word_level_timestamps_processing_duration(self) -> MeanStdPair:
        """Return the time to find the times of words, ms."""
        return _ms(self.whisper_raw_metrics.word_level_timestamps_processing_durations)


@dataclass(frozen=True)
class WhisperDecodedResults:
    """A transcription; ``str`` gives its text.

    Attributes:
        texts: The text.
        scores: Its score: 1.0, or the mean log-probability of its tokens of a beam search.
        chunks: Its segments with their times, with ``return_timestamps``; else None.
        words: Its words with their times, with ``word_timestamps``; else None.
        language: The code of the language that was heard or asked for.
        perf_metrics: The timings.
    """

    texts: list[str]
    scores: list[float]
    perf_metrics: WhisperPerfMetrics
    chunks: list[WhisperDecodedResultChunk] | None = None
    words: list[WhisperWordTiming] | None = None
    language: str = "en"

    def __str__(self) -> str:
        return self.texts[0]


def results_of(
    found: Transcript, decode: Callable[[list[int]], str], has_chunks: bool, metrics: WhisperPerfMetrics
) -> WhisperDecodedResults:
    """Return the results of a transcript. ``decode`` makes text of tokens."""
    chunks = [
        WhisperDecodedResultChunk(each.start, -1.0 if each.end is None else each.end, decode(list(each.tokens)))
        for each in found.segments
    ]
    return WhisperDecodedResults(
        [decode(found.tokens)], [1.0], metrics, chunks if has_chunks else None, language=found.language
    )


def metrics_of(timings: Timings, num_tokens: int, begin: float, end: float, load_ms: float) -> WhisperPerfMetrics:
    """Return the timings of a transcription that lasted from ``begin`` to ``end``, moments of ``time.perf_counter``."""
    metrics = WhisperPerfMetrics(load_ms)
    metrics.count(0, num_tokens, 0)
    raw = metrics.raw_metrics
    times = timings.token_times
    raw.generate_durations.append((end - begin) * MICRO)
    raw.m_new_token_times += [moment * 1e3 for moment in times]
    raw.m_batch_sizes += [1] * len(times)
    raw.m_times_to_first_token += [(times[0] - begin) * MICRO] if times else []
    raw.m_durations += [(after - before) * MICRO for before, after in pairwise(times)]
    raw.token_infer_durations += [seconds * MICRO for seconds in timings.decode]
    raw.inference_durations.append(MICRO * (sum(timings.decode) + sum(timings.encode)))
    raw.sampling_durations += [seconds * MICRO for seconds in timings.sampling]
    own = metrics.whisper_raw_metrics
    own.features_extraction_durations.append(timings.features * MICRO)
    own.encode_inference_durations += [seconds * MICRO for seconds in timings.encode]
    own.decode_inference_durations += [seconds * MICRO for seconds in timings.decode]
    own.word_level_timestamps_processing_durations.append(0.0)
    return metrics


def _ms(durations: list[float]) -> MeanStdPair:
    return MeanStdPair.of([value / 1e3 for value in durations])
