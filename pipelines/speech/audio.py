"""Recordings: checks of samples that a program passes, and reading of files in any format, at any rate.

Files are read by ``soundfile`` (WAV, FLAC, Ogg, MP3 …) and resampled by ``soxr``; what soundfile does not know is read by ``av``,
that is by FFmpeg. All three are in the extra ``speech``.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ConfigError, PromptError, last_line, shown
from staticllm.pipelines.speech.log_mel import Samples

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
Source: TypeAlias = str | os.PathLike[str] | bytes | io.BufferedIOBase


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


def read_audio(source: Source, max_seconds: float = MAX_SECONDS) -> Samples:
    """Return the samples ``[n]`` of a file at 16 kHz, the mean of its channels, float32.

    Args:
        source: A path, the content of a file, or an open file that can be sought in, which is closed.
        max_seconds: The longest recording.

    Raises:
        PromptError: the file is missing, is not audio or damaged, or is too short or too long.
        ConfigError: the packages that read files are not installed.
    """
    name = _name_of(source)
    content = _opened(source, name)
    reasons = []
    readers: tuple[Callable[..., Iterator[Samples]], ...] = (_by_soundfile, _by_av)
    try:
        for read in readers:
            try:
                samples = _joined(read(content, name, max_seconds), name, max_seconds)
            except ImportError as error:
                reasons.append(f"{error.name} is not installed")
                continue
            except (_UnreadableError, MemoryError) as error:
                reasons.append(last_line(error))
                content.seek(0)
                continue
            return _check_file(samples, name)
    finally:
        content.close()
    if all(reason.endswith("is not installed") for reason in reasons):
        raise ConfigError(f"{', '.join(reasons)}, so no file can be read: pip install 'staticllm[speech]'")
    raise PromptError(f"{name} cannot be read as audio: {'; '.join(reasons)}")


class _UnreadableError(Exception):
    """One reader does not know the file."""


def _name_of(source: Source) -> str:
    if isinstance(source, bytes):
        return "the audio"
    if isinstance(source, io.BufferedIOBase):
        return str(getattr(source, "name", "the file"))
    return repr(os.fspath(source))


def _opened(source: Source, name: str) -> io.BufferedIOBase:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if isinstance(source, io.BufferedIOBase):
        return source
    path = Path(source)
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


def _joined(blocks: Iterator[Samples], name: str, max_seconds: float) -> Samples:
    """Return the samples of all blocks; reading ends as soon as they are too many."""
    found: list[Samples] = []
    count = 0
    for block in blocks:
        found.append(block)
        count += len(block)
        _check_length(count / RATE, name, max_seconds)
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _by_soundfile(content: io.BufferedIOBase, name: str, max_seconds: float) -> Iterator[Samples]:
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
                yield resampled(block.mean(axis=1, dtype=np.float32), False)
        except Exception as error:  # as for av
            raise _UnreadableError(f"soundfile: {_reason(error)}") from None
        yield resampled(np.zeros(0, np.float32), True)


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


def _by_av(content: io.BufferedIOBase, name: str, max_seconds: float) -> Iterator[Samples]:
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
            resampler = av.AudioResampler(format="fltp", rate=RATE)
            for frame in file.decode(audio=0):
                yield from _means(resampler.resample(frame))
            yield from _means(resampler.resample(None))
    except (PromptError, _UnreadableError):
        raise
    except Exception as error:  # av has no list of what it raises for damaged files: IndexError is among it
        raise _UnreadableError(f"av: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return what a library says is wrong, without the names of its objects."""
    known = (getattr(error, name, None) for name in ("error_string", "strerror"))
    return str(next(filter(None, known), last_line(error))).removeprefix("Error : ").rstrip(".")


def _means(frames: Sequence[Any]) -> Iterator[Samples]:
    return (np.asarray(frame.to_ndarray()).mean(axis=0, dtype=np.float32) for frame in frames)
