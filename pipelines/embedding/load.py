"""Loads an encoder: reads its files, lowers it, and compiles its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import openvino as ov
import openvino_genai as genai

from staticllm.compiler_passes.lower_encoder import LoweredEncoder, lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.core import EncoderVariant, Pooling
from staticllm.devices import default_mode
from staticllm.errors import ConfigError, DeviceError, ModelError, last_line
from staticllm.model_dir import MODEL_XML, check_model_dir, max_positions
from staticllm.pipelines.embedding.encoder_files import EncoderFiles, read_encoder_files
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.ports import INPUT_IDS

SIZES = ((1, 16), (1, 32), (1, 64), (1, 128), (2, 128), (4, 128), (8, 128), (1, 256), (1, 512))
"""The batches and rows of the programs. Sequences of 128 are the fastest, because attention is quadratic in their length."""
TOKENS_PER_TEXT = 8
"""A call holds at most one text for so many of its tokens."""
MAX_LENGTH = 512
"""The most tokens of a text, unless the model or the user says less or more."""


@dataclass(frozen=True)
class LoadedEncoder:
    """An encoder that is ready to run, its tokenizer, and what its files say."""

    runner: EncoderRunner
    lowered: LoweredEncoder
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    max_length: int
    vocab_size: int | None


@dataclass(frozen=True)
class EncoderChoices:
    """What the user chose; None for what the model's files say.

    ``max_length`` is in tokens, ``sizes`` are the batches and rows of the programs, ``properties`` are OpenVINO's.
    ``score_tokens`` are the tokens whose logits a causal language model returns, in place of hidden states.
    """

    pooling: Pooling | None = None
    is_normalised: bool = True
    max_length: int | None = None
    sizes: Sequence[tuple[int, int]] | None = None
    properties: Mapping[str, object] | None = None
    score_tokens: tuple[int, ...] = ()


def load_encoder(directory: Path, device: str, choices: EncoderChoices) -> LoadedEncoder:
    """Load an encoder and run each of its programs once.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        ConfigError: an option is impossible for this model.
        DeviceError: the device cannot compile or run the model.
    """
    check_model_dir(directory)
    files, limit = read_encoder_files(directory), max_positions(directory)
    core = ov.Core()
    try:
        model = core.read_model(directory / MODEL_XML)
    except RuntimeError as error:
        raise ModelError(f"{directory / MODEL_XML}: {last_line(error)}") from error
    vocab_size = _vocab_size(model)
    longest = choices.max_length or files.max_length or min(limit or MAX_LENGTH, MAX_LENGTH)
    options = EncoderOptions(longest, files.dense, choices.is_normalised, choices.score_tokens)
    lowered = lower_encoder(model, options)
    longest = _longest(longest, choices.max_length, lowered.shape.max_rows)
    unsafe = () if default_mode(device) == "shared" else lowered.shape.unsafe_rows
    longest -= longest in unsafe
    variants = variants_for(longest, [size for size in choices.sizes or SIZES if size[1] not in unsafe])
    compiled = _compile(core, lowered, variants, device, dict(choices.properties or {}))
    pooling = choices.pooling or files.pooling or _default_pooling(lowered)
    if lowered.shape.head == "cut" and not (choices.pooling or files.pooling):
        raise ModelError(
            "the model gives logits, as a chat model does, and its folder has no 1_Pooling/config.json: if it is an embedder, "
            "give pooling_type=PoolingType.LAST_TOKEN"
        )
    tokenizer = genai.Tokenizer(directory)
    runner = EncoderRunner(lowered.shape, compiled, pooling, max(tokenizer.get_pad_token_id(), 0))
    try:
        runner.warm_up()
    except RuntimeError as error:
        raise DeviceError(f"{device} cannot run the encoder: {last_line(error)}") from error
    return LoadedEncoder(runner, lowered, tokenizer, files, longest, vocab_size)


def variants_for(longest: int, sizes: Sequence[tuple[int, int]] = SIZES) -> tuple[EncoderVariant, ...]:
    """Return a variant for each of ``sizes`` that is useful for texts of up to ``longest`` tokens, and one that holds these."""
    useful = {(batch, rows) for batch, rows in sizes if rows <= longest}
    if all(rows < longest for _, rows in useful):
        useful.add((1, longest))
    return tuple(sorted(EncoderVariant(b, rows, max(b, b * rows // TOKENS_PER_TEXT)) for b, rows in useful))


def _longest(asked: int, given: int | None, possible: int) -> int:
    """Return the most tokens of a text.

    Raises:
        ConfigError: the user gave more than the model can have.
    """
    if given is not None and given > possible:
        raise ConfigError(f"max_length={given}: the model was made for texts of at most {possible} tokens; lower it")
    return min(asked, possible)


def _default_pooling(lowered: LoweredEncoder) -> Pooling:
    """Return the last token for a model whose tokens see only earlier ones, else the first, as GenAI does."""
    return "last" if all(mask.after == 0 for mask in lowered.shape.masks) else "first"


def _compile(
    core: ov.Core,
    lowered: LoweredEncoder,
    variants: tuple[EncoderVariant, ...],
    device: str,
    properties: dict[str, object],
) -> dict[EncoderVariant, ov.CompiledModel]:
    """Return the program of each variant: one for all where sizes may be dynamic, else one each."""
    try:
        if default_mode(device) == "shared":
            shared = core.compile_model(lowered.share(variants), device, properties)
            return dict.fromkeys(variants, shared)
        return {v: core.compile_model(lowered.specialise(v), device, properties) for v in variants}
    except RuntimeError as error:
        raise DeviceError(f"{device} cannot compile the encoder: {last_line(error)}") from error


def _vocab_size(model: ov.Model) -> int | None:
    """Return the number of rows of the table of token vectors; None if it is not found."""
    ids = next((port for port in model.inputs if INPUT_IDS in port.get_names()), None)
    if ids is None:
        return None
    consumers = [target.get_node() for target in ids.get_target_inputs()]
    while consumers:
        node = consumers.pop()
        if node.get_type_name() == "Gather":
            dim = node.input_value(0).get_partial_shape()[0]
            return dim.get_length() if dim.is_static else None
        if node.get_type_name() == "Convert":
            consumers += [target.get_node() for target in node.output(0).get_target_inputs()]
    return None
