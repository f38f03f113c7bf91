"""The lists and descriptions of models that clients of OpenAI, LM Studio and llamacpp ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openvino_genai as genai
from starlette.requests import Request
from starlette.responses import Response

from staticllm.errors import ClosedError
from staticllm.pipelines.generation.options.table import UNLIMITED
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.catalog.facts import ARCHITECTURE, context_length, current_facts, listed_facts
from staticllm.server.endpoint import guarded
from staticllm.server.http.errors import json_response
from staticllm.server.models.served import ServedModel
from staticllm.server.state import ServerState
from staticllm.version import __version__


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


TYPES = {"chat": "llm", "embedding": "embeddings"}
"""LM Studio's names of our kinds. It has none for rerankers, and clients refuse lists with types that they do not know."""
STATES = {"loaded": "loaded", "loading": "loading", "unloaded": "not-loaded"}
FORMAT = "gguf"
"""Our models are not GGUF files, but Zed refuses lists with other formats than those that LM Studio runs."""


def lm_studio_list(state: ServerState) -> dict[str, Any]:
    """Return all models. Reads their files; runs in a thread."""
    listed = [lm_studio_model(state, model) for model in state.hub.models.values() if model.spec.kind in TYPES]
    return {"object": "list", "data": listed}


def lm_studio_model(state: ServerState, model: ServedModel) -> dict[str, Any]:
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


_PARAMS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def props(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return the properties of a chat model; those of its generation config only while it is loaded. Runs in a thread.

    ``model_path`` is the model's name: clients learn no paths of this machine.
    """
    facts, length, pipeline = current_facts(model), context_length(model, state.settings), model.pipeline
    found: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": length, "params": {}},
        "model_alias": model.spec.name,
        "model_path": model.spec.name,
        "chat_template": facts.template,
        "chat_template_caps": {"supports_tools": facts.has_tools, "supports_tool_calls": facts.has_calls},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"staticllm-{__version__}",
        "is_sleeping": pipeline is None,
    }
    tokenizer = _tokenizer_of(pipeline)
    if isinstance(pipeline, StaticLLMPipeline) and tokenizer is not None:
        config = pipeline.get_generation_config()
        params = {name: getattr(config, name) for name in _PARAMS}
        if params["top_k"] == UNLIMITED:
            params["top_k"] = 0  # llamacpp's value for all tokens
        found["default_generation_settings"]["params"] = params if config.do_sample else {**params, "temperature": 0.0}
        found["total_slots"] = model.num_seqs(state.settings.device)
        found["bos_token"], found["eos_token"] = tokenizer.get_bos_token(), tokenizer.get_eos_token()
    return found


def _tokenizer_of(pipeline: object) -> genai.Tokenizer | None:
    """Return the tokenizer of a chat model; None if it is not loaded, or is being unloaded."""
    try:
        return pipeline.get_tokenizer() if isinstance(pipeline, StaticLLMPipeline) else None
    except ClosedError:
        return None


Answer = Callable[[Request], Awaitable[Response]]
MODELS = "/api/v0/models"


def gets(state: ServerState) -> dict[str, Answer]:
    """Return the functions of the paths, none of which has a body."""

    def in_thread(describe: Callable[[Request], Callable[[], dict[str, Any]]]) -> Answer:
        async def run(request: Request) -> Response:
            async def answer() -> Response:
                work = describe(request)
                return await state.workers.run(lambda: json_response(work()))

            return await guarded(state, request, answer())

        return run

    def one(request: Request) -> Callable[[], dict[str, Any]]:
        model = state.hub.named(request.path_params["name"])
        return lambda: lm_studio_model(state, model)

    def properties(request: Request) -> Callable[[], dict[str, Any]]:
        model = state.hub.find(request.query_params.get("model"), "chat")
        return lambda: props(state, model)

    return {
        MODELS: in_thread(lambda _: lambda: lm_studio_list(state)),
        MODELS + "/{name:path}": in_thread(one),
        "/props": in_thread(properties),
    }
