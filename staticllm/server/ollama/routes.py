"""The paths of Ollama's API, and the ones among them that make no sense here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.api_error import ApiError, json_response
from staticllm.server.endpoint import guarded
from staticllm.server.ollama.embedding import embed, embeddings
from staticllm.server.ollama.fields import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from staticllm.server.ollama.generation import chat, generate
from staticllm.server.ollama.model_list import running, show, tags
from staticllm.server.state import ServerState

Answer = Callable[[Request], Awaitable[Response]]
API_VERSION = "0.12.6"
"""The version of Ollama whose API these endpoints follow: clients refuse older ones."""
POSTS: tuple[tuple[str, type[BaseModel], Any], ...] = (
    ("/api/chat", OllamaChatRequest, chat),
    ("/api/generate", OllamaGenerateRequest, generate),
    ("/api/embed", OllamaEmbedRequest, embed),
    ("/api/embeddings", OllamaEmbeddingsRequest, embeddings),
    ("/api/show", OllamaShowRequest, show),
)
REFUSED = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}")
REFUSED_METHODS = ("POST", "DELETE", "HEAD")


def gets(state: ServerState) -> dict[str, Answer]:
    """Return the functions of the paths that have no body."""

    def in_thread(describe: Callable[[ServerState], dict[str, Any]]) -> Answer:
        async def run(request: Request) -> Response:
            work = state.workers.run(lambda: json_response(describe(state)))
            return await guarded(state, request, work)

        return run

    async def version(request: Request) -> Response:
        return json_response({"version": API_VERSION})

    return {"/api/tags": in_thread(tags), "/api/ps": in_thread(running), "/api/version": version}


def refusal(state: ServerState) -> Answer:
    """Return the function of the paths that change models: they are directories on this machine."""

    async def run(request: Request) -> Response:
        async def answer() -> Response:
            raise ApiError(
                400,
                f"{request.url.path} is not supported: the models are those of the command line; serve others with "
                "'staticllm serve PATH'",
                code="not_supported",
            )

        return await guarded(state, request, answer())

    return run
