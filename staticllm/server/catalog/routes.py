"""The paths under which LM Studio's and llamacpp's clients look for models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.api_error import json_response
from staticllm.server.catalog.llama_cpp import props
from staticllm.server.catalog.lm_studio import describe, model_list
from staticllm.server.endpoint import guarded
from staticllm.server.state import ServerState

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
        return lambda: describe(state, model)

    def properties(request: Request) -> Callable[[], dict[str, Any]]:
        model = state.hub.find(request.query_params.get("model"), "chat")
        return lambda: props(state, model)

    return {
        MODELS: in_thread(lambda _: lambda: model_list(state)),
        MODELS + "/{name:path}": in_thread(one),
        "/props": in_thread(properties),
    }
