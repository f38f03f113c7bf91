"""Folds the low-rank matrices of LoRA adapters into the weights of a model: ``W + alpha · b · a``. It cannot be undone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.core import AdapterLayout
from staticllm.errors import AdapterError, quoted

from ..graph.linear_layers import LinearLayer
from ..graph.step_graph import through
from .expose_adapters import find_changes

_FLOATS = ("f32", "f16", "bf16")


def fuse_adapters(
    model: ov.Model, layouts: tuple[AdapterLayout, ...], deltas: Mapping[str, NDArray[np.float32]]
) -> None:
    """Add ``deltas`` (path of a module → ``[out, in]``) to the weights of a model, which is changed in place.

    Raises:
        AdapterError: an adapter does not fit the model, or the weights of a layer are compressed to integers.
    """
    for change in find_changes(model, layouts):
        first, *others = dict.fromkeys(path for _, path, _ in change.adapters)
        delta = deltas[first].copy()
        for path in others:
            delta += deltas[path]
        _fuse(change.layer, delta, first)
    model.validate_nodes_and_infer_types()


def _fuse(layer: LinearLayer, delta: NDArray[np.float32], path: str) -> None:
    weights = layer.node.input_value(1)
    constant = through(weights, "Convert").get_node()
    if constant.get_type_name() != "Constant" or constant.get_element_type().get_type_name() not in _FLOATS:
        raise AdapterError(
            f"MODE_FUSE: the weights of {quoted(path)} are compressed to integers: leave the mode out, "
            "or export the model in f16"
        )
    own = constant.get_data(dtype=np.float32).reshape(constant.get_output_shape(0))
    total = own + (delta if layer.node.get_attributes()["transpose_b"] else delta.T)
    fused = ops.constant(total.astype(np.float32))
    fused.set_friendly_name(constant.get_friendly_name())
    value = fused if weights.get_element_type() == ov.Type.f32 else ops.convert(fused, weights.get_element_type())
    layer.node.input(1).replace_source_output(value.output(0))
