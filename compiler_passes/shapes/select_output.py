"""Keeps one output of an encoder: the hidden states of its tokens, or the scores of a cross-encoder."""

from __future__ import annotations

import openvino as ov

from staticllm.compiler_passes.graph.encoder_graph import EncoderGraph
from staticllm.errors import UnsupportedModelError
from staticllm.ports import LOGITS

STAGE = "select_output"
HIDDEN_STATES = ("last_hidden_state", "token_embeddings")
"""The names that transformers and sentence-transformers give to hidden states."""


def select_output(graph: EncoderGraph) -> None:
    """Remove all outputs but the hidden states, or but ``logits`` of one vector per text.

    Raises:
        UnsupportedModelError: the model has states, logits for every token, or neither output.
    """
    if graph.model.get_sinks() or graph.model.get_variables():
        raise UnsupportedModelError(STAGE, "the model has states: it is not an encoder, lower it as a decoder")
    ports = list(graph.model.outputs)
    chosen = _hidden_states(ports)
    if chosen is None:
        chosen = next((port for port in ports if LOGITS in port.get_names()), None)
        graph.has_scores = chosen is not None
    if chosen is None:
        names = sorted(name for port in ports for name in port.get_names())
        raise UnsupportedModelError(STAGE, f"the model has no output 'last_hidden_state' or 'logits' (it has {names})")
    if graph.has_scores and chosen.get_partial_shape().rank != ov.Dimension(2):
        shape = chosen.get_partial_shape()
        raise UnsupportedModelError(
            STAGE, f"'logits' has the shape {shape}, not [batch, labels]: export the model for feature-extraction"
        )
    name = chosen.get_any_name()
    for port in ports:
        if port != chosen:
            graph.model.remove_result(port.get_node())
    graph.note(STAGE, f"{name!r} of {len(ports)} outputs")


def _hidden_states(ports: list[ov.Output]) -> ov.Output | None:
    """Return the output by name, or the only one with a vector per token that is not called ``logits``."""
    for name in HIDDEN_STATES:
        for port in ports:
            if name in port.get_names():
                return port
    others = [port for port in ports if LOGITS not in port.get_names()]
    found = [port for port in others if port.get_partial_shape().rank == ov.Dimension(3)]
    return found[0] if len(found) == 1 else None
