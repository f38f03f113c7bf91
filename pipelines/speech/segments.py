"""From the tokens of a window to segments of a recording, and to the frame at which its next window begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .log_mel import MelConfig
from .whisper_config import WhisperTokens

MAX_SOURCE_POSITIONS = 1500
"""The positions of Whisper's encoder for a window, ``max_source_positions`` of its ``config.json``."""


@dataclass(frozen=True)
class WindowTimes:
    """How timestamp tokens count in a window."""

    begin: int
    """The token of 0.00 s."""
    eos: int
    """The end of a text; all tokens from this one on are special."""
    seconds_per_token: float = 0.02
    """Seconds from one timestamp to the next: 0.02."""
    frames_per_token: int = 2
    """Frames of features from one timestamp to the next: 2."""
    window_frames: int = 3000
    """Frames of a window: 3000."""

    @classmethod
    def of(cls, tokens: WhisperTokens, mel: MelConfig, max_source_positions: int = MAX_SOURCE_POSITIONS) -> WindowTimes:
        frames = max(1, mel.window_frames // max_source_positions)
        return cls(
            tokens.timestamp_begin, tokens.eos, mel.chunk_length / max_source_positions, frames, mel.window_frames
        )


@dataclass(frozen=True)
class SpeechSegment:
    """A piece of text: seconds of the recording, and its tokens without special ones."""

    start: float
    end: float | None
    """None if it has no timestamp."""
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class WindowSegments:
    """What the tokens of a window mean."""

    segments: tuple[SpeechSegment, ...] = ()
    """Complete segments, or a single one without an end; none of text without timestamps."""
    advance: int = 3000
    """Frames from the beginning of this window to that of the next, at least 1."""
    text: tuple[int, ...] = ()
    """The tokens of the text: those of the segments."""
    ranges: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """For each segment, the first token of its text among those of the window, and the one after the last."""


def segments_of(
    tokens: Sequence[int], times: WindowTimes, offset: float = 0.0, seconds: float = math.inf
) -> WindowSegments:
    """Return the segments of a window that begins ``offset`` seconds after its recording, as GenAI's ``extract_segments``.

    Unlike there, no segment is later than ``seconds``, the end of the recording: the model also encodes the silence after it.

    ``tokens`` are those that were generated; the end of the text may be among them. Text after the last pair of timestamps was
    cut by the end of the window: it is dropped, and the next window begins at the pair. A window that ends with a single
    timestamp, or without any, was transcribed to its end.
    """

    def moment(token: int) -> float:
        return min(offset + (token - times.begin) * times.seconds_per_token, seconds)

    def segment(start: int, end: int | None) -> SpeechSegment:
        text = tuple(token for token in tokens[start + 1 : end] if token < times.eos)
        return SpeechSegment(moment(tokens[start]), None if end is None else moment(tokens[end]), text)

    segments: list[SpeechSegment] = []
    ranges: list[tuple[int, int]] = []
    advance = times.window_frames
    start: int | None = None  # the index of the timestamp at which a segment begins
    for index, token in _timestamps(tokens, times.begin):
        if start is None:
            start = index
        elif token != tokens[start]:  # a repeated timestamp begins the segment again
            segments.append(segment(start, index))
            ranges.append((start + 1, index))
            advance = (token - times.begin) * times.frames_per_token
            start = None
    if start is None:
        advance = times.window_frames
    elif not segments and start + 1 < len(tokens):
        segments.append(segment(start, None))
        ranges.append((start + 1, len(tokens)))
    text = tuple(token for segment in segments for token in segment.tokens)
    return WindowSegments(tuple(segments), advance if advance > 0 else times.window_frames, text, tuple(ranges))


def _timestamps(tokens: Sequence[int], begin: int) -> Iterator[tuple[int, int]]:
    return ((index, token) for index, token in enumerate(tokens) if token >= begin)
