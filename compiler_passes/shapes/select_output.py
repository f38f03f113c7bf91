"""Keeps one output of an encoder: the hidden states of its tokens, the scores of a cross-encoder, or the vector of each text.

A causal language model has ``logits`` for every token. An embedder takes what their head reads. A reranker takes the logits of a
few tokens, such as those of "no" and "yes": the head then computes only these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import LOGITS

from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import named_result
from .select_logits import find_head

STAGE = "select_output"
HIDDEN_STATES = ("last_hidden_state", "token_embeddings")
"""The names that transformers and sentence-transformers give to hidden states."""
POOLED = "sentence_embedding"
"""The name that sentence-transformers gives to the vector of a text."""


def select_output(graph: EncoderGraph, score_tokens: tuple[int, ...] = ()) -> None:
    """Remove all outputs but the hidden states, else ``logits``, else the only output with one vector per text.

    Args:
        score_tokens: The tokens whose logits are the output of a causal language model, ``[B, S, len(score_tokens)]``.

    Raises:
        UnsupportedModelError: the model has neither output, or logits for every token without a head that is recognised.
    """
    ports = list(graph.model.outputs)
    chosen = _hidden_states(ports)
    if chosen is None:
        chosen = next((port for port in ports if LOGITS in port.get_names()), None)
        graph.has_scores = chosen is not None
    if chosen is None:
        chosen = pooled_output(ports)
        graph.is_pooled = chosen is not None
    if chosen is None:
        names = sorted(name for port in ports for name in port.get_names())
        raise UnsupportedModelError(STAGE, f"the model has no output 'last_hidden_state' or 'logits' (it has {names})")
    name = chosen.get_any_name()
    for port in ports:
        if port != chosen:
            graph.model.remove_result(port.get_node())
    graph.note(STAGE, f"{name!r} of {len(ports)} outputs")
    if graph.has_scores and chosen.get_partial_shape().rank != ov.Dimension(2):
        graph.has_scores = False
        _take_from_head(graph, chosen.get_node(), score_tokens)


def _take_from_head(graph: EncoderGraph, result: ov.Node, score_tokens: tuple[int, ...]) -> None:
    """Let the output be what the head reads, or the logits of ``score_tokens``."""
    head = find_head(result)
    if head is None:
        raise UnsupportedModelError(
            STAGE,
            f"'logits' has the shape {result.get_output_partial_shape(0)} and is not the product of hidden states and a matrix: "
            "export the model for feature-extraction",
        )
    if score_tokens:
        axis = np.int64(0 if head.get_attributes()["transpose_b"] else 1)
        chosen = ops.gather(head.input_value(1), np.array(score_tokens, np.int64), axis)
        head.input(1).replace_source_output(chosen.output(0))
        graph.head = "tokens"
        graph.pooling = "last"
        graph.note(STAGE, f"the logits of the tokens {', '.join(map(str, score_tokens))}")
    else:
        graph.model.remove_result(result)
        graph.model.add_results([named_result(HIDDEN_STATES[0], head.input_value(0))])
        graph.head = "cut"
        graph.note(STAGE, f"cut before {head.get_friendly_name()!r}")
    try:
        graph.model.validate_nodes_and_infer_types()
    except RuntimeError:
        raise UnsupportedModelError(
            STAGE, f"the head {head.get_friendly_name()!r} has a bias or a scale per token: it cannot compute a part"
        ) from None
    graph.original = graph.model.clone()


def _hidden_states(ports: list[ov.Output]) -> ov.Output | None:
    """Return the output by name, or the only one with a vector per token that is not called ``logits``."""
    for name in HIDDEN_STATES:
        for port in ports:
            if name in port.get_names():
                return port
    others = [port for port in ports if LOGITS not in port.get_names()]
    found = [port for port in others if port.get_partial_shape().rank == ov.Dimension(3)]
    return found[0] if len(found) == 1 else None


def pooled_output(ports: Sequence[ov.Output]) -> ov.Output | None:
    """Return the output with one vector per text, by name or because there is no other."""
    found = [port for port in ports if port.get_partial_shape().rank == ov.Dimension(2)]
    named = [port for port in found if POOLED in port.get_names()]
    chosen = named or found
    return chosen[0] if len(chosen) == 1 else None
