"""Loads an encoder: reads its files, gets its programs, and runs each of them once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import openvino_genai as genai

from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import DeviceError, enough_memory
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.embedding.encoder_files import EncoderFiles
from staticllm.pipelines.embedding.encoder_job import encoder_job
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.launch.arguments import read_tokenizer
from staticllm.pipelines.loading.kind import Origin
from staticllm.pipelines.loading.load import load_job


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder that is ready to run, its tokenizer, and what its files say. ``max_length`` is in tokens."""

    runner: EncoderRunner
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    max_length: int
    vocab_size: int | None
    origin: Origin = "compiled"


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
        directory, config = job.directory, job.config
        check_model_dir(directory, True, config.weights_path, config.weights_decryption_callback is not None)
        tokenizer = read_tokenizer(directory)
        kind = replace(job.kind, pad_id=max(tokenizer.get_pad_token_id(), 0))
        loaded = load_job(replace(job, kind=kind))
        loaded.keep_costs()
        on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    shape = loaded.programs.shape
    return LoadedEncoder(loaded.runner, tokenizer, kind.files, shape.longest, shape.vocab_size, loaded.origin)
