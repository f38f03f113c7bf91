"""Computes grouped-query attention without repeating keys and values.

Exporters repeat each key/value head for its group of query heads (Unsqueeze, Broadcast, Reshape). With 7 query heads per
key/value head, a decode step then spends most of its time copying. Instead this pass arranges the queries as ``[kv_heads, group,
S, head_dim]`` and keys and values as ``[kv_heads, 1, T+S, head_dim]``; the products broadcast the keys, and the mask ``[1, 1, S,
T+S]`` is broadcast as well. The sums and their order are the same.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph, redirect, through
from .decompose_attention import attention_products, rewrite_attentions

STAGE = "group_queries"
PLAIN_INPUTS = 5  # query, key, value, mask, scale: a sink input would have to be repeated as well


def group_queries(graph: StepGraph) -> None:
    """Regroup every attention whose keys and values are repeated alike. The others are left alone and noted."""
    rewrite_attentions(graph, STAGE, _regroup, "regrouped")


def _regroup(attention: ov.Node) -> str | None:
    """Regroup one attention; return None, or the reason why it is left alone, which is empty if nothing is repeated."""
    key, value = (_unrepeated(attention.input_value(port)) for port in (1, 2))
    if key is None and value is None:
        return ""
    if key is None or value is None:
        return "keys and values are not repeated alike"
    if attention.get_input_size() > PLAIN_INPUTS:
        return "it has an attention sink"
    query = attention.input_value(0)
    num_heads, head_dim = _dims(query, 1, 3)
    (kv_heads,) = _dims(key, 1)
    if not num_heads or not kv_heads or num_heads % kv_heads or _dims(value, 1) != [kv_heads]:
        return f"{num_heads} query heads do not divide into {kv_heads} key heads"
    (planes,) = _dims(attention.input_value(3), 1)
    if planes not in (1, num_heads):
        return "its mask has neither one plane nor one per head"
    group = num_heads // kv_heads
    grouped = ops.reshape(query, np.array([kv_heads, group, -1, head_dim]), special_zero=False)
    key = ops.reshape(key, np.array([kv_heads, 1, -1, head_dim]), special_zero=False).output(0)
    (value_dim,) = _dims(value, 3)
    value = ops.reshape(value, np.array([kv_heads, 1, -1, value_dim]), special_zero=False).output(0)
    mask = attention.input_value(3)
    scale = attention.input_values()[4:5]
    if planes > 1:
        mask = ops.reshape(mask, np.array([kv_heads, group, -1, 0]), special_zero=True).output(0)
    fused = attention_products(grouped.output(0), key, value, mask, scale[0] if scale else None)
    fused.set_friendly_name(attention.get_friendly_name())
    back = ops.reshape(fused, np.array([1, num_heads, -1, value_dim]), special_zero=False)
    redirect(attention.output(0), back.output(0))
    return None


def _dims(output: ov.Output, *axes: int) -> list[int]:
    shape = output.get_partial_shape()
    return [shape[axis].get_length() if shape[axis].is_static else 0 for axis in axes]


def _unrepeated(output: ov.Output) -> ov.Output | None:
    """Return the keys or values before Unsqueeze → Broadcast (or Tile) → Reshape; None if they are not repeated."""
    reshape = output.get_node()
    if reshape.get_type_name() != "Reshape":
        return None
    broadcast = through(reshape.input_value(0), "Convert").get_node()
    if broadcast.get_type_name() not in ("Broadcast", "Tile"):
        return None
    unsqueeze = broadcast.input_value(0).get_node()
    if unsqueeze.get_type_name() not in ("Unsqueeze", "Reshape"):
        return None
    rows = unsqueeze.input_value(0)
    lifted = unsqueeze.get_output_partial_shape(0)
    repeated_axis_is_2 = lifted.rank.is_static and lifted.rank.get_length() == 5 and lifted[2] == 1
    return rows if repeated_axis_is_2 and rows.get_partial_shape().rank.get_length() == 4 else None
