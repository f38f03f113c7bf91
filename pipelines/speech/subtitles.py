"""Writes transcriptions as subtitles and tables: SRT, WebVTT, JSON, TSV and plain text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from staticllm.errors import ConfigError, shown

from .results import (
    NO_END,
    WhisperDecodedResultChunk,
    WhisperDecodedResults,
    WhisperWordTiming,
)

ARROW = "-->"
"""What separates the times of a cue, and must not be in its text."""


@dataclass(frozen=True)
class Layout:
    """How results are written."""

    line_chars: int | None = None
    """The longest line of a subtitle, characters; None for one line each."""
    duration: float | None = None
    """The length of the recording, seconds, where a chunk without an end ends; None if it is not known."""


def written(results: WhisperDecodedResults, form: str, layout: Layout = Layout()) -> str:
    """Return results as a file of the given form: ``srt``, ``vtt``, ``json``, ``tsv`` or ``txt``.

    Raises:
        ConfigError: there is no such form, or it needs chunks and the results have none.
    """
    writer = WRITERS.get(form)
    if writer is None:
        raise ConfigError(f"form={shown(form)}: must be one of {', '.join(WRITERS)}")
    if form in TIMED and results.chunks is None:
        raise ConfigError(f"{form} needs the times of the text: transcribe with return_timestamps=True")
    return writer(results, layout)


@dataclass(frozen=True)
class _Cue:
    start: float
    end: float
    text: str


def _cues(chunks: Sequence[WhisperDecodedResultChunk], layout: Layout) -> list[_Cue]:
    """Return the chunks with text. One without an end ends where the next one begins, else with the recording."""
    found = []
    for index, chunk in enumerate(chunks):
        text = " ".join(chunk.text.split())
        end = chunk.end_ts
        if end == NO_END:
            following = chunks[index + 1].start_ts if index + 1 < len(chunks) else layout.duration
            end = chunk.start_ts if following is None else following
        if text:
            found.append(_Cue(chunk.start_ts, max(chunk.start_ts, end), text))
    return found


def _lines(text: str, layout: Layout) -> str:
    return text if layout.line_chars is None else "\n".join(textwrap.wrap(text, layout.line_chars))


def time_of(seconds: float, mark: str = ".") -> str:
    """Return a moment as ``00:00:00.000``, with another decimal mark if given."""
    milliseconds = max(0, round(seconds * 1000))
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{milliseconds // 1000:02d}{mark}{milliseconds % 1000:03d}"


def _srt(results: WhisperDecodedResults, layout: Layout) -> str:
    blocks = []
    for number, cue in enumerate(_cues(results.chunks or (), layout), 1):
        text = _lines(cue.text.replace(ARROW, "->"), layout)
        blocks.append(f"{number}\n{time_of(cue.start, ',')} {ARROW} {time_of(cue.end, ',')}\n{text}\n\n")
    return "".join(blocks)


def _vtt(results: WhisperDecodedResults, layout: Layout) -> str:
    blocks = ["WEBVTT\n\n"]
    for cue in _cues(results.chunks or (), layout):
        text = _lines(cue.text, layout).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        blocks.append(f"{time_of(cue.start)} {ARROW} {time_of(cue.end)}\n{text}\n\n")
    return "".join(blocks)


def _tsv(results: WhisperDecodedResults, layout: Layout) -> str:
    """Return a line per chunk: start and end in ms, and the text, whose tabs are spaces."""
    rows = (
        f"{cue.start * 1000:.0f}\t{cue.end * 1000:.0f}\t{cue.text}\n" for cue in _cues(results.chunks or (), layout)
    )
    return "start\tend\ttext\n" + "".join(rows)


def lines(results: WhisperDecodedResults, layout: Layout = Layout()) -> str:
    """Return a line per chunk, which begins with its times."""
    cues = _cues(results.chunks or (), layout)
    return "".join(f"[{time_of(cue.start)} {ARROW} {time_of(cue.end)}] {cue.text}\n" for cue in cues)


def _txt(results: WhisperDecodedResults, layout: Layout) -> str:
    text = results.texts[0].strip()
    return (_lines(text, layout) + "\n") if text else ""


def verbose_json(results: WhisperDecodedResults, layout: Layout = Layout()) -> dict[str, object]:
    """Return results as the ``verbose_json`` of OpenAI's API: text, language, and the rest as far as it is there."""
    found: dict[str, object] = {"language": results.language, "text": results.texts[0].strip()}
    if layout.duration is not None:
        found["duration"] = round(layout.duration, 3)
    if results.chunks is not None:
        found["segments"] = [
            {"id": number, "start": round(cue.start, 3), "end": round(cue.end, 3), "text": cue.text}
            for number, cue in enumerate(_cues(results.chunks, layout))
        ]
    if results.words is not None:
        found["words"] = word_times(results.words)
    return found


def word_times(words: Sequence[WhisperWordTiming]) -> list[dict[str, object]]:
    """Return words with their times, seconds, as OpenAI's API has them."""
    return [
        {"word": word.word.strip(), "start": round(word.start_ts, 3), "end": round(word.end_ts, 3)} for word in words
    ]


def _json(results: WhisperDecodedResults, layout: Layout) -> str:
    return json.dumps(verbose_json(results, layout), ensure_ascii=False, indent=1) + "\n"


WRITERS: Mapping[str, Callable[[WhisperDecodedResults, Layout], str]] = {
    "srt": _srt,
    "vtt": _vtt,
    "json": _json,
    "tsv": _tsv,
    "txt": _txt,
}
"""The function that writes each form."""
TIMED = ("srt", "vtt", "tsv")
"""The forms that need chunks."""
