"""Decides by its graph what kind of model a directory holds: a decoder, an encoder, or a decoder that embeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import openvino as ov

from staticllm.devices import get_core
from staticllm.errors import ModelError, quoted
from staticllm.model_dir import given_as, read_model
from staticllm.ports import INPUT_IDS, LOGITS

from .shapes.select_output import HIDDEN_STATES, pooled_output

KindName = Literal["decoder", "encoder", "decoder embedder"]


@dataclass(frozen=True)
class ModelKind:
    """One kind of model."""

    name: KindName
    what: str
    """Names it with what its graph has."""
    remedy: str
    """What can be done with it."""


DECODER = ModelKind(
    "decoder",
    "a causal language model (output 'logits' for every token)",
    "use StaticLLMPipeline or `staticllm run`; if it is an embedder, add its 1_Pooling/config.json or give "
    "pooling_type=PoolingType.LAST_TOKEN",
)
EMBEDDINGS = ModelKind(
    "encoder",
    "a text embedding model (output of hidden states)",
    "use StaticEmbeddingPipeline or `staticllm embed`",
)
SCORES = ModelKind(
    "encoder",
    "a cross-encoder (output 'logits' for every text)",
    "use StaticRerankPipeline or `staticllm rerank`",
)
DECODER_EMBEDDER = ModelKind(
    "decoder embedder",
    "a text embedding model (output of hidden states, with KV slots)",
    "use StaticEmbeddingPipeline or `staticllm embed`",
)
_WANTED = {"decoder": "a causal language model", "encoder": "an encoder"}


def kind_of(model: ov.Model) -> ModelKind | None:
    """Return the kind of a model by its inputs, outputs and states; None if it is none of the known ones.

    | states | output | kind |
    |---|---|---|
    | any | ``logits`` ``[batch, tokens, vocab]`` | decoder; passes say what a decoder without states lacks |
    | none | ``logits`` ``[batch, labels]`` | encoder: scores |
    | none | hidden states, or one vector per text | encoder: embeddings |
    | some | hidden states | decoder embedder, which runs as an encoder |
    """
    outputs = {name: port for port in model.outputs for name in port.get_names()}
    has_states = bool(model.get_variables())
    if not any(INPUT_IDS in port.get_names() for port in model.inputs):
        return None
    if any(name in outputs for name in HIDDEN_STATES):
        return DECODER_EMBEDDER if has_states else EMBEDDINGS
    if LOGITS in outputs:
        is_per_text = not has_states and outputs[LOGITS].get_partial_shape().rank == ov.Dimension(2)
        return SCORES if is_per_text else DECODER
    has_vectors = any(port.get_partial_shape().rank == ov.Dimension(3) for port in model.outputs)
    has_vectors = has_vectors or pooled_output(model.outputs) is not None
    return (DECODER_EMBEDDER if has_states else EMBEDDINGS) if has_vectors else None


def kind_in(
    directory: Path, weights: str | None = None, decrypt: Callable[[bytes], bytes] | None = None
) -> ModelKind | None:
    """Return the kind of the model in a checked directory; None if it is none of the known ones.

    Raises:
        ModelError: OpenVINO cannot read the model.
    """
    return kind_of(read_model(get_core(), directory, weights, decrypt))


def is_lowered_as(kind: ModelKind | None, wanted: KindName, can_embed: bool = False) -> bool:
    """Return whether a model is lowered as a ``wanted`` one: a decoder also as an encoder, if it ``can_embed`` by its files."""
    names = {kind.name if kind is not None else None}
    if wanted != "encoder":
        return wanted in names
    return bool(names & {"encoder", "decoder embedder", *(("decoder",) if can_embed else ())})


def check_kind(model: ov.Model, directory: Path, wanted: KindName, can_embed: bool = False) -> ModelKind:
    """Return the kind of a model.

    Args:
        can_embed: Whether the files or the user say how a decoder's vectors are pooled.

    Raises:
        ModelError: it is not of the ``wanted`` kind; the message says what it is, and what to do with it.
    """
    kind = kind_of(model)
    if kind is not None and is_lowered_as(kind, wanted, can_embed):
        return kind
    if kind is not None:
        raise ModelError(f"{quoted(given_as(directory))} is not {_WANTED[wanted]} but {kind.what}: {kind.remedy}")
    names = sorted(name for port in model.inputs for name in port.get_names())
    outputs = sorted(name for port in model.outputs for name in port.get_names())
    needed = "'logits'" if wanted == "decoder" else "of hidden states or scores"
    raise ModelError(
        f"{quoted(given_as(directory))} is not {_WANTED[wanted]}: it needs an input 'input_ids' and an output {needed}, "
        f"it has {names} and {outputs}"
    )
