"""A job describes which encoder is loaded for which device, with everything that the user and the model's files choose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, Pooling, ProgramMode
from staticllm.devices import check_device, get_core, known_properties
from staticllm.errors import ConfigError, ModelError
from staticllm.model_dir import check_model_dir, max_positions
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.blobs.blob_set import is_ours, json_properties
from staticllm.pipelines.blobs.fingerprint import EncoderFingerprint, fingerprint_model, machine_values
from staticllm.pipelines.embedding.encoder_files import EncoderFiles, read_encoder_files
from staticllm.pipelines.model_loader.genai_properties import from_genai
from staticllm.pipelines.model_loader.job import LoadJob
from staticllm.pipelines.programs.compile_plan import phase_properties
from staticllm.pipelines.programs.layout import program_mode
from staticllm.properties import resolve

MAX_LENGTH = 512
"""The most tokens of a text, unless the model or the user says less or more."""
MOST_TOKENS = 8192
"""The most tokens that a text can have at all: a mask has a number for each pair of them, 256 MB for so many."""
OPTIONS = frozenset(
    ["cache_dir", "cache_mode", "cache_limit_gb", "cache_encryption_callbacks", "weights_decryption_callback", "blob_path",
     "export_blob", "integrity_key", "weights_path", "programs", "device_properties"]
)  # fmt: skip
"""The fields of the config that an encoder has."""
_OF_DECODERS = {item.name.upper() for item in fields(StaticLLMConfig) if item.name not in OPTIONS} | {
    "PREFILL_HINT", "GENERATE_HINT"
}  # fmt: skip


@dataclass(frozen=True)
class EncoderChoices:
    """What the user chose; None for what the model's files say. ``names``: what else the caller's constructor takes.

    ``max_length`` is in tokens, ``sizes`` are the batches and rows of the programs, ``properties`` are OpenVINO's and those in
    ``OPTIONS``, by their names in capitals. ``score_tokens`` are the
    tokens whose logits a causal language model returns, in place of hidden states. ``output``: what the caller can use; None for
    either.
    """

    pooling: Pooling | None = None
    is_normalised: bool = True
    max_length: int | None = None
    sizes: Sequence[tuple[int, int]] | None = None
    properties: Mapping[str, object] | None = None
    score_tokens: tuple[int, ...] = ()
    output: Literal["embeddings", "scores"] | None = None
    names: Sequence[str] = ()


@dataclass(frozen=True)
class EncoderJob:
    """One encoder for one device. ``max_length``: the tokens that are asked for; the graph may allow fewer."""

    load: LoadJob
    choices: EncoderChoices
    files: EncoderFiles
    max_length: int

    @property
    def mode(self) -> ProgramMode:
        """``separate`` if each variant has a program of its own, else ``shared``."""
        return program_mode(self.load.device, self.load.config)

    @property
    def properties(self) -> Mapping[str, Any]:
        """OpenVINO's properties of every program."""
        return phase_properties(self.load.device, self.load.config)["prefill"]

    @property
    def can_embed(self) -> bool:
        """Whether somebody says how a decoder's vectors become one: then it is an embedder, not a chat model."""
        return bool(self.choices.pooling or self.files.pooling or self.choices.score_tokens)

    @property
    def pooling(self) -> Pooling | None:
        """The pooling that the user chose, or the model's files name; None if neither does."""
        return self.choices.pooling or self.files.pooling

    @property
    def wants_chunks(self) -> bool:
        """Whether texts may be continued if the model has states: a vector must be that of the last token then."""
        return bool(self.choices.score_tokens) or self.pooling in (None, "last")

    def fingerprint(self) -> EncoderFingerprint:
        """Return the fingerprint that a set must have to be loaded for this job.

        Raises:
            ModelError: a file of the model cannot be read.
        """
        model = fingerprint_model(self.load.directory, self.load.weights)
        properties = sorted(json_properties(self.properties).items())
        sizes = self.choices.sizes
        return EncoderFingerprint(
            ir_digest=model.ir_digest,
            weights_digest=model.weights_digest,
            **machine_values(get_core(), self.load.device),
            dense=_digest_of(self.files),
            score_tokens=", ".join(map(str, self.choices.score_tokens)) or "none",
            max_length=str(self.max_length),
            sizes=("default" if sizes is None else ", ".join(f"{batch}x{rows}" for batch, rows in sizes))
            + (", chunks" if self.wants_chunks and has_states(self.load.directory / MODEL_XML) else ""),
            programs=self.mode,
            normalize=str(self.choices.is_normalised),
            properties=", ".join(f"{name}={value}" for name, value in properties),
        )

    def decided_by(self, chosen: Mapping[str, Any]) -> EncoderJob:
        """Return the job with the choices behind a blob set for whatever the user left out."""
        sizes = self.choices.sizes if chosen["sizes"] is None or self.choices.sizes is not None else chosen["sizes"]
        choices = replace(self.choices, sizes=None if sizes is None else [(batch, rows) for batch, rows in sizes])
        max_length = chosen["max_length"] if self.choices.max_length is None else self.max_length
        return replace(self, choices=choices, max_length=max_length)


