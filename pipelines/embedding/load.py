"""Loads an encoder: reads its files, gets its programs, and runs each of them once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import openvino_genai as genai

from staticllm.compiler_passes.model_kind import EMBEDDINGS, SCORES
from staticllm.core import EncoderShape, OnProgress, ProgressEvent
from staticllm.errors import ConfigError, DeviceError, ModelError, enough_memory, last_line
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.embedding.encoder_files import EncoderFiles
from staticllm.pipelines.embedding.encoder_job import EncoderChoices, EncoderJob, encoder_job
from staticllm.pipelines.embedding.encoder_programs import default_pooling
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.encoder_set import EncoderSet, programs_of
from staticllm.pipelines.model_loader.arguments import read_tokenizer
from staticllm.pipelines.model_loader.loaded import Origin

__all__ = ["EncoderChoices", "LoadedEncoder", "default_pooling", "load_encoder", "make_encoder_runner"]


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
        return _loaded(encoder_job(models_path, device, choices, on_progress))


def _loaded(job: EncoderJob) -> LoadedEncoder:
    begin = time.perf_counter()
    directory, config = job.load.directory, job.load.config
    check_model_dir(directory, True, config.weights_path, config.weights_decryption_callback is not None)
    found = programs_of(job)
    _check_output(job, found)
    _check_pooling(job, found.programs.shape)
    tokenizer = read_tokenizer(directory)
    runner = make_encoder_runner(job, found, max(tokenizer.get_pad_token_id(), 0))
    job.load.on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    programs = found.programs
    return LoadedEncoder(runner, tokenizer, job.files, programs.longest, programs.vocab_size, found.origin)


def make_encoder_runner(job: EncoderJob, found: EncoderSet, pad_id: int = 0) -> EncoderRunner:
    """Bind the programs, run each of them once, and keep their costs beside their blob set, if they have one.

    Raises:
        DeviceError: the device cannot run a program.
    """
    programs, start = found.programs, time.perf_counter()
    pooling = job.pooling or default_pooling(programs.shape)
    runner = EncoderRunner(programs.shape, programs.compiled, pooling, pad_id, programs.longest)
    try:
        runner.warm_up(known=programs.costs)
    except (RuntimeError, MemoryError) as error:
        reason = last_line(error) if isinstance(error, RuntimeError) else "there is not enough memory; lower max_length"
        raise DeviceError(f"{job.load.device} cannot run the encoder: {reason}") from error
    job.load.on_progress(ProgressEvent("warm-up", 1, 1, time.perf_counter() - start))
    if found.kept is not None:
        found.kept.write(runner.costs)
    return runner


def _check_output(job: EncoderJob, found: EncoderSet) -> None:
    """Check that the model computes what the caller can use.

    Raises:
        ModelError: it computes scores instead of embeddings, or the reverse.
    """
    output, wanted = found.programs.shape.output, job.choices.output
    if wanted not in (None, output):
        kind = SCORES if output == "scores" else EMBEDDINGS
        raise ModelError(f"{str(job.load.directory)!r} is {kind.what}: {kind.remedy}")


def _check_pooling(job: EncoderJob, shape: EncoderShape) -> None:
    """Check that a model that pools by itself pools as the user and its files say.

    Raises:
        ConfigError: the user chose another pooling.
        ModelError: its files name another one, and the user said nothing.
    """
    own, chosen, named = shape.pooling, job.choices.pooling, job.files.pooling
    if shape.output == "scores" or own is None:
        return
    if chosen not in (None, own):
        raise ConfigError(
            f"pooling_type {chosen!r}: the graph of the model pools by itself, by {own!r}: leave pooling_type out"
        )
    if chosen is None and named not in (None, own):
        raise ModelError(
            f"{str(job.load.directory)!r}: its files name the pooling {named!r}, and its graph pools by {own!r}: give "
            "pooling_type to say that the graph is right"
        )
