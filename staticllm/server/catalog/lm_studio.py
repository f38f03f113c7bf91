"""LM Studio's ``/api/v0/models``: type, state, context length and capabilities of each model."""

from __future__ import annotations

from typing import Any

from staticllm.server.catalog.facts import context_length, current_facts
from staticllm.server.served_model import ServedModel
from staticllm.server.state import ServerState

TYPES = {"chat": "llm", "embedding": "embeddings", "rerank": "rerank"}


def model_list(state: ServerState) -> dict[str, Any]:
    """Return all models. Reads their files; runs in a thread."""
    return {"object": "list", "data": [describe(state, model) for model in state.hub.models.values()]}


def describe(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return one model. ``max_context_length`` is that of the server's settings; it is left out where nobody knows it yet."""
    facts, length = current_facts(model), context_length(model, state.settings)
    found: dict[str, Any] = {
        "id": model.spec.name,
        "object": "model",
        "type": TYPES[model.spec.kind],
        "publisher": "local",
        "arch": facts.architecture,
        "compatibility_type": "openvino",
        "quantization": facts.precision.upper(),
        "state": "loaded" if model.pipeline is not None else "not-loaded",
        "capabilities": ["tool_use"] if facts.has_tools else [],
    }
    if length is not None:
        found["max_context_length"] = length
        if model.pipeline is not None:
            found["loaded_context_length"] = length
    return found
