"""The programs of a speech model as jobs: its encoder, its decoder, and the alignment of texts, each with a config of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import openvino as ov

from staticllm.config import MAX_SEQS, StaticLLMConfig, switch, whole
from staticllm.core import CrossWindows, OnProgress
from staticllm.devices import check_device, get_core
from staticllm.errors import ConfigError

from ..launch.arguments import Candidate
from ..loading.kind import LoadJob
from ..loading.window_kind import AlignmentKind, WindowKind
from .speech_files import DECODER, ENCODER, SpeechFiles
from .whisper_config import FALL_BACK, fall_back_value

MAX_WINDOWS = "MAX_WINDOWS"
WORD_TIMESTAMPS = "WORD_TIMESTAMPS"
NUM_WINDOWS = 4
"""The windows that are decoded together, by default. More are decoded in little more time; each takes memory."""
PROMPT_PARTS = 4
"""Tokens of a prompt beside the text before the window: start, language, task, no timestamps."""
OF_TEXT = (
    "adapters", "weights_path", "weights_decryption_callback", "prompt_lookup", "serve_from_cpu",
    "max_prompt_len", "min_response_len",
)  # fmt: skip
"""Fields of the config that speech does not have; the lengths follow from the model's windows."""
ALIGNMENT = "alignment"
Heads: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class SpeechJobs:
    """The jobs of one device, but the decoder's, which is launched."""

    encoder: LoadJob[Any]
    decoder: Candidate
    """The candidate of the decoder."""
    alignment: LoadJob[Any] | None
    """None if no words are wanted."""


def speech_jobs(
    files: SpeechFiles,
    candidate: Candidate,
    num_windows: int,
    heads: Heads,
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
    shares_engine: bool = False,
) -> SpeechJobs:
    """Return the jobs of a speech model for one device.

    ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Args:
        num_windows: The windows that are decoded together.
        heads: Layer and head of the attentions that align text and speech; none if no words are wanted.
        shares_engine: Whether requests of other models may use the device; the encoder then runs in blocks, unless the
            user or a blob set has chosen its programs.

    Raises:
        ConfigError: a field has no meaning for speech.
    """
    config = _checked(candidate.config, files)
    explicit = candidate.explicit | {"max_prompt_len", "min_response_len"}
    device = check(get_core(), candidate.device)
    own = _own_config(config, files, num_windows, ENCODER)
    if shares_engine and own.programs == "auto" and own.blob_path is None:
        own = replace(own, programs="blocks")
    encoder = LoadJob(WindowKind(DECODER), files.directory, device, own, on_progress, explicit)
    decoder = Candidate(candidate.device, _own_config(config, files, num_windows, files.decoder), explicit)
    alignment = None
    if heads:
        own = _own_config(config, files, num_windows, files.decoder, ALIGNMENT)
        kind = AlignmentKind(tuple(heads), files.max_positions)
        alignment = LoadJob(kind, files.directory, device, own, on_progress, explicit)
    return SpeechJobs(encoder, decoder, alignment)


def folder_of(model_file: str) -> str:
    """Return the name of the folder with the blobs of an IR, within that of the whole model."""
    return Path(model_file).stem.removeprefix("openvino_")


def check_speech_config(config: StaticLLMConfig) -> None:
    """Check that all fields that were set have a meaning for speech.

    Raises:
        ConfigError: one has none.
    """
    if wrong := sorted(config.non_default & set(OF_TEXT)):
        raise ConfigError(f"{wrong[0].upper()} has no meaning for speech: leave it out")


def take_num_windows(properties: dict[str, Any], config: Mapping[str, Any] | StaticLLMConfig | None) -> int:
    """Remove ``MAX_WINDOWS`` from the properties, and return it: the windows that are decoded together.

    Raises:
        ConfigError: it is no whole number from 1 to 64.
    """
    given = _taken(MAX_WINDOWS, properties, config)
    return NUM_WINDOWS if given is None else whole(MAX_WINDOWS, given, 1, MAX_SEQS)


def take_has_words(properties: dict[str, Any], config: Mapping[str, Any] | StaticLLMConfig | None) -> bool:
    """Remove ``word_timestamps`` from the properties, and return it: whether calls may ask for the times of words.

    Raises:
        ConfigError: it is neither true nor false.
    """
    given = _taken(WORD_TIMESTAMPS, properties, config)
    return given is not None and switch(WORD_TIMESTAMPS, given)


def take_fall_back(properties: dict[str, Any], config: Mapping[str, Any] | StaticLLMConfig | None) -> dict[str, Any]:
    """Remove the properties that say when a window is decoded again or is silent, and return those that were given: the options
    of calls that do not say it themselves.

    Raises:
        ConfigError: a value is impossible.
    """
    given = {name: _taken(name.upper(), properties, config) for name in FALL_BACK}
    return {name: fall_back_value(name, value) for name, value in given.items() if value is not None}


def with_fall_back(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return properties with Whisper's own thresholds where they say none: for users who want no text where nobody speaks."""
    given = {name.upper() for name in properties}
    return {**{name.upper(): value for name, value in FALL_BACK.items() if name.upper() not in given}, **properties}


def _taken(name: str, properties: dict[str, Any], config: Mapping[str, Any] | StaticLLMConfig | None) -> Any:
    """Remove a property, in any case, from the properties, which win, and a config that is a dict; None if in neither.

    Raises:
        ConfigError: it is given in two spellings, of which one would be ignored.
    """
    found = None
    for values in (config, properties):
        if isinstance(values, dict):
            keys = [key for key in values if str(key).upper() == name]
            if len(keys) > 1:
                raise ConfigError(f"{keys[0]} and {keys[1]} are the same: leave one of them out")
            found = values.pop(keys[0]) if keys else found
    return found


def _checked(config: StaticLLMConfig, files: SpeechFiles) -> StaticLLMConfig:
    """Return the config with lengths for windows.

    Raises:
        ConfigError: a field has no meaning for speech.
    """
    check_speech_config(config)
    most = files.max_positions
    prompt = min(most - 1, most // 2 + PROMPT_PARTS)
    return replace(config, max_prompt_len=prompt, min_response_len=most - prompt)


def _own_config(
    config: StaticLLMConfig, files: SpeechFiles, num_windows: int, name: str, folder_name: str = ""
) -> StaticLLMConfig:
    """Return the config of one of the programs, whose blobs are in a folder of their own."""
    config = replace(config, cross_windows=CrossWindows(name, files.cross_window_len, num_windows))
    if config.blob_path is None and not config.export_blob:
        return config
    folder = Path(config.blob_path or files.directory / "openvino_model.blob")
    if config.export_blob:
        folder.mkdir(parents=True, exist_ok=True)
    return replace(config, blob_path=str(folder / (folder_name or folder_of(name))))
