"""The log-mel features of a recording, as Whisper's encoder takes them (arXiv 2212.04356, section 2.2).

transformers' ``WhisperFeatureExtractor`` and GenAI agree on recordings of any length: the features of a whole recording are
clamped 8 decades below the largest value of the *whole* recording, not of a window, and a window that ends after the last frame
is filled up with zeros after that, which is not the value of silence. They differ only in the last frame of a recording of more
than 30 s, which reaches over its end by up to 200 samples: transformers reflects the samples there, as this module does, and
GenAI takes zeros.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from staticllm.config import whole
from staticllm.errors import ConfigError, ModelError, quoted, shown

Samples: TypeAlias = NDArray[np.float32]
Features: TypeAlias = NDArray[np.float32]
FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that describe the features; in the second, which newer exports have, they are below ``feature_extractor``."""
BLOCK = 512
"""The number of frames that are computed at once, so that all arrays of a block fit into a processor's cache."""
LEAST_POWER = 1e-10
DECADES = 8.0


@dataclass(frozen=True)
class MelConfig:
    """How features are computed, with the names of ``preprocessor_config.json``; the defaults are those of Whisper
    tiny.
    """

    feature_size: int = 80
    """Mel bands per frame: 80, or 128 since Whisper large v3."""
    sampling_rate: int = 16000
    """Samples per second, Hz."""
    hop_length: int = 160
    """Samples from one frame to the next."""
    n_fft: int = 400
    """Samples of a frame."""
    chunk_length: int = 30
    """Seconds of a window of the encoder."""

    @property
    def window_samples(self) -> int:
        """Samples of a window of the encoder."""
        return self.chunk_length * self.sampling_rate

    @property
    def window_frames(self) -> int:
        """Frames of a window of the encoder: 3000."""
        return self.window_samples // self.hop_length

    @property
    def frames_per_second(self) -> float:
        """Frames per second: 100."""
        return self.sampling_rate / self.hop_length

    def num_frames(self, num_samples: int) -> int:
        """Return the number of frames of a recording: at least those of a window."""
        return max(num_samples, self.window_samples) // self.hop_length


_MOST = {"feature_size": 1024, "sampling_rate": 1 << 20, "hop_length": 1 << 16, "n_fft": 1 << 16, "chunk_length": 3600}


def read_mel_config(models_path: str | os.PathLike[str]) -> MelConfig:
    """Return how the features of the model in a directory are computed; the defaults if no file says it, as GenAI.

    Raises:
        ModelError: a file is damaged, or a value is impossible.
    """
    path = next((found for name in FILES if (found := Path(models_path) / name).is_file()), None)
    if path is None:
        return MelConfig()
    try:
        values: Any = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{quoted(path)} cannot be read ({shown(error)}): export the model again") from error
    if isinstance(values, dict) and path.name == FILES[1]:
        values = values.get("feature_extractor", {})
    if not isinstance(values, dict):
        raise ModelError(f"{quoted(path)} holds no object of JSON: export the model again")
    given = {each.name: values[each.name] for each in fields(MelConfig) if values.get(each.name) is not None}
    try:
        return MelConfig(**{name: whole(name, value, 1, _MOST[name]) for name, value in given.items()})
    except ConfigError as error:
        raise ModelError(f"{quoted(path)}: {error}") from error


