"""Gives GenAI's tests of Whisper local models, recordings and a reference on them, and our class.

The tests compare with transformers, on recordings of a hub. Here the reference is GenAI's own pipeline on the CPU, the recordings
are local, and all pipelines compute in f32. Tests of languages get a multilingual model. Tests of ``ASRPipeline`` are skipped,
because there is no class of ours for it.
"""

from __future__ import annotations

import os
import sys
import types
import wave
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import openvino_genai as genai
import pytest
from numpy.typing import NDArray

OWN = genai.WhisperPipeline
MODEL = os.environ.get("GENAI_SUITE_SPEECH", "")
LANGUAGES = os.environ.get("GENAI_SUITE_LANGUAGES", "")
RECORDINGS = Path(os.environ.get("GENAI_SUITE_RECORDINGS", "."))
FORMS = {True: "stateful", False: "three_files"}
F32: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
FILES = ("test_whisper_pipeline", "test_whisper_pipeline_static")
NAMING_LANGUAGES = ("test_language_mode", "test_return_timestamps_max_new_tokens")
"""Tests that give an option ``language`` without a recording of the multilingual data set."""
NUM_CLIPS = 30
Samples = NDArray[np.float32]


class Rows(list[Any]):
    """A data set with the one call of its class that the tests use."""

    def take(self, count: int) -> Rows:
        return Rows(self[:count])


class Current:
    """The test that runs: it decides which model stands for that of the hub."""

    item: pytest.Item | None = None

    @classmethod
    def names_language(cls) -> bool:
        assert cls.item is not None, "pytest_runtest_protocol sets it"
        is_heard = "sample_from_multilingual_dataset" in getattr(cls.item, "fixturenames", ())
        return is_heard or cls.item.name.startswith(NAMING_LANGUAGES)

    @classmethod
    def is_static(cls) -> bool:
        return cls.item is not None and cls.item.path.name == f"{FILES[1]}.py"


class Reference:
    """GenAI's own pipeline on the CPU with the calls of transformers' pipeline for speech."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = types.SimpleNamespace(config=types.SimpleNamespace(), detect_language=self._language)

    def __call__(
        self,
        sample: Samples,
        return_timestamps: bool = False,
        generate_kwargs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> dict[str, Any]:
        given = {name: value for name, value in {**(generate_kwargs or {}), **rest}.items() if value is not None}
        if "language" in given:
            given["language"] = f"<|{given['language']}|>"
        given.pop("use_model_defaults", None)
        found = self._pipe.generate(sample, return_timestamps=return_timestamps, **given)
        spans = [
            {
                "text": each.text,
                "timestamp": (round(each.start_ts, 2), None if each.end_ts < 0 else round(each.end_ts, 2)),
            }
            for each in found.chunks or []
        ]
        return {"text": found.texts[0], **({"chunks": spans} if return_timestamps else {})}

    @cached_property
    def _pipe(self) -> genai.WhisperPipeline:
        return OWN(self._folder, "CPU", **F32)

    def feature_extractor(self, sample: Samples) -> dict[str, Samples]:
        return {"input_features": sample}

    def _language(self, sample: Samples) -> list[int]:
        language = self._pipe.generate(sample, max_new_tokens=1).language
        return [self._pipe.get_generation_config().lang_to_id[f"<|{language}|>"]]


def place_of(is_stateful: bool) -> Path:
    """Return the directory of the model that stands for the one of the current test."""
    folder, option = (LANGUAGES, "--speech-languages") if Current.names_language() else (MODEL, "--speech")
    if not folder:
        pytest.skip(f"there is no local model for it: give {option}")
    return Path(folder) / FORMS[is_stateful]


@cache
def reference(folder: Path) -> Reference:
    return Reference(folder)


@cache
def loaded(folder: Path, has_words: bool) -> Any:
    return genai.WhisperPipeline(folder, "CPU", ENABLE_MMAP=False, **({"word_timestamps": True} if has_words else {}))


def read_model(params: Any, word_timestamps: bool = False, pipeline_type: Any = None) -> tuple[Any, ...]:
    """Return what the tests' function of this use returns: name, directory, reference and pipeline."""
    if pipeline_type is not None and pipeline_type.name == "ASR":
        pytest.skip("ASRPipeline is another class")
    folder = place_of(is_stateful=True)
    return params[0], folder, reference(folder), loaded(folder, word_timestamps)


def saved_model(params: Any, stateful: bool = False, **rest: Any) -> tuple[str, Path]:
    return params[0], place_of(stateful)


def samples_of(path: Path) -> Samples:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / np.float32(32768)


@cache
def clips(is_long: bool) -> list[Samples]:
    """Return the recordings, and mixtures of two of them with noise; of all of them in other orders if they shall be long."""
    recorded = [samples_of(path) for path in sorted(RECORDINGS.glob("*.wav"))]
    found = [] if is_long else [*recorded]
    rng = np.random.default_rng(0)
    while len(found) < NUM_CLIPS:
        chosen = rng.permutation(len(recorded))[: len(recorded) if is_long else 2]
        mixed = np.concatenate([recorded[index] for index in chosen])
        found.append(mixed + rng.normal(0, 0.003, len(mixed)).astype(np.float32))
    return found


def data_set(*arguments: Any, **named: Any) -> Rows:
    return Rows({"audio": {"array": clip}} for clip in clips(is_long=False))


def begin(item: pytest.Item) -> None:
    Current.item = item


def replace_references() -> None:
    """Replace the names of the tests of Whisper that would need torch, a network or transformers."""
    modules = {name: vars(sys.modules[name]) for name in FILES if name in sys.modules}
    versions = types.SimpleNamespace(version=lambda package: "4.46")  # with a later one, the tests compare no times
    for names in modules.values():
        names.update(
            read_asr_model=read_model,
            load_and_save_whisper_model=saved_model,
            get_audio_dataset=clips,
            get_multilingual_audio_dataset=lambda language: clips(is_long=False)[:1],
            load_dataset_via_snapshot=data_set,
            metadata=versions,
        )


def put_our_class() -> None:
    """Replace GenAI's class by ours, which runs tests for the NPU on the CPU. The CPU's in the same tests is a reference."""
    from staticllm import StaticWhisperPipeline

    def pipeline(models_path: Any, device: str = "CPU", *arguments: Any, **named: Any) -> Any:
        if Current.is_static() and device == "CPU":
            return OWN(models_path, device, *arguments, **F32, **named)
        return StaticWhisperPipeline(models_path, "CPU", *arguments, **F32, **named)

    genai.WhisperPipeline = pipeline  # type: ignore[misc,assignment]


def put_own_class() -> None:
    """Let GenAI's class compute in f32."""

    def pipeline(models_path: Any, device: str = "CPU", *arguments: Any, **named: Any) -> Any:
        return OWN(models_path, device, *arguments, **F32, **named)

    genai.WhisperPipeline = pipeline  # type: ignore[misc,assignment]
