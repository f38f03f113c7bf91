"""The paths of Ollama's API: lists of models, and the ones among them that make no sense here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.catalog import ARCHITECTURE, ModelFacts, context_length, current_facts, listed_facts
from staticllm.server.endpoint import Answer, ApiCall, bodiless
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.models.served import ServedModel
from staticllm.server.ollama.embedding import embed, embeddings
from staticllm.server.ollama.fields import (
    FAR_FUTURE,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
    served_name,
    tagged,
    timestamp,
)
from staticllm.server.ollama.generation import chat, generate
from staticllm.server.state import ServerState

API_VERSION = "0.13.0"
"""The version of Ollama whose API these endpoints follow: clients refuse older ones."""
REFUSED = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}")
REFUSED_METHODS = ("POST", "DELETE", "HEAD")


def tags(state: ServerState) -> dict[str, Any]:
    """Return all models. Reads their files; runs in a thread."""
    return {"models": [_listed(model, listed_facts(model)) for model in state.hub.models.values()]}


def running(state: ServerState) -> dict[str, Any]:
    """Return the models that are loaded, and when each will be unloaded. Reads their files; runs in a thread."""
    found = []
    for model in state.hub.loaded:
        facts = listed_facts(model)
        limit = state.hub.idle_limit(model)
        left = limit if model.num_users else limit - (time.monotonic() - model.last_used)
        size = facts.num_bytes if model.size is None else model.size
        found.append(
            {
                **_listed(model, facts),
                "size": size,
                "size_vram": size,
                "expires_at": FAR_FUTURE if math.isinf(left) else timestamp(time.time() + left),
                "context_length": context_length(model, state.settings) or 0,
            }
        )
    return {"models": found}


async def show(call: ApiCall, body: OllamaShowRequest) -> Response:
    """Return what is known about one model."""
    name = body.model or body.name
    state = call.state
    if name is None:
        raise ApiError(400, "model is required")
    model = state.hub.named(served_name(state.hub, name))

    def described() -> Response:
        facts = current_facts(model)
        return json_response(
            {
                "modelfile": f"# {model.spec.name} is an OpenVINO model, served by staticllm\n",
                "parameters": "\n".join(
                    f"{name} {value}" for name, value in model.spec.sampling.items() if name != "do_sample"
                ),
                "template": facts.template,
                **({} if model.spec.system is None else {"system": model.spec.system}),
                "details": _details(facts),
                "model_info": _model_info(facts, context_length(model, state.settings)),
                "capabilities": capabilities(model, facts),
                "modified_at": timestamp(facts.modified),
            }
        )

    return await call.connected(state.workers.run(described))


def capabilities(model: ServedModel, facts: ModelFacts) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    found = [model.kind.capability or model.spec.kind]
    return found + ["tools"] * facts.has_tools + ["thinking"] * facts.has_reasoning


def _listed(model: ServedModel, facts: ModelFacts) -> dict[str, Any]:
    name = tagged(model.spec.name)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(facts.modified),
        "size": facts.num_bytes,
        "digest": facts.digest,
        "details": _details(facts),
    }


def _details(facts: ModelFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": facts.format,
        "family": ARCHITECTURE,
        "families": [ARCHITECTURE],
        "parameter_size": facts.size_label,
        "quantization_level": facts.level,
    }


def _model_info(facts: ModelFacts, length: int | None) -> dict[str, Any]:
    """Return the keys that clients look for, as in the header of a GGUF file. The length is that of the server's settings."""
    info: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "general.parameter_count": facts.num_parameters,
    }
    if length is not None:
        info[f"{ARCHITECTURE}.context_length"] = length
    if facts.hidden_size is not None:
        info[f"{ARCHITECTURE}.embedding_length"] = facts.hidden_size
    return info


POSTS: tuple[tuple[str, type[BaseModel], Any], ...] = (
    ("/api/chat", OllamaChatRequest, chat),
    ("/api/generate", OllamaGenerateRequest, generate),
    ("/api/embed", OllamaEmbedRequest, embed),
    ("/api/embeddings", OllamaEmbeddingsRequest, embeddings),
    ("/api/show", OllamaShowRequest, show),
)


def gets(state: ServerState) -> dict[str, Answer]:
    """Return the functions of the paths that have no body."""

    def in_thread(describe: Callable[[ServerState], dict[str, Any]]) -> Answer:
        async def run(request: Request) -> Response:
            return await state.workers.run(lambda: json_response(describe(state)))

        return bodiless(state, run)

    async def version(request: Request) -> Response:
        return json_response({"version": API_VERSION})

    return {"/api/tags": in_thread(tags), "/api/ps": in_thread(running), "/api/version": version}


def refusal(state: ServerState) -> Answer:
    """Return the function of the paths that change models: they are directories on this machine."""

    async def run(request: Request) -> Response:
        raise ApiError(
            400,
            f"{request.url.path} is not supported: the models are those of the command line; serve others with "
            "'staticllm serve PATH'",
            code="not_supported",
        )

    return bodiless(state, run)
