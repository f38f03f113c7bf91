"""What ``StaticWhisperPipeline.generate`` returns: the classes of openvino_genai with their names and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from staticllm.metrics import MeanStdPair, PerfMetrics, RawPerfMetrics
from staticllm.results import LikeGenAI

from .segments import SpeechSegment

NO_END = -1.0
"""GenAI's ``end_ts`` of a chunk that was cut off before its end."""


@dataclass(frozen=True)
class WhisperDecodedResultChunk(LikeGenAI):
    """A segment of the text, and when it was spoken, seconds."""

    start_ts: float
    end_ts: float
    """-1 if its end is not known."""
    text: str


@dataclass(frozen=True)
class WhisperWordTiming(LikeGenAI):
    """A word with the space before it and its punctuation, its tokens, and when it was spoken, seconds."""

    word: str
    token_ids: list[int]
    start_ts: float
    end_ts: float


@dataclass
class WhisperRawPerfMetrics(LikeGenAI):
    """Single measurements in microseconds: of features and words one entry per recording, of the encoder one per window, of the
    decoder one per token of the text.
    """

    features_extraction_durations: list[float] = field(default_factory=list)
    word_level_timestamps_processing_durations: list[float] = field(default_factory=list)
    encode_inference_durations: list[float] = field(default_factory=list)
    decode_inference_durations: list[float] = field(default_factory=list)

    def __add__(self, other: WhisperRawPerfMetrics) -> WhisperRawPerfMetrics:
        names = (item.name for item in fields(WhisperRawPerfMetrics))
        return WhisperRawPerfMetrics(**{name: getattr(self, name) + getattr(other, name) for name in names})


class WhisperPerfMetrics(PerfMetrics):
    """The timings of one or more transcriptions; the sum of two objects pools their measurements."""

    def __init__(
        self,
        load_time_ms: float = 0.0,
        raw: RawPerfMetrics | None = None,
        whisper_raw_metrics: WhisperRawPerfMetrics | None = None,
    ) -> None:
        super().__init__(load_time_ms, raw)
        self.whisper_raw_metrics = whisper_raw_metrics or WhisperRawPerfMetrics()

    def get_features_extraction_duration(self) -> MeanStdPair:
        """Return the time to compute the log-mel features of a recording, ms."""
        return _ms(self.whisper_raw_metrics.features_extraction_durations)

    def get_word_level_timestamps_processing_duration(self) -> MeanStdPair:
        """Return the time to find when the words of a recording were spoken, ms."""
        return _ms(self.whisper_raw_metrics.word_level_timestamps_processing_durations)

    def get_encode_inference_duration(self) -> MeanStdPair:
        """Return the device time of the encoder per window, ms."""
        return _ms(self.whisper_raw_metrics.encode_inference_durations)

    def get_decode_inference_duration(self) -> MeanStdPair:
        """Return the device time of the decoder per token, ms."""
        return _ms(self.whisper_raw_metrics.decode_inference_durations)

    def __add__(self, other: PerfMetrics) -> WhisperPerfMetrics:
        pooled = super().__add__(other)
        raw = self.whisper_raw_metrics
        if isinstance(other, WhisperPerfMetrics):
            raw = raw + other.whisper_raw_metrics
        found = WhisperPerfMetrics(pooled.get_load_time(), pooled.raw_metrics, raw)
        found.count(pooled.get_num_input_tokens(), pooled.get_num_generated_tokens(), pooled.get_num_cached_tokens())
        return found


def _ms(durations: list[float]) -> MeanStdPair:
    return MeanStdPair.of([value / 1e3 for value in durations])


@dataclass(frozen=True)
class WhisperDecodedResults(LikeGenAI):
    """The transcription of a recording."""

    texts: list[str]
    """The text, one entry."""
    scores: list[float]
    """1.0, as in GenAI."""
    language: str
    """The code of the language, given or detected (``en``)."""
    chunks: list[WhisperDecodedResultChunk] | None = None
    """The segments, if ``return_timestamps`` asked for them, else None."""
    words: list[WhisperWordTiming] | None = None
    """The words, if ``word_timestamps`` asked for them, else None."""
    perf_metrics: WhisperPerfMetrics = field(default_factory=WhisperPerfMetrics, repr=False)
    """The timings."""

    def __str__(self) -> str:
        """Return the text; of several ones a line each, after its score, as GenAI's results do."""
        if len(self.texts) == 1:
            return self.texts[0]
        return "\n".join(f"{score:f}: {text}" for score, text in zip(self.scores, self.texts, strict=True))


def chunks_of(segments: Iterable[SpeechSegment], decode: Callable[[list[int]], str]) -> list[WhisperDecodedResultChunk]:
    """Return the chunk of each segment; ``decode`` makes text of token ids."""
    return [
        WhisperDecodedResultChunk(
            segment.start, NO_END if segment.end is None else segment.end, decode(list(segment.tokens))
        )
        for segment in segments
    ]


def later(results: WhisperDecodedResults, seconds: float) -> WhisperDecodedResults:
    """Return results whose times count from ``seconds`` before the recording, as in a film whose sound begins after the
    picture. No time is less than 0."""

    if not seconds:
        return results

    def moved(moment: float) -> float:
        return moment if moment == NO_END else max(0.0, moment + seconds)

    chunks = [
        WhisperDecodedResultChunk(moved(chunk.start_ts), moved(chunk.end_ts), chunk.text)
        for chunk in results.chunks or ()
    ]
    words = [
        WhisperWordTiming(word.word, word.token_ids, moved(word.start_ts), moved(word.end_ts))
        for word in results.words or ()
    ]
    return WhisperDecodedResults(
        results.texts,
        results.scores,
        results.language,
        chunks=None if results.chunks is None else chunks,
        words=None if results.words is None else words,
        perf_metrics=results.perf_metrics,
    )
