"""What the commands that describe, compile and verify models ask of a speech model, which has parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import OnProgress, ProgramMode
from staticllm.devices import check_device, get_core, kind, known_properties
from staticllm.errors import ModelError, NumericalError, last_line
from staticllm.model_dir import read_model
from staticllm.ports import BEAM_IDX, INPUT_IDS, LOGITS
from staticllm.properties import resolve

from ...kvcache.sequence import Conditions
from ..launch.arguments import Candidate
from ..loading.decoder_kind import job_of
from ..loading.kind import LoadJob
from ..loading.load import load_job
from ..speech.speech_files import DECODER, ENCODER, SpeechFiles, speech_files
from ..speech.speech_jobs import ALIGNMENT, folder_of, speech_jobs, take_has_words, take_num_windows
from ..speech.whisper_config import WhisperGenerationConfig, alignment_heads
from ..whisper_pipeline import StaticWhisperPipeline
from .diagnosis import OTHER_TOLERANCE, TOLERANCE, Diagnosis, Jobs, Trial, in_mode
from .reference import EXACT
from .reports import Verdict, difference

PROMPT, STEPS = 6, 18
"""Tokens of the text that is compared: those of its first call, and those that follow one by one."""
ORDINARY = 1000
"""Token ids below this are text in every vocabulary that is not a toy."""
SECOND = 16000
"""Samples of the sound that a model is tried with."""


class SpeechDiagnosis(Diagnosis[Any]):
    """The questions about a speech model, whose parts are of kinds of their own."""

    def jobs(
        self,
        directory: Path,
        device: str,
        properties: Mapping[str, Any],
        on_progress: OnProgress = lambda event: None,
        check: Callable[[ov.Core, object], str] = check_device,
    ) -> Jobs:
        """Return the jobs of the encoder, of the decoder, and with ``WORD_TIMESTAMPS`` of the alignment of words.

        ``properties`` are those of ``StaticWhisperPipeline``.

        Raises:
            ModelError: the directory is no speech model.
            DeviceError: the device is not on this machine.
            ConfigError: a property is unknown or has an impossible value.
        """
        files = speech_files(directory)
        given = dict(properties)
        num_windows = take_num_windows(given, None)
        heads = alignment_heads(WhisperGenerationConfig(files.file)) if take_has_words(given, None) else ()
        name = check(get_core(), device)
        resolved = resolve(given, known_properties(get_core(), name))
        candidate = Candidate(name, resolved.config, resolved.explicit)
        found = speech_jobs(files, candidate, num_windows, heads, on_progress, check)
        own = found.decoder
        decoder = job_of(files.directory, name, own.config, on_progress, own.explicit, check)
        parts = {folder_of(ENCODER): found.encoder, folder_of(files.decoder): decoder}
        return Jobs(self, parts if found.alignment is None else {**parts, ALIGNMENT: found.alignment})

    def what(self, directory: Path) -> str:
        """Return what it is, with an article."""
        return "a speech model"

    def verdicts_of(self, jobs: Jobs, modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
        """Compare the logits of a text about a window of noise with those of the original in f32, and yield a verdict per mode.

        Raises:
            ModelError: the CPU cannot run the original.
            StaticLLMError: what loading the programs raises.
        """
        encoder, decoder, *_ = jobs.values()
        return _verdicts(encoder, decoder, modes)

    def try_model(self, directory: Path, device: str, on_progress: OnProgress) -> Trial:
        """Load the model, and let it transcribe a second of noise.

        Raises:
            StaticLLMError: as for ``StaticWhisperPipeline`` and its ``generate``.
        """
        with StaticWhisperPipeline(directory, device, on_progress=on_progress) as pipeline:
            sound = np.random.default_rng(0).uniform(-0.1, 0.1, SECOND).astype(np.float32)
            pipeline.generate(sound, max_new_tokens=8)
        return Trial(" with a second of noise")


def _verdicts(encoder: LoadJob[Any], decoder: LoadJob[Any], modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
    tolerance = TOLERANCE if kind(decoder.device) == "CPU" else OTHER_TOLERANCE
    original = _Original(speech_files(decoder.directory))
    random = np.random.default_rng(0)
    features = random.uniform(-1, 1, original.features_shape).astype(np.float32)
    for mode in modes:
        windows = load_job(in_mode(encoder, mode)).runner
        loaded = load_job(in_mode(decoder, mode))
        runner = loaded.runner
        frames = windows.run(features)
        if frames is None:
            raise NumericalError("the encoder computed values that are not finite: try INFERENCE_PRECISION_HINT='f32'")
        sequence = runner.cache.open(Conditions(cross_window=runner.cache.cross.add(frames)))
        tokens = random.integers(0, min(ORDINARY, loaded.programs.shape.vocab_size), PROMPT + STEPS).tolist()
        found = [runner.prefill(sequence, tokens[:PROMPT]).copy()]
        found += [runner.decode(sequence, token).copy() for token in tokens[PROMPT:]]
        expected = original.logits(features, tokens)[PROMPT - 1 :]
        share = float(np.abs(np.stack(found) - expected).max() / np.ptp(expected))
        yield difference(f"{mode}: {len(found)} tokens about a window", share, tolerance)


class _Original:
    """The exported encoder and decoder, on the CPU in f32.

    Raises:
        ModelError: the CPU cannot compile them.
    """

    def __init__(self, files: SpeechFiles) -> None:
        try:
            self._encoder, self._decoder = (
                get_core().compile_model(read_model(get_core(), files.directory, model_file=name), "CPU", dict(EXACT))
                for name in (ENCODER, DECODER)
            )
        except RuntimeError as error:
            raise ModelError(f"the CPU cannot compile the original: {last_line(error)}") from error

    @property
    def features_shape(self) -> tuple[int, int]:
        """Bands and columns of a window."""
        shape = self._encoder.inputs[0].get_partial_shape()
        return shape[1].get_length(), shape[2].get_length()

    def logits(self, features: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits ``[tokens, vocab]`` of a text about a window."""
        hidden = self._encoder(features[None])[0]
        feeds: dict[Any, NDArray[Any]] = {}
        for port in self._decoder.inputs:
            if INPUT_IDS in port.get_names():
                feeds[port] = np.array([tokens], np.int64)
            elif BEAM_IDX in port.get_names():
                feeds[port] = np.zeros(1, np.int32)
            elif len(port.get_partial_shape()) == hidden.ndim:
                feeds[port] = hidden
            else:
                raise ModelError(f"the decoder has the input {port.get_any_name()!r}, which is not known")
        request = self._decoder.create_infer_request()
        found = request.infer(feeds)
        logits = next(value for port, value in found.items() if LOGITS in port.get_names())
        first: NDArray[np.float32] = logits[0].copy()
        return first
