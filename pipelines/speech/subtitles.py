"""Subtitles: the segments of a transcription as SubRip (``.srt``), WebVTT (``.vtt``) or lines with times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from staticllm.pipelines.speech.results import WhisperDecodedResultChunk

_ESCAPES = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"))


@dataclass(frozen=True)
class Cue:
    """A piece of text on one line, and the seconds from which to which it is shown."""

    start: float
    end: float
    text: str


def cues_of(chunks: Iterable[WhisperDecodedResultChunk], seconds: float) -> list[Cue]:
    """Return the cues of chunks. One without an end lasts to that of the recording, ``seconds``; empty ones are left out."""
    found = []
    for chunk in chunks:
        text = " ".join(chunk.text.split())
        if text:
            end = seconds if chunk.end_ts < 0 else chunk.end_ts
            found.append(Cue(chunk.start_ts, max(chunk.start_ts, end), text))
    return found


def srt(cues: Iterable[Cue]) -> str:
    """Return SubRip."""
    blocks = (
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text.replace('-->', '->')}\n"
        for number, cue in enumerate(cues, 1)
    )
    return "\n".join(blocks)


def vtt(cues: Iterable[Cue]) -> str:
    """Return WebVTT (https://www.w3.org/TR/webvtt1/), whose text may have no ``&``, ``<`` and ``-->``."""
    return "\n".join(("WEBVTT\n", *_vtt_blocks(cues)))


def _vtt_blocks(cues: Iterable[Cue]) -> Iterator[str]:
    for cue in cues:
        text = cue.text
        for mark, escape in _ESCAPES:
            text = text.replace(mark, escape)
        yield f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{text}\n"


def lines(cues: Iterable[Cue]) -> str:
    """Return a line per cue, which begins with its times."""
    return "".join(f"[{clock(cue.start, '.')} --> {clock(cue.end, '.')}] {cue.text}\n" for cue in cues)


def clock(seconds: float, mark: str) -> str:
    """Return seconds as ``00:01:02,345``; ``mark`` stands before the milliseconds."""
    whole, milliseconds = divmod(round(max(0.0, seconds) * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{mark}{milliseconds:03}"
