"""Lets attention read and write pages of keys and values by the table of each sequence: OpenVINO's paged attention.

``openvino._offline_transformations.paged_attention_transformation`` replaces states, masks and attention of an exported decoder.
A row then reads what its sequence has, so that a call costs what belongs to its sequences, not all that is in the arena. Ids and
positions become ``[S]``; hidden states ``[S, 1, width]``. Only the CPU plugin runs the operation, in pages of 32.
"""

from __future__ import annotations

from typing import Literal

import openvino as ov
from openvino import _offline_transformations as offline

from staticllm.core import KVState, KVType, MaskKind
from staticllm.errors import UnsupportedModelError
from staticllm.ports import INPUT_IDS, PAGE_TABLES, POSITION_IDS

from ..graph.paged_graph import KEYS, PAGE_SIZE, VALUES, PagedGraph, paged_attentions, window_of
from ..graph.step_graph import name_port

STAGE = "page_attention"
_LEFT = {"ReadValue", "Assign", "ScaledDotProductAttention"}
"""Operations that the transformation replaces."""


def page_attention(graph: PagedGraph, kv_type: KVType) -> None:
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
        width = node.input_value(0).get_partial_shape()[-1].get_length()
        graph.query_heads.append(width // graph.kv_states[-2].head_dim)
    known = {INPUT_IDS, POSITION_IDS, *PAGE_TABLES, *(state.pages_name for state in graph.kv_states)}
    for port in graph.model.inputs:
        if not port.get_names() & known:
            raise UnsupportedModelError(STAGE, f"the transformation adds the input {port.get_any_name()!r}")
    windows = [window_of(node) for node in attentions]
    kinds = [MaskKind(window or None) for window in windows]
    graph.masks = sorted(dict.fromkeys(kinds), key=lambda kind: kind.label)
    graph.layer_masks = [kind.label for kind in kinds]
    graph.page_size = PAGE_SIZE
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(attentions)} attentions in pages of {PAGE_SIZE}")


def _pages(attention: ov.Node, layer: int, role: Literal["key", "value"], kv_type: KVType) -> KVState:
    """Name the input for the pages of one layer, and return the state that they hold."""
    letter = role[0]
    facts = attention.get_rt_info()
    heads, size = (int(facts[name].value) for name in (f"num_{letter}_heads", f"{letter}_head_size"))
    state = KVState(layer, role, f"{attention.get_friendly_name()}.{role}", heads, size, kv_type)
    parameter = attention.input_value(KEYS if role == "key" else VALUES).get_node()
    name_port(parameter, state.pages_name)
    return state
