"""Recordings: checks of samples that a program passes, and reading of files in any format, at any rate.

Files are read by ``soundfile`` (WAV, FLAC, Ogg, MP3 …) and resampled by ``soxr``; what soundfile does not know is read by ``av``,
that is by FFmpeg. All three are in the extra ``speech``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ConfigError, PromptError, last_line, shown

from .log_mel import Samples

RATE = 16000
"""The rate of all Whisper models, samples per second."""
LEAST_SAMPLES = 201
"""The fewest samples, as in GenAI: half a frame is reflected at the beginning."""
LEAST_RATE, MOST_RATE = 1000, 1 << 20
"""The rates that files may have."""
MAX_SECONDS = 8 * 3600.0
"""The longest recording in one call: its samples and features take 3 GB."""
MAX_PEAK = 1000.0
"""Larger samples are no numbers near [-1, 1], but 16-bit integers."""
BLOCK = 1 << 20
"""Samples per channel that are read from a file at once."""
FORMATS = (
    "aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,w64,wav"
)
"""The formats that FFmpeg may take a file for. Playlists are not among them: they name other files and addresses to read."""
CLOCKED = frozenset(["mpegts", "mpeg"])
"""The formats whose times need not begin near 0."""
EARLIEST_START = -1.0
"""When sound may begin, seconds after the beginning of its file; earlier times are none of the file."""
LEAST_GAP = 0.1
"""Seconds that frames must be late to follow a silence; less is the rounding of their times."""
MOST_OVERLAP = 1.0
"""Seconds that frames may be early; more means that the clock of the file was set back."""
AudioFile: TypeAlias = str | os.PathLike[str] | bytes | io.BufferedIOBase


def check_samples(raw_speech: object, sampling_rate: float = RATE, max_seconds: float = MAX_SECONDS) -> Samples:
    """Return the samples ``[n]`` of one channel as float32.

    Args:
        raw_speech: A list of numbers, or an array, near [-1, 1].
        sampling_rate: Samples per second; must be 16000.
        max_seconds: The longest recording.

    Raises:
        PromptError: it is empty, too short or too long, has several channels, another rate, integers, or numbers that are not
            finite.
    """
    if sampling_rate != RATE:
        raise PromptError(
            f"sampling_rate={shown(sampling_rate)}: the model hears {RATE} samples per second; resample the recording, "
            "or pass the file, which is resampled"
        )
    samples = _as_array(raw_speech)
    if samples.ndim != 1:
        raise PromptError(
            f"raw_speech has the shape {list(samples.shape)}: the model hears one channel; pass the mean of the channels, [n]"
        )
    if len(samples) < LEAST_SAMPLES:
        raise PromptError(
            f"raw_speech has the length {len(samples)}: pass {LEAST_SAMPLES} samples or more, {LEAST_SAMPLES / RATE * 1e3:.1f} ms"
        )
    _check_length(len(samples) / RATE, "raw_speech", max_seconds)
    return _checked_range(samples)


def _as_array(raw_speech: object) -> NDArray[Any]:
    if isinstance(raw_speech, (str, bytes, os.PathLike)):
        raise PromptError(f"raw_speech={shown(raw_speech)}: is no list of samples; read the file with read_audio")
    if np.ma.is_masked(raw_speech):
        raise PromptError("raw_speech has masked elements, whose sound is not known: pass filled(0)")
    try:
        samples = np.asarray(raw_speech)
    except Exception as error:  # an object of the caller's may raise anything
        raise PromptError(f"raw_speech is no list of numbers: {last_line(error)}") from None
    if samples.dtype.kind not in "fiu":
        raise PromptError(f"raw_speech has elements of type {samples.dtype}: pass numbers, float32")
    return samples


def _checked_range(samples: NDArray[Any]) -> Samples:
    least = float(samples.min())  # NaN if there is one
    most = float(samples.max())
    if not (np.isfinite(least) and np.isfinite(most)):
        place = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise PromptError(f"raw_speech[{place}] is {samples[place]}: all samples must be finite numbers")
    is_whole = samples.dtype.kind in "iu"
    if max(-least, most) > (1.0 if is_whole else MAX_PEAK):
        what = f"are whole numbers ({samples.dtype})" if is_whole else "are no numbers near [-1, 1]"
        raise PromptError(
            f"raw_speech has samples from {least:g} to {most:g}, which {what}: divide them by their largest possible value, "
            "32768 for 16 bits"
        )
    return np.ascontiguousarray(samples, np.float32)


def _check_length(seconds: float, name: str, max_seconds: float) -> None:
    if seconds > max_seconds:
        raise PromptError(
            f"{name} lasts {_time(seconds)}, at most {_time(max_seconds)} can be transcribed at once: cut it into parts"
        )


def _time(seconds: float) -> str:
    return f"{seconds / 3600:g} hours" if seconds >= 3600 else f"{seconds:g} s"


@dataclass(frozen=True)
class Recording:
    """A file that was read: its samples ``[n]`` at 16 kHz, the mean of its channels, float32, with silence where it has gaps."""

    samples: Samples
    start: float = 0.0
    """The time of the first one in the file, seconds. In a film, sound may begin after the picture; where the
    sound begins with what an encoder needs in advance, it is less than 0."""


@dataclass(frozen=True)
class _Piece:
    """The next samples ``[n]`` of a file, ``silence`` seconds after those before."""

    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    silence: float = 0.0
    start: float = 0.0
    """As in ``Recording``."""


def read_audio(file: AudioFile, max_seconds: float = MAX_SECONDS) -> Samples:
    """Return the samples ``[n]`` of a file at 16 kHz, as ``read_recording``, with silence before a sound that begins later.

    Raises:
        StaticLLMError: as for ``read_recording``.
    """
    found = read_recording(file, max_seconds)
    silence = np.zeros(round(max(0.0, found.start) * RATE), np.float32)
    return np.concatenate([silence, found.samples]) if len(silence) else found.samples


def read_recording(file: AudioFile, max_seconds: float = MAX_SECONDS) -> Recording:
    """Return the samples of a file, and when they begin.

    Args:
        file: A path, the content of a file, or an open file that can be sought in, which is closed.
        max_seconds: The longest recording.

    Raises:
        PromptError: the file is missing, is not audio or damaged, or is too short or too long.
        ConfigError: the packages that read files are not installed.
    """
    name = _name_of(file)
    content = _opened(file, name)
    reasons = []
    readers: tuple[Callable[..., Iterator[_Piece]], ...] = (_by_soundfile, _by_av)
    try:
        for read in readers:
            try:
                found = _joined(read(content, name, max_seconds), name, max_seconds)
            except ImportError as error:
                reasons.append(f"{error.name} is not installed")
                continue
            except (_UnreadableError, MemoryError) as error:
                reasons.append(last_line(error))
                content.seek(0)
                continue
            return replace(found, samples=_check_file(found.samples, name))
    finally:
        content.close()
    if all(reason.endswith("is not installed") for reason in reasons):
        raise ConfigError(f'{", ".join(reasons)}, so no file can be read: pip install "staticllm[speech]"')
    raise PromptError(f"{name} cannot be read as audio: {'; '.join(reasons)}")


class _UnreadableError(Exception):
    """One reader does not know the file."""


def _name_of(file: AudioFile) -> str:
    if isinstance(file, bytes):
        return "the audio"
    if isinstance(file, io.BufferedIOBase):
        return str(getattr(file, "name", "the file"))
    return repr(os.fspath(file))


def _opened(file: AudioFile, name: str) -> io.BufferedIOBase:
    if isinstance(file, bytes):
        return io.BytesIO(file)
    if isinstance(file, io.BufferedIOBase):
        return file
    path = Path(file)
    if path.exists() and not path.is_file():
        raise PromptError(f"{name} is no file: pass the path of a recording")
    try:
        return path.open("rb")
    except (OSError, ValueError) as error:
        raise PromptError(f"{name} cannot be opened: {last_line(error)}") from None


def _check_file(samples: Samples, name: str) -> Samples:
    if len(samples) < LEAST_SAMPLES:
        raise PromptError(
            f"{name} has a length of {len(samples)} at {RATE} Hz: it must have {LEAST_SAMPLES} samples or more"
        )
    if not np.isfinite(samples.min()) or not np.isfinite(samples.max()):
        raise PromptError(f"{name} has samples that are not finite numbers: it is damaged")
    return _checked_range(samples)


def _joined(pieces: Iterator[_Piece], name: str, max_seconds: float) -> Recording:
    """Return the samples of all pieces; reading ends as soon as they are too many."""
    found: list[Samples] = []
    count = 0
    start = 0.0
    for piece in pieces:
        start += piece.start
        _check_length(start + count / RATE + piece.silence, name, max_seconds)
        silence = np.zeros(round(piece.silence * RATE), np.float32)
        found += [silence, piece.samples]
        count += len(silence) + len(piece.samples)
        _check_length(start + count / RATE, name, max_seconds)
    return Recording(np.concatenate(found) if found else np.zeros(0, np.float32), start)


def _by_soundfile(content: io.BufferedIOBase, name: str, max_seconds: float) -> Iterator[_Piece]:
    import soundfile

    try:
        file = soundfile.SoundFile(cast(Any, content))
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        raise _UnreadableError(f"soundfile: {_reason(error)}") from None
    with file:
        _check_rate(file.samplerate)
        _check_length(file.frames / file.samplerate, name, max_seconds)
        resampled = _resampler(file.samplerate)
        try:
            while len(block := file.read(max(1, BLOCK // file.channels), "float32", always_2d=True)):
                yield _Piece(resampled(block.mean(axis=1, dtype=np.float32), False))
        except Exception as error:  # as for av
            raise _UnreadableError(f"soundfile: {_reason(error)}") from None
        yield _Piece(resampled(np.zeros(0, np.float32), True))


def _check_rate(rate: int) -> None:
    """Check that resampling does not make a short file a long one."""
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise _UnreadableError(f"it has {rate} samples per second, not {LEAST_RATE} to {MOST_RATE}")


def _resampler(rate: int) -> Callable[[Samples, bool], Samples]:
    """Return a function that resamples blocks; the second argument says whether the block is the last."""
    if rate == RATE:
        return lambda block, is_last: block
    import soxr

    stream = soxr.ResampleStream(rate, RATE, 1, dtype="float32")
    return lambda block, is_last: np.asarray(stream.resample_chunk(block, is_last), np.float32)


def _by_av(content: io.BufferedIOBase, name: str, max_seconds: float) -> Iterator[_Piece]:
    import av

    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    try:
        with av.open(content, mode="r", options=options, metadata_errors="ignore") as file:
            if not file.streams.audio:
                raise _UnreadableError("av: it has no sound")
            if getattr(file.streams.audio[0], "codec_context", None) is None:
                raise _UnreadableError("av: its codec is not known")
            _check_rate(file.streams.audio[0].rate)
            if file.duration:
                _check_length(file.duration / av.time_base, name, max_seconds)
            yield from _timed_pieces(file, lambda: av.AudioResampler(format="fltp", rate=RATE))
    except (PromptError, _UnreadableError):
        raise
    except Exception as error:  # av has no list of what it raises for damaged files: IndexError is among it
        raise _UnreadableError(f"av: {_reason(error)}") from None


def _timed_pieces(file: Any, make_resampler: Callable[[], Any]) -> Iterator[_Piece]:
    """Yield the sound of a file of ``av``, with silence where the times of its frames say that there is a gap.

    No sound is left out: a frame that begins before the end of the one before it follows that one.
    """
    resampler = make_resampler()
    now: float | None = None  # where the next frame should begin
    for frame in file.decode(audio=0):
        moment = _moment_of(frame)
        if now is None:
            beginning = _beginning_of(file)
            now = beginning if moment is None or moment - beginning < EARLIEST_START else moment
            moment = now
            yield _Piece(start=now - beginning)
        gap = 0.0 if moment is None else moment - now
        if gap > LEAST_GAP:
            yield from _means(resampler.resample(None))
            resampler = make_resampler()
            yield _Piece(silence=gap)
        if gap > LEAST_GAP or gap < -MOST_OVERLAP:
            now += gap
        now += frame.samples / frame.sample_rate
        yield from _means(resampler.resample(frame))
    yield from _means(resampler.resample(None))


def _moment_of(frame: Any) -> float | None:
    """Return the second at which a frame of ``av`` begins; None if its file does not say it."""
    return None if frame.pts is None or not frame.time_base else float(frame.pts * frame.time_base)


def _beginning_of(file: Any) -> float:
    """Return the second that counts as the beginning of a file of ``av``: the first one that it has, where times are those of a
    clock which runs on from one program to the next, as in broadcasts; else 0."""
    import av

    has_clock = file.format.name in CLOCKED
    return file.start_time / av.time_base if has_clock and file.start_time is not None else 0.0


def _reason(error: Exception) -> str:
    """Return what a library says is wrong, without the names of its objects."""
    known = (getattr(error, name, None) for name in ("error_string", "strerror"))
    return str(next(filter(None, known), last_line(error))).removeprefix("Error : ").rstrip(".")


def _means(frames: Sequence[Any]) -> Iterator[_Piece]:
    return (_Piece(np.asarray(frame.to_ndarray()).mean(axis=0, dtype=np.float32)) for frame in frames)
