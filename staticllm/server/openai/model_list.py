"""``/v1/models``: the models that are served, and what is known about each."""

from __future__ import annotations

from typing import Any

from staticllm.server.served_model import ServedModel
from staticllm.server.state import ServerState


def model_list(state: ServerState) -> dict[str, Any]:
    """Return all models."""
    return {"object": "list", "data": [describe(state, model) for model in state.hub.models.values()]}


def describe(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return one model. ``status`` is ``loaded``, ``loading`` or ``unloaded``; ``max_model_len`` is known while it is loaded."""
    described: dict[str, Any] = {
        "id": model.spec.name,
        "object": "model",
        "created": model.created,
        "owned_by": "staticllm",
        "type": model.spec.kind,
        "status": state.hub.status(model),
    }
    if model.pipeline is not None and model.spec.kind == "chat":
        described["max_model_len"] = model.chat.config.max_seq_len
    return described
