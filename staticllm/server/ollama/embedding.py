"""``/api/embed`` and the older ``/api/embeddings``: texts become vectors."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from starlette.responses import Response

from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import json_response, too_long
from staticllm.server.models.served import ServedModel
from staticllm.server.ollama.fields import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    nanoseconds,
    seconds_of,
    served_name,
)
from staticllm.server.openai.encoders import DOCUMENT_PRIORITY, finished, on_model, submitted, text_priority


async def embed(call: ApiCall, body: OllamaEmbedRequest) -> Response:
    """Embed one text or several."""
    texts = [body.input] if isinstance(body.input, str) else body.input
    begin = time.perf_counter()
    vectors, num_tokens, loaded = await _vectors(call, body, texts, body.dimensions)
    answer = {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": nanoseconds(time.perf_counter() - begin),
        "load_duration": nanoseconds(loaded - begin),
        "prompt_eval_count": num_tokens,
    }
    return await call.state.workers.run(lambda: json_response(answer))


async def embeddings(call: ApiCall, body: OllamaEmbeddingsRequest) -> Response:
    """Embed one text, in the older form."""
    vectors, _, _ = await _vectors(call, body, [body.prompt] if body.prompt else [], None)
    return json_response({"embedding": vectors[0] if vectors else []})


async def _vectors(
    call: ApiCall, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, texts: list[str], dimensions: int | None
) -> tuple[list[list[float]], int, float]:
    """Return the vectors, the number of tokens, and the moment at which the model was loaded.

    Raises:
        ApiError: the model does not exist or is of another kind, or a text is too long and ``truncate`` is false.
    """
    hub = call.state.hub
    seconds = None if body.keep_alive is None else seconds_of(body.keep_alive)
    model = hub.find(served_name(hub, body.model), "embedding")

    priority = text_priority(call, model, None, DOCUMENT_PRIORITY)

    async def run() -> tuple[list[list[float]], int, float]:
        loaded = time.perf_counter()
        hub.keep_alive(model, seconds)
        if not texts:
            return [], 0, loaded
        handle = await submitted(call, lambda: _submit(model, body.truncate, texts, dimensions, priority))
        found = await finished(handle)
        rows = await call.state.workers.run(lambda: np.asarray(found, "<f4").tolist())
        return rows, handle.num_tokens, loaded

    return await on_model(call, model, run, priority)


def _submit(model: ServedModel, is_truncated: bool, texts: list[str], dimensions: int | None, priority: int) -> Any:
    pipeline = model.embedding
    if not is_truncated and (longest := max(pipeline.count_tokens(texts))) > pipeline.max_length:
        raise too_long(pipeline.max_length, "input", f"{longest} tokens", "shorten it, or leave truncate out")
    return pipeline.submit_texts(
        texts, prompt="", dimensions=dimensions, priority=priority
    )  # as Ollama: the text as it is