def encoder_job(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> EncoderJob:
    """Check directory, device and properties, and read what the model's files say.

    ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Raises:
        ModelError: a file of the model is missing or damaged.
        DeviceError: ``check`` refuses the device.
        ConfigError: a property is unknown, or is no option of an encoder.
    """
    if isinstance(models_path, (str, os.PathLike)) and is_ours(Path(models_path)):
        raise ConfigError(
            f"{str(models_path)!r} is a blob set: give the directory of its model, and the set with BLOB_PATH"
        )
    name = check(get_core(), device)
    config = encoder_config(name, choices.properties or {}, choices.names)
    is_encrypted = config.weights_decryption_callback is not None
    directory = check_model_dir(models_path, False, config.weights_path, is_encrypted)
    files, limit = read_encoder_files(directory), max_positions(directory)
    if choices.max_length is not None and choices.max_length > MOST_TOKENS:
        raise ConfigError(
            f"max_length={choices.max_length}: must be at most {MOST_TOKENS}, because masks grow with its square; split the texts"
        )
    longest = choices.max_length or min(files.max_length or min(limit or MAX_LENGTH, MAX_LENGTH), MOST_TOKENS)
    return EncoderJob(LoadJob(directory, name, config, on_progress), choices, files, longest)


def encoder_config(device: str, properties: Mapping[str, object], names: Sequence[str] = ()) -> StaticLLMConfig:
    """Return the config of an encoder. ``names``: other options, for which a misspelled property may stand.

    Raises:
        ConfigError: a property is unknown, is no option of an encoder, or its value is impossible.
    """
    ours = from_genai(properties)
    for name in ours:
        if name in _OF_DECODERS:
            raise ConfigError(f"{name} is an option of decoders, this model is an encoder: leave it out")
    others = (*(name.upper() for name in OPTIONS), *names)
    resolved = resolve(ours, known_properties(get_core(), device), others)
    if resolved.config.programs not in ("auto", "separate", "shared"):
        raise ConfigError(f"PROGRAMS={resolved.config.programs!r}: an encoder has 'separate' or 'shared' programs")
    return resolved.config


def has_states(path: Path) -> bool:
    """Return whether the IR at this path reads states, as a decoder that was exported with past does.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        return b'type="ReadValue"' in path.read_bytes()
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


def _digest_of(files: EncoderFiles) -> str:
    """Return a digest of the Dense modules, which are part of the programs; ``none`` if there are none."""
    if not files.dense:
        return "none"
    digest = hashlib.blake2b(digest_size=32)
    for dense in files.dense:
        arrays = [b"" if array is None else array.tobytes() for array in (dense.weight, dense.bias, dense.residual)]
        sizes = [len(array) for array in arrays]
        digest.update(repr((dense.weight.shape, sizes, dense.activation, dense.has_residual)).encode())
        digest.update(b"".join(arrays))
    return digest.hexdigest()
