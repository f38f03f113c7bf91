"""Random calls of an encoder's programs, and the check of their ports."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.ports import (
    EMBEDDINGS,
    SCORES,
    encoder_input_names,
    encoder_shape_of,
    past_names,
    present_names,
)

from ...compiler_passes.compiling.chain import AnyProgram
from .packing.chunks import ChunkBuffers, ChunkCache, ContinuedText, new_presents
from .packing.encoder_buffers import EncoderBuffers
from .packing.tokenized_text import TokenizedText

FEW_IDS = 50
"""Token ids below this are used to compare a blob with its program, if the model has that many."""
MOST_PAST = 512
"""The most past rows that are not empty in such a comparison."""


def random_texts(shape: EncoderShape, variant: EncoderVariant) -> dict[str, NDArray[Any]]:
    """Return the inputs of a call that is full of random tokens, by port name: several texts per sequence if that is allowed.

    The values are the same in every process.
    """
    random = np.random.default_rng(0)
    num_ids = min(FEW_IDS, shape.vocab_size or FEW_IDS)
    if variant.past:
        return _random_chunk(shape, variant, num_ids)
    per_sequence = min(variant.texts // variant.batch, 2, variant.rows) if shape.is_packable else 1
    cuts = np.linspace(0, variant.rows, max(per_sequence, 1) + 1).astype(int)
    sequences = [
        [TokenizedText(random.integers(0, num_ids, end - start)) for start, end in pairwise(cuts)]
        for _ in range(variant.batch)
    ]
    buffers = EncoderBuffers(shape, variant, 0)
    buffers.fill(sequences, shape.pooling or "mean")
    return _inputs(shape, buffers)


def _random_chunk(shape: EncoderShape, variant: EncoderVariant, num_ids: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a call that continues a random text after random keys and values."""
    random = np.random.default_rng(0)
    num_done = min(variant.past, MOST_PAST)
    cache = ChunkCache(shape, [variant])
    chunk = ContinuedText(TokenizedText(random.integers(0, num_ids, num_done + variant.rows)), 0)
    sequence = cache.enter(chunk, variant)
    earlier = [random.standard_normal(group.shape(num_done), np.float32) for group in cache.kv.arena.groups]
    cache.commit(chunk, earlier, num_done)
    buffers = ChunkBuffers(shape, variant, 0, cache.kv, new_presents(cache.kv, variant.rows))
    buffers.fill_chunk(chunk, sequence, variant.rows, "last")
    return _inputs(shape, buffers)


def _inputs(shape: EncoderShape, buffers: EncoderBuffers) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in buffers.arrays.items() if name in encoder_input_names(shape)}


def check_ports(shape: EncoderShape, compiled: Mapping[EncoderVariant, AnyProgram]) -> None:
    """Check the sizes of imported programs, before any memory is allocated for them.

    Raises:
        ValueError: a program cannot run its variant, or no variant holds the longest text.
        KeyError: a program has a port that an encoder does not have.
    """
    if shape.longest > max(variant.past + variant.rows for variant in compiled):
        raise ValueError(f"no program holds texts of {shape.longest} tokens")
    if not any(not variant.past for variant in compiled) or any(v.past for v in compiled) != bool(shape.past):
        raise ValueError("the programs are not those of a model of this shape")
    known = encoder_input_names(shape) | {EMBEDDINGS if shape.output == "embeddings" else SCORES}
    known |= {*present_names(shape)}
    for variant, program in compiled.items():
        found = {name for port in (*program.inputs, *program.outputs) for name in port.get_names()}
        if variant.past and not {*past_names(shape), *present_names(shape)} <= found:
            raise KeyError(f"{variant} lacks ports of keys and values")
        for port in (*program.inputs, *program.outputs):
            names = sorted(port.get_names() & known)
            if not names:
                raise KeyError(f"the port {port.get_any_name()!r} is unknown")
            expected = ov.PartialShape(list(encoder_shape_of(names[0], shape, variant)))
            if not port.get_partial_shape().compatible(expected):
                raise ValueError(f"{names[0]!r} has the shape {port.get_partial_shape()}, {variant} needs {expected}")
