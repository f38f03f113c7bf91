"""Decomposes attention into MatMul, Add, Softmax, MatMul.

Plugins without a kernel for ``ScaledDotProductAttention`` decompose it themselves; OpenVINO's CPU plugin then transposes and
scales all T + S keys in every layer of every step. This pass scales the S queries instead, and moves the transposition into the
MatMul; the plugin still makes one fused kernel of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph, redirect

STAGE = "decompose_attention"
PLAIN_INPUTS = 5  # query, key, value, mask, scale: a sink input takes part in the softmax


def decompose_attention(graph: StepGraph) -> None:
    """Decompose every attention that has a mask and nothing unusual. The others are left alone and noted."""
    rewrite_attentions(graph, STAGE, _decompose, "decomposed")


def rewrite_attentions(graph: StepGraph, stage: str, rewrite: Callable[[ov.Node], str | None], done: str) -> None:
    """Rewrite every attention, and note how many were ``done``, and the reasons for which others were left alone.

    ``rewrite`` returns None if it changed an attention, else the reason why not, which is not noted if it is empty.
    """
    attentions = graph.attentions()
    reasons = [rewrite(node) for node in attentions]
    for node, reason in zip(attentions, reasons, strict=True):
        if reason:
            graph.note(stage, f"{node.get_friendly_name()!r} left alone: {reason}")
    graph.model.validate_nodes_and_infer_types()
    graph.note(stage, f"{reasons.count(None)} of {len(reasons)} layers {done}")


def _decompose(attention: ov.Node) -> str | None:
    """Decompose one attention; return None, or the reason why it is left alone."""
    if attention.get_attributes()["causal"] or attention.get_input_size() < PLAIN_INPUTS - 1:
        return "it has no mask input"
    if attention.get_input_size() > PLAIN_INPUTS:
        return "it has an attention sink"
    query, key, value, mask, *scale = attention.input_values()
    if query.get_partial_shape()[-1].is_dynamic and not scale:
        return "its head size is not known"
    result = attention_products(query, key, value, mask, scale[0] if scale else None)
    result.set_friendly_name(attention.get_friendly_name())
    redirect(attention.output(0), result.output(0))
    return None


def attention_products(
    query: ov.Output, key: ov.Output, value: ov.Output, mask: ov.Output, scale: ov.Output | None
) -> ov.Node:
    """Return softmax(query · key + mask) · value, written out, with the queries scaled by ``scale`` or by 1 / sqrt(head_dim)."""
    if scale is None:
        scale = ops.constant(np.float32(query.get_partial_shape()[-1].get_length() ** -0.5)).output(0)
    factor = ops.convert_like(scale, query)
    scores = ops.matmul(ops.multiply(query, factor), key, transpose_a=False, transpose_b=True)
    weights = ops.softmax(ops.add(scores, ops.convert_like(mask, query)), axis=-1)
    return ops.matmul(weights, value, transpose_a=False, transpose_b=False)