def log_mel(samples: Samples, config: MelConfig, on_block: Callable[[], object] = lambda: None) -> Features:
    """Return the features ``[mels, frames]`` of a whole recording, float32.

    ``samples [n]`` are in [-1, 1] at ``sampling_rate``. A recording of less than a window is filled up with silence. The memory
    beside the samples is that of the result, 32 kB per second with 80 bands, and 10 MB. ``on_block`` is called for every few
    seconds of the recording; an exception in it ends the computation.
    """
    num_frames = config.num_frames(len(samples))
    found = np.full((config.feature_size, num_frames), np.log10(LEAST_POWER), np.float32)
    num_filled = min(num_frames, _ceil(len(samples) + config.n_fft // 2, config.hop_length))
    for start in range(0, num_filled, BLOCK):
        on_block()
        end = min(start + BLOCK, num_filled)
        found[:, start:end] = _log_power(_frames(samples, start, end, config), config)
    if not num_frames:
        return found
    np.maximum(found, found.max() - np.float32(DECADES), out=found)
    found += np.float32(4.0)
    found *= np.float32(0.25)
    return found


def window_of(features: Features, start: int, num_frames: int) -> Features:
    """Return a window ``[mels, num_frames]`` of features from frame ``start``, filled up with zeros after the last frame."""
    found = np.zeros((features.shape[0], num_frames), np.float32)
    part = features[:, start : start + num_frames]
    found[:, : part.shape[1]] = part
    return found


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _frames(samples: Samples, start: int, end: int, config: MelConfig) -> NDArray[np.float32]:
    """Return frames ``[end - start, n_fft]`` as a view: frame ``i`` has its centre at sample ``i * hop_length``."""
    half = config.n_fft // 2
    first = start * config.hop_length - half
    last = (end - 1) * config.hop_length + config.n_fft - half
    block = samples[first:last] if first >= 0 and last <= len(samples) else _reflected(samples, first, last, config)
    return np.lib.stride_tricks.sliding_window_view(block, config.n_fft)[:: config.hop_length]


def _reflected(samples: Samples, first: int, last: int, config: MelConfig) -> Samples:
    """Return samples ``first`` to ``last`` of a recording with silence up to a window, reflected at its two ends."""
    length = max(len(samples), config.window_samples)
    places = np.abs(np.arange(first, last))
    places = np.where(places >= length, 2 * (length - 1) - places, places)
    is_inside = places < len(samples)
    found = np.zeros(last - first, np.float32)
    found[is_inside] = samples[places[is_inside]]
    return found


def _log_power(frames: NDArray[np.float32], config: MelConfig) -> Features:
    """Return the decimal logarithms of the power in each band, ``[mels, frames]``."""
    spectrum = np.fft.rfft(frames * _hann(config.n_fft), axis=1)
    power = np.square(spectrum.real)
    power += np.square(spectrum.imag)
    bands: Features = mel_filters(config) @ power.astype(np.float32, copy=False).T
    np.maximum(bands, np.float32(LEAST_POWER), out=bands)
    return np.log10(bands, out=bands)


@lru_cache(maxsize=8)
def _hann(length: int) -> NDArray[np.float32]:
    """Return the periodic Hann window ``[length]``."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)


@lru_cache(maxsize=8)
def mel_filters(config: MelConfig) -> NDArray[np.float32]:
    """Return the triangular filters ``[mels, n_fft / 2 + 1]`` on Slaney's mel scale, each of area 1, from 0 to 8000 Hz.

    Source: Slaney's Auditory Toolbox, as in librosa, transformers and GenAI.
    """
    edges = _hertz(np.linspace(0.0, _mel(8000.0), config.feature_size + 2))
    bins = np.linspace(0.0, config.sampling_rate // 2, config.n_fft // 2 + 1)
    slopes = edges[:, None] - bins  # [mels + 2, bins]
    widths = np.diff(edges)[:, None]
    rising = -slopes[:-2] / widths[:-1]
    falling = slopes[2:] / widths[1:]
    areas = (edges[2:] - edges[:-2])[:, None] / 2
    return (np.maximum(0.0, np.minimum(rising, falling)) / areas).astype(np.float32)


_BREAK_HERTZ, _BREAK_MEL = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0
"""Slaney's scale is linear up to 1000 Hz, and logarithmic above it."""


def _mel(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < _BREAK_HERTZ else float(_BREAK_MEL + np.log(hertz / _BREAK_HERTZ) / _LOG_STEP)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _BREAK_HERTZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL))
    return np.asarray(np.where(mel < _BREAK_MEL, 200 * mel / 3, above))
