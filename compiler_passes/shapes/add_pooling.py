"""Adds what makes embeddings of hidden states: pooling, the Dense modules of sentence-transformers, and normalisation.

The input ``pool [R, B*S]`` holds a row of weights for each text: 1 / length on its tokens for a mean, or 1 on one token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import EMBEDDINGS

from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import named_result
from .cut_head import normalised
from .pool_scores import pooled_rows

STAGE = "add_pooling"
ACTIVATIONS: dict[str, Callable[[ov.Output], ov.Node] | None] = {
    "identity": None,
    "tanh": ops.tanh,
    "relu": ops.relu,
    "sigmoid": ops.sigmoid,
    "gelu": lambda value: ops.gelu(value, "erf"),
    "silu": ops.swish,
}


@dataclass(frozen=True)
class Dense:
    """A Dense module: ``activation(weight · vector + bias)``, in f32."""

    weight: NDArray[np.float32]
    """``[out, in]``."""
    bias: NDArray[np.float32] | None = None
    """``[out]``."""
    activation: str = "identity"
    has_residual: bool = False
    """Whether the vector is added to that, or ``residual`` times the vector."""
    residual: NDArray[np.float32] | None = None
    """``[out, in]``."""


def add_pooling(graph: EncoderGraph, dense: tuple[Dense, ...] = (), is_normalised: bool = True) -> None:
    """Replace the hidden states by the output ``embeddings [R, width]``. Scores are left alone.

    A model that pools by itself has its Dense modules in the graph, too: its vectors are only normalised.

    Raises:
        UnsupportedModelError: a Dense module does not fit to the vectors that it gets, or its activation is unknown.
    """
    if graph.has_scores:
        return
    (result,) = graph.model.get_results()
    if graph.is_pooled:
        pooled = result.input_value(0)
        dense = ()
    else:
        pooled = pooled_rows(graph, result.input_value(0))
    for index, layer in enumerate(dense):
        pooled = _with_dense(pooled, layer, index)
    graph.model.remove_result(result)
    graph.model.add_results([named_result(EMBEDDINGS, _as_f32(normalised(pooled) if is_normalised else pooled))])
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"pool · hidden states{', Dense' * len(dense)}{', normalised' * is_normalised}")


def _with_dense(vectors: ov.Output, layer: Dense, index: int) -> ov.Output:
    width = vectors.get_partial_shape()[1].get_length()
    bias = np.zeros(len(layer.weight), np.float32) if layer.bias is None else layer.bias
    is_residual_right = layer.residual is None or layer.residual.shape == layer.weight.shape
    if layer.weight.ndim != 2 or layer.weight.shape[1] != width or bias.shape != layer.weight.shape[:1]:
        raise UnsupportedModelError(
            STAGE,
            f"Dense module {index} has a weight {layer.weight.shape} and a bias {bias.shape} for vectors of {width}",
        )
    if not is_residual_right or (layer.has_residual and layer.residual is None and len(layer.weight) != width):
        found = None if layer.residual is None else layer.residual.shape
        raise UnsupportedModelError(
            STAGE, f"Dense module {index} has a weight {layer.weight.shape} and a residual {found}"
        )
    if layer.activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedModelError(
            STAGE, f"Dense module {index} has the activation {layer.activation!r}, not one of {known}"
        )
    given = _as_f32(vectors)
    product = _times(given, layer.weight)
    shifted = product if layer.bias is None else ops.add(product, ops.constant(bias[None])).output(0)
    activation = ACTIVATIONS[layer.activation]
    active = shifted if activation is None else activation(shifted).output(0)
    if not layer.has_residual:
        return active
    return ops.add(active, given if layer.residual is None else _times(given, layer.residual)).output(0)


def _times(vectors: ov.Output, weight: NDArray[np.float32]) -> ov.Output:
    return ops.matmul(vectors, ops.constant(weight), transpose_a=False, transpose_b=True).output(0)


def _as_f32(value: ov.Output) -> ov.Output:
    return value if value.get_element_type() == ov.Type.f32 else ops.convert(value, "f32").output(0)
