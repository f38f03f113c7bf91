"""Replaces the masks that the graph computes by inputs.

The mask of each attention is classified (``classify_mask.py``). Layers of one kind then share one additive input ``mask.<kind>``
of shape ``[1, 1, S, T+S]``. A bias on the visible keys is rebuilt from the positions of keys and queries, which are two more
inputs, because slots of the arena are in any order.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, MaskKind
from staticllm.errors import UnsupportedModelError
from staticllm.ports import CROSS_MASK

from ..graph.attention import Attention, find_attentions
from ..graph.step_graph import StepGraph, is_zero
from .classify_mask import STAGE, Seen, classify, key_of


def expose_mask(graph: StepGraph, max_len: int) -> None:
    """Classify the mask of every layer and replace it by an input.

    Args:
        max_len: The most tokens of a sequence. A window that is not shorter never hides anything and counts as causal.

    Raises:
        UnsupportedModelError: there is no attention, or one has no mask or a mask of an unknown kind.
    """
    found_attentions = find_attentions(graph.model)
    _mask_cross(graph, [attention for attention in found_attentions if attention.is_cross])
    attentions = [attention for attention in found_attentions if not attention.is_cross]
    if not attentions:
        if not graph.recurrent_states:
            raise UnsupportedModelError(
                STAGE, "the model has no attention, fused or written out: not a language model?"
            )
        graph.note(STAGE, "no attention: nothing to mask")
        return
    ports = [_mask_port(attention) for attention in attentions]
    producers = [port.get_source_output() for port in ports]
    found = classify(graph.model, producers, max_len)
    inputs: dict[MaskKind, ov.Node] = {}
    biased: dict[Seen, ov.Output] = {}
    for attention, port, producer in zip(attentions, ports, producers, strict=True):
        seen = found[key_of(producer)]
        shape = attention.scores.get_output_partial_shape(0)
        rows = shape[2]
        if seen.kind not in inputs:
            inputs[seen.kind] = _mask_input(graph, seen.kind, rows)
        if seen not in biased:
            mask = _cast(inputs[seen.kind], attention.scores.get_output_element_type(0))
            biased[seen] = _with_bias(graph, mask, seen, rows)
        port.replace_source_output(biased[seen])
        graph.layer_masks.append(seen.label)
        graph.query_heads.append(shape[1].get_length() if shape[1].is_static else 0)
    graph.masks = sorted(inputs, key=lambda kind: (kind.table, kind.window or 0))
    graph.model.validate_nodes_and_infer_types()
    labels = ", ".join(f"{label} in {graph.layer_masks.count(label)}" for label in dict.fromkeys(graph.layer_masks))
    graph.note(STAGE, f"{labels} of {len(attentions)} layers")


def _mask_cross(graph: StepGraph, attentions: list[Attention]) -> None:
    """Let cross-attentions, whose own masks hide nothing, see the frames that ``cross_mask [1, 1, S, frames]`` shows."""
    if not attentions:
        return
    frames = graph.cross_window_len * graph.num_cross_windows
    rows = attentions[0].scores.get_output_partial_shape(0)[2]
    mask = graph.add_parameter(CROSS_MASK, ov.PartialShape([1, 1, rows, frames]), ov.Type.f32)
    for attention in attentions:
        port = _mask_port(attention)
        if not is_zero(port.get_source_output()):
            raise UnsupportedModelError(
                STAGE,
                f"the mask of cross-attention {attention.node.get_friendly_name()!r} hides frames: export without it",
            )
        port.replace_source_output(_cast(mask, attention.scores.get_output_element_type(0)))
    graph.note(STAGE, f"cross_mask in {len(attentions)} layers")


def _mask_port(attention: Attention) -> ov.Input:
    name = attention.node.get_friendly_name()
    if attention.mask is None:
        raise UnsupportedModelError(STAGE, f"attention {name!r} has no mask input")
    rank = attention.scores.get_output_partial_shape(0).rank
    if rank.is_dynamic or rank.get_length() != 4:
        raise UnsupportedModelError(
            STAGE, f"attention {name!r} has scores of rank {rank}: must be [batch, heads, S, T+S]"
        )
    return attention.mask


def _mask_input(graph: StepGraph, kind: MaskKind, rows: ov.Dimension) -> ov.Node:
    return graph.add_parameter(kind.port_name, ov.PartialShape([1, 1, rows, -1]), ov.Type.f32)


def _with_bias(graph: StepGraph, mask: ov.Output, seen: Seen, rows: ov.Dimension) -> ov.Output:
    """Add the bias of each head to ``mask [1, 1, S, T+S]``, and return the sum, ``[1, heads, S, T+S]``."""
    if not seen.slopes and seen.table is None:
        return mask
    keys = graph.parameter(KEY_POSITIONS) or graph.add_parameter(
        KEY_POSITIONS, ov.PartialShape([1, 1, 1, -1]), ov.Type.i32
    )
    if seen.table is not None:
        values = ops.constant(np.ascontiguousarray(seen.table.values.T))
        of_keys = ops.gather(values, ops.reshape(keys, np.array([-1]), special_zero=False), ops.constant(0))
        bias = ops.unsqueeze(ops.transpose(of_keys, np.array([1, 0])), np.array([0, 2]))
        return ops.add(mask, ops.convert(bias, mask.get_element_type().get_type_name())).output(0)
    queries = graph.parameter(QUERY_POSITIONS) or graph.add_parameter(
        QUERY_POSITIONS, ov.PartialShape([1, 1, rows, 1]), ov.Type.i32
    )
    # distances of whole numbers are computed exactly; positions above 256 would not be exact in bf16
    distance = ops.convert(ops.subtract(keys, queries), mask.get_element_type().get_type_name())
    factors = ops.convert_like(ops.constant(np.array(seen.slopes, np.float32).reshape(1, -1, 1, 1)), distance)
    return ops.add(mask, ops.multiply(distance, factors)).output(0)


def _cast(mask: ov.Node, element_type: ov.Type) -> ov.Output:
    same = mask.get_element_type() == element_type
    return mask.output(0) if same else ops.convert(mask, element_type.get_type_name()).output(0)
