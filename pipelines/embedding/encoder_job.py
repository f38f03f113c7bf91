"""Checks and loads an encoder. A job names the encoder and the device, with all choices of the user and the model's files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import openvino as ov
import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, ProgressEvent
from staticllm.devices import check_device, get_core, known_properties
from staticllm.errors import ConfigError, DeviceError, enough_memory, quoted
from staticllm.model_dir import max_positions, path_of
from staticllm.model_files.model_at import check_model_dir
from staticllm.properties import resolve

from ...compiler_passes.artifacts.blob_set import is_ours
from ..launch.arguments import read_tokenizer
from ..launch.genai_properties import from_genai
from ..loading.kind import LoadJob, ProgramsFrom
from ..loading.load import load_job
from .encoder_files import EncoderFiles, read_encoder_files
from .encoder_kind import EncoderChoices, EncoderJob, EncoderKind
from .encoder_runner import EncoderRunner

MAX_LENGTH = 512
"""The most tokens of a text, unless the model or the user says less or more."""
MOST_TOKENS = 8192
"""The most tokens that a text can have at all: a mask has a number for each pair of them, 256 MB for this number."""
OPTIONS = frozenset(
    ["cache_dir", "cache_mode", "cache_limit_gb", "cache_encryption_callbacks", "weights_decryption_callback", "blob_path",
     "export_blob", "integrity_key", "weights_path", "programs", "device_properties"]
)  # fmt: skip
"""The fields of the config that an encoder has."""
OF_DECODERS = {item.name.upper() for item in fields(StaticLLMConfig) if item.name not in OPTIONS} | {
    "PREFILL_HINT", "GENERATE_HINT"
}  # fmt: skip
"""The names of options that only decoders have."""


def encoder_job(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> EncoderJob:
    """Check directory, device and properties, and read the model's files.

    ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Raises:
        ModelError: a file of the model is missing or damaged.
        DeviceError: ``check`` refuses the device.
        ConfigError: a property is unknown, or is no option of an encoder.
    """
    if is_ours(path_of(models_path)):
        raise ConfigError(
            f"{quoted(models_path)} is a blob set: give the directory of its model, and the set with BLOB_PATH"
        )
    name = check(get_core(), device)
    config = encoder_config(name, choices.properties or {}, choices.names)
    is_encrypted = config.weights_decryption_callback is not None
    directory = check_model_dir(models_path, False, config.weights_path, is_encrypted, on_progress)
    files = read_encoder_files(directory)
    limit = max_positions(directory)
    if choices.max_length is not None and choices.max_length > MOST_TOKENS:
        raise ConfigError(
            f"max_length={choices.max_length}: must be at most {MOST_TOKENS}, because masks grow with its square; split the texts"
        )
    longest = choices.max_length or min(files.max_length or min(limit or MAX_LENGTH, MAX_LENGTH), MOST_TOKENS)
    return LoadJob(EncoderKind(choices, files, longest), directory, name, config, on_progress)


def encoder_config(device: str, properties: Mapping[str, object], names: Sequence[str] = ()) -> StaticLLMConfig:
    """Return the config of an encoder.

    Args:
        names: Other options, for which a misspelled property may stand.

    Raises:
        ConfigError: a property is unknown, is no option of an encoder, or its value is impossible.
    """
    ours = from_genai(properties)
    for name in ours:
        if name in OF_DECODERS:
            raise ConfigError(f"{name} is an option of decoders, this model is an encoder: leave it out")
    others = (*(name.upper() for name in OPTIONS), *names)
    resolved = resolve(ours, known_properties(get_core(), device), others)
    if resolved.config.programs not in ("auto", "separate", "blocks", "shared"):
        raise ConfigError(
            f"PROGRAMS={resolved.config.programs!r}: an encoder has 'separate', 'blocks' or 'shared' programs"
        )
    return resolved.config


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder that is ready to run, its tokenizer, and the settings in its files."""

    runner: EncoderRunner
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    max_length: int
    """In tokens."""
    vocab_size: int | None
    programs_from: ProgramsFrom = "compiled"


def load_encoder(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    on_progress: OnProgress = lambda event: None,
) -> LoadedEncoder:
    """Load an encoder and run each of its programs once.

    Raises:
        ModelError: a file of the model is missing or damaged, or the model is no encoder.
        UnsupportedModelError: a pass cannot lower the model.
        ConfigError: an option is unknown, or impossible for this model.
        DeviceError: the device is missing, or cannot compile or run the model.
        BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else, or exported blobs failed verification.
    """
    with enough_memory(DeviceError, f"the encoder on {device}"):
        begin = time.perf_counter()
        job = encoder_job(models_path, device, choices, on_progress)
        directory = job.directory
        config = job.config
        check_model_dir(directory, True, config.weights_path, config.weights_decryption_callback is not None)
        tokenizer = read_tokenizer(directory)
        kind = replace(job.kind, pad_id=max(tokenizer.get_pad_token_id(), 0))
        loaded = load_job(replace(job, kind=kind))
        loaded.keep_costs()
        on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    shape = loaded.programs.shape
    return LoadedEncoder(loaded.runner, tokenizer, kind.files, shape.longest, shape.vocab_size, loaded.programs_from)
