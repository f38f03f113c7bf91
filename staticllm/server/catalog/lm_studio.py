"""LM Studio's ``/api/v0/models``: type, state, context length and capabilities of each model."""

from __future__ import annotations

from typing import Any

from staticllm.server.catalog.facts import ARCHITECTURE, context_length, listed_facts
from staticllm.server.served_model import ServedModel
from staticllm.server.state import ServerState

TYPES = {"chat": "llm", "embedding": "embeddings"}
"""LM Studio's names of our kinds. It has none for rerankers, and clients refuse lists with types that they do not know."""
STATES = {"loaded": "loaded", "loading": "loading", "unloaded": "not-loaded"}
FORMAT = "gguf"
"""Our models are not GGUF files, but Zed refuses lists with other formats than those that LM Studio runs."""


def model_list(state: ServerState) -> dict[str, Any]:
    """Return all models. Reads their files; runs in a thread."""
    listed = [describe(state, model) for model in state.hub.models.values() if model.spec.kind in TYPES]
    return {"object": "list", "data": listed}


def describe(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return one model. ``max_context_length`` is that of the server's settings; it is left out where nobody knows it yet."""
    facts, length = listed_facts(model), context_length(model, state.settings)
    found: dict[str, Any] = {
        "id": model.spec.name,
        "object": "model",
        "type": TYPES.get(model.spec.kind, model.spec.kind),
        "publisher": "local",
        "arch": ARCHITECTURE,
        "compatibility_type": FORMAT,
        "quantization": facts.precision.upper(),
        "state": STATES[state.hub.status(model)],
        "capabilities": ["tool_use"] if facts.has_tools else [],
    }
    if length is not None:
        found["max_context_length"] = length
        if model.pipeline is not None:
            found["loaded_context_length"] = length
    return found
