"""Lets attention read and write pages of keys and values by the table of each sequence: OpenVINO's paged attention.

``openvino._offline_transformations.paged_attention_transformation`` replaces states, masks and attention of an exported decoder.
A row then reads what its sequence has, so that a call costs what belongs to its sequences, not all that is in the arena. Ids and
positions become ``[S]``; hidden states ``[S, 1, width]``. Only the CPU plugin runs the operation, in pages of 32.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import openvino as ov
from openvino import _offline_transformations as offline
from openvino import opset13 as ops

from staticllm.core import KVState, KVType, MaskKind
from staticllm.errors import UnsupportedModelError
from staticllm.ports import INPUT_IDS, PAGE_TABLES, POSITION_IDS

from ..graph.paged_graph import KEYS, PAGE_SIZE, VALUES, WINDOW, PagedGraph, paged_attentions, window_of, windows_in
from ..graph.step_graph import consumers, name_port, redirect

STAGE = "page_attention"
_LEFT = {"ReadValue", "Assign", "ScaledDotProductAttention"}
"""Operations that the transformation replaces."""


def page_attention(graph: PagedGraph, kv_type: KVType, max_len: int) -> None:
    """Replace the states and attentions of a decoder, and make ports of the pages of each layer.

    Raises:
        UnsupportedModelError: a part of the model is not taken: recurrent states, say.
    """
    if kv_type not in ("f32", "bf16"):
        raise UnsupportedModelError(STAGE, f"the plugin has no pages of {kv_type} of which parts can be copied")
    offline.paged_attention_transformation(graph.model)
    attentions = paged_attentions(graph.model)
    left = sorted({node.get_type_name() for node in graph.model.get_ops()} & _LEFT)
    if left or not attentions:
        raise UnsupportedModelError(STAGE, f"the transformation leaves {', '.join(left) or 'no attention'}")
    for layer, node in enumerate(attentions):
        for role in ("key", "value"):
            graph.kv_states.append(_pages(node, layer, role, kv_type))
        graph.query_heads.append(_query_heads(node, graph.kv_states[-2].head_dim))
    known = {INPUT_IDS, POSITION_IDS, *PAGE_TABLES, *(state.pages_name for state in graph.kv_states)}
    for port in graph.model.inputs:
        if not port.get_names() & known:
            raise UnsupportedModelError(STAGE, f"the transformation adds the input {port.get_any_name()!r}")
    windows = _windows(graph, attentions, max_len)
    kinds = [MaskKind(window or None) for window in windows]
    graph.masks = sorted(dict.fromkeys(kinds), key=lambda kind: kind.label)
    graph.layer_masks = [kind.label for kind in kinds]
    graph.page_size = PAGE_SIZE
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(attentions)} attentions in pages of {PAGE_SIZE}")


def _windows(graph: PagedGraph, attentions: list[ov.Node], max_len: int) -> list[int]:
    """Return the window of each attention, and let those have it of which the transformation has not seen it."""
    windows = windows_in(graph.original, max_len)
    if len(windows) != len(attentions):
        raise UnsupportedModelError(STAGE, f"{len(windows)} attentions have become {len(attentions)}")
    for node, window in zip(attentions, windows, strict=True):
        known = window_of(node)
        if not known and window:
            node.input(WINDOW).replace_source_output(ops.constant(np.int32(window)).output(0))
        elif known != window and known < max_len:
            name = node.get_friendly_name()
            raise UnsupportedModelError(STAGE, f"{name!r} has a window of {known} tokens, where the model has {window}")
    return [window_of(node) for node in attentions]


def _query_heads(attention: ov.Node, head_dim: int) -> int:
    """Return the number of heads of an attention's queries.

    The transformation takes rows for a batch of sequences of one token, as exports have them. A graph that makes one sequence of
    its rows by constant shapes has them on another axis, ``[1, heads, rows, size]``: then queries, keys, values and results get
    the right shapes here.
    """
    width = attention.input_value(0).get_partial_shape()[1]
    if width.is_static:
        return int(width.get_length()) // head_dim
    num_heads = _join_rows(attention, 0)
    _join_rows(attention, 1)
    _join_rows(attention, 2)
    attention.validate_and_infer_types()
    size = attention.get_output_partial_shape(0)[1].get_length() // num_heads
    for reshaped in consumers(attention.output(0)):
        for transposed in consumers(reshaped.output(0)):
            if (reshaped.get_type_name(), transposed.get_type_name()) != ("Reshape", "Transpose"):
                raise _unknown_rows(attention)
            apart = ops.reshape(attention.output(0), np.array([1, -1, num_heads, size]), False)
            redirect(transposed.output(0), ops.transpose(apart, np.array([0, 2, 1, 3])).output(0))
    return num_heads


def _join_rows(attention: ov.Node, place: int) -> int:
    """Give an input of an attention the shape ``[rows, heads * size]``, and return its number of heads."""
    flat = attention.input_value(place).get_node()
    if flat.get_type_name() != "Reshape":
        raise _unknown_rows(attention)
    shape = list(flat.get_input_partial_shape(0))
    if len(shape) != 4 or shape[0] != ov.Dimension(1) or [dim.is_static for dim in shape[1:]] != [False, True, True]:
        raise _unknown_rows(attention)
    heads, size = (int(dim.get_length()) for dim in shape[2:])
    rows = ops.reshape(flat.input_value(0), np.array([-1, heads * size]), False)
    attention.input(place).replace_source_output(rows.output(0))
    return heads


def _unknown_rows(attention: ov.Node) -> UnsupportedModelError:
    return UnsupportedModelError(STAGE, f"the rows of {attention.get_friendly_name()!r} are on no axis of their own")


def _pages(attention: ov.Node, layer: int, role: Literal["key", "value"], kv_type: KVType) -> KVState:
    """Name the input for the pages of one layer, and return the state that they hold."""
    letter = role[0]
    facts = attention.get_rt_info()
    heads, size = (int(facts[name].value) for name in (f"num_{letter}_heads", f"{letter}_head_size"))
    state = KVState(layer, role, f"{attention.get_friendly_name()}.{role}", heads, size, kv_type)
    parameter = attention.input_value(KEYS if role == "key" else VALUES).get_node()
    name_port(parameter, state.pages_name)
    return state
