"""Lowers an encoder, and chooses the variants of its programs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import openvino as ov

from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.model_kind import check_kind
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.core import EncoderShape, EncoderVariant, Part, Pooling, ProgramMode, ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import ConfigError
from staticllm.model_dir import read_model
from staticllm.pipelines.embedding.packing.chunks import MOST_TOKENS
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.programs.compile import CompileOptions, CompilePlan
from staticllm.pipelines.programs.keep_small_constants import keep_small_constants
from staticllm.pipelines.programs.layout import program_mode
from staticllm.ports import INPUT_IDS
from staticllm.system.mapped_weights import MappedWeights

EncoderPlan: TypeAlias = CompilePlan[EncoderVariant, EncoderShape]
SIZES = ((1, 16), (1, 32), (1, 64), (1, 128), (2, 128), (4, 128), (8, 128), (1, 256), (1, 512))
"""The batches and rows of the programs. Sequences of 128 are the fastest, because attention is quadratic in their length."""
MORE_ROWS = (12, 20, 24, 28, 36, 40, 44, 48, 56, 72, 80, 88, 96, 112, 160, 192, 224)
SHARED_SIZES = (*SIZES, *((1, rows) for rows in MORE_ROWS))
"""The same where one program runs all sizes, so that another one costs no memory: a text alone has fewer idle rows."""
TOKENS_PER_TEXT = 8
"""A call holds at most one text for so many of its tokens."""
CHUNK_ROWS, SHORT_CHUNKS = 512, (64, 256)
"""The rows of calls that continue a text, and of others for its end, where another size costs no memory."""
REST_ROWS, BEGINNINGS = (8, 12, 16, 24, 32, 48, 64, 96, 128), (32, 64, MOST_TOKENS)
"""There, too: the rows of calls that run the rest of a text whose beginning is kept, and the tokens of such beginnings."""


@dataclass(frozen=True)
class Wanted:
    """What a plan is made for. ``max_length``: the tokens of a text that are asked for; the graph may allow fewer.

    ``given_length`` and ``sizes`` are those that the user gave, None for the usual ones. ``can_embed``: whether it is said how a
    decoder's vectors become one. ``wants_chunks``: whether texts may be continued if the model has states.
    """

    lowering: EncoderOptions
    max_length: int
    given_length: int | None
    sizes: Sequence[tuple[int, int]] | None
    pooling: Pooling | None
    can_embed: bool
    wants_chunks: bool


def plan_encoder(
    job: LoadJob[Any], wanted: Wanted, properties: Mapping[Part, Mapping[str, Any]], for_blobs: bool = False
) -> EncoderPlan:
    """Read and lower the model, and choose its variants. ``for_blobs``: whether its programs will be exported.

    Raises:
        ModelError: the model cannot be read, or is no encoder.
        UnsupportedModelError: a pass cannot lower the model.
        ConfigError: ``max_length`` is more than the model can have.
    """
    config, begin = job.config, time.perf_counter()
    model = read_model(get_core(), job.directory, config.weights_path, config.weights_decryption_callback)
    check_kind(model, job.directory, "encoder", wanted.can_embed)
    if for_blobs:
        keep_small_constants(model)
    weights, vocab_size, read = MappedWeights(model), _vocab_size(model), time.perf_counter()
    job.on_progress(ProgressEvent("read", 1, 1, read - begin))
    mode = program_mode(job.device, config)
    lowered = lower_encoder(model, wanted.lowering)
    longest = _longest(wanted.max_length, wanted.given_length, lowered.shape.max_rows)
    unsafe = () if mode == "shared" else lowered.shape.unsafe_rows
    longest -= longest in unsafe
    sizes = wanted.sizes or (SHARED_SIZES if mode == "shared" else SIZES)
    sizes = [size for size in sizes if size[1] not in unsafe]
    continuing = _continuing(wanted, mode, lowered.shape, longest)
    if continuing:
        sizes = [size for size in sizes if size[1] <= CHUNK_ROWS]
        variants = (*variants_for(min(longest, CHUNK_ROWS), sizes), *continuing)
    else:
        lowered = replace(lowered, shape=replace(lowered.shape, past=()), continued=None)
        variants = variants_for(longest, sizes)
    lowered = replace(lowered, shape=replace(lowered.shape, longest=longest, vocab_size=vocab_size))
    job.on_progress(ProgressEvent("passes", 1, 1, time.perf_counter() - read))
    return CompilePlan(lowered, CompileOptions(job.device, mode, None, properties), variants, weights)


def _continuing(wanted: Wanted, mode: ProgramMode, shape: EncoderShape, longest: int) -> tuple[EncoderVariant, ...]:
    """Return the variants that continue texts. A vector that needs all tokens, such as a mean, cannot be computed in parts."""
    is_wanted = wanted.wants_chunks and CHUNK_ROWS not in shape.unsafe_rows
    if not shape.past or not is_wanted or (shape.pooling or wanted.pooling or default_pooling(shape)) != "last":
        return ()
    return continuing_for(longest, mode == "shared")


def continuing_for(longest: int, is_shared: bool) -> tuple[EncoderVariant, ...]:
    """Return the variants that continue texts of up to ``longest`` tokens: at most one, or several if they share a program.

    In a shared program, a text can go on after any number of its tokens: a beginning may be kept, and chunks may be short.
    """
    if not is_shared:
        most = -(-longest // CHUNK_ROWS) * CHUNK_ROWS - CHUNK_ROWS  # all chunks but the last one are full
        return (EncoderVariant(1, CHUNK_ROWS, 1, most),) if most else ()
    past = [min(CHUNK_ROWS, longest)]
    while past[-1] < longest:
        past.append(min(2 * past[-1], longest))
    beginnings = [seen for seen in BEGINNINGS if seen < past[0]]
    rests = {
        EncoderVariant(1, rows, 1, seen) for rows in REST_ROWS for seen in (*beginnings, past[0]) if rows <= longest
    }
    if longest <= CHUNK_ROWS:
        return tuple(sorted(rests))
    return tuple(
        sorted(rests | {EncoderVariant(1, rows, 1, seen) for rows in (*SHORT_CHUNKS, CHUNK_ROWS) for seen in past})
    )


def default_pooling(shape: EncoderShape) -> Pooling:
    """Return the last token for a model whose tokens see only earlier ones, else the first, as GenAI does."""
    return "last" if all(mask.after == 0 for mask in shape.masks) else "first"


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
