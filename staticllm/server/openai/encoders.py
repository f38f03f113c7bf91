"""``/v1/embeddings`` and ``/v1/rerank``: texts become vectors, or are sorted by a query."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.pipelines.encoder_pipeline import QUERY_PRIORITY, EncoderHandle
from staticllm.server.answers.fields import Fields, IgnoredFields, Text
from staticllm.server.answers.work import Tier, TierFields, stated_class
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.models.model_options import options_of
from staticllm.server.models.served import ServedModel
from staticllm.server.telemetry import current_record

MAX_TEXTS = 2048
"""OpenAI's limit of texts in one request."""
DOCUMENT_PRIORITY = 0
"""The priority of texts for which nobody waits."""
Result = TypeVar("Result")
Handle = TypeVar("Handle", bound=EncoderHandle[Any])
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
TokenIds = Annotated[list[int], Field(fail_fast=True, min_length=1)]


class EmbeddingsRequest(IgnoredFields, TierFields):
    """The body of a request for vectors.

    ``input_type`` puts the model's own prompt for queries or documents before the texts; queries run before documents.
    """

    model_config = ConfigDict(title="EmbeddingsRequest")

    model: Text | None = None
    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    input_type: Literal["query", "document"] | None = None


class RerankDocument(Fields):
    """A document with its text."""

    text: str


class RerankRequest(IgnoredFields, TierFields):
    """The body of a request to sort texts, in the form that rerankers' clients send (`query`, `documents`, `top_n`)."""

    model_config = ConfigDict(title="RerankRequest")

    model: Text | None = None
    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True, min_length=1, max_length=MAX_TEXTS)]
    top_n: int | None = Field(None, ge=1, lt=2**31)
    return_documents: bool = False


async def embeddings(call: ApiCall, body: EmbeddingsRequest) -> Response:
    """Embed texts."""
    given = [body.input] if isinstance(body.input, str) else body.input
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise ApiError(
            400,
            "input holds token ids: give texts (for langchain's OpenAIEmbeddings, check_embedding_ctx_length=False)",
            param="input",
            code="unsupported_input",
        )
    model = call.state.hub.find(body.model, "embedding")
    priority = text_priority(call, model, body.service_tier, QUERY_PRIORITY if body.input_type == "query" else 0)

    async def run() -> Response:
        pipeline = model.embedding
        prompt = pipeline.prompts.get(body.input_type, "") if body.input_type else ""
        handle = await submitted(
            call,
            lambda: pipeline.submit_texts(texts, prompt=prompt, dimensions=body.dimensions, priority=priority),
        )
        vectors = await finished(handle)
        return await call.state.workers.run(lambda: json_response(_embedded(body, model, vectors, handle.num_tokens)))

    return await on_model(call, model, run, priority)


async def rerank(call: ApiCall, body: RerankRequest) -> Response:
    """Sort texts by a query."""
    model = call.state.hub.find(body.model, "rerank")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    priority = text_priority(call, model, body.service_tier, QUERY_PRIORITY)

    async def run() -> Response:
        pipeline = model.rerank
        handle = await submitted(call, lambda: pipeline.submit(body.query, texts, priority=priority))
        await finished(handle)
        scores = handle.scores(0)
        order = np.argsort(-scores, kind="stable")[: _top_n(call, body, model)]
        results: list[dict[str, Any]] = []
        for index in map(int, order):
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            results.append({**result, "document": {"text": texts[index]}} if body.return_documents else result)
        tokens = handle.num_tokens
        call.state.metrics.prompt_tokens.labels(model.spec.name).inc(tokens)
        return json_response(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": model.spec.name,
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
            }
        )

    return await on_model(call, model, run, priority)


def _top_n(call: ApiCall, body: RerankRequest, model: ServedModel) -> int | None:
    """Return how many documents are returned: as the request says, else the options of the model; None for all."""
    if body.top_n is not None:
        return body.top_n
    own = options_of(model.spec, call.state.settings).properties.get("top_n")
    return None if own is None else int(cast(Any, own))


def text_priority(call: ApiCall, model: ServedModel, tier: Tier | None, default: int) -> int:
    """Return the priority of texts: that of queries if their class is reactive, that of documents if it is proactive.

    ``default`` if nothing says the class.

    Raises:
        ApiError: as for ``stated_class``.
    """
    stated = stated_class(call, model, tier)
    return default if stated is None else DOCUMENT_PRIORITY if stated else QUERY_PRIORITY


async def on_model(
    call: ApiCall, model: ServedModel, run: Callable[[], Awaitable[Result]], priority: int = DOCUMENT_PRIORITY
) -> Result:
    """Run a request in its turn on a loaded model; it ends if the client goes."""

    async def admitted() -> Result:
        async with call.state.hub.using(model):
            admission = model.admission_of(priority <= DOCUMENT_PRIORITY)
            await admission.enter(call.client)
            record = current_record()
            before = record.text_seconds
            try:
                with call.state.metrics.running.labels(model.spec.name).track_inprogress():
                    return await run()
            finally:
                admission.shares.charge(call.client, record.text_seconds - before)
                admission.leave(call.client)

    return await call.connected(admitted())


async def submitted(call: ApiCall, submit: Callable[[], Handle]) -> Handle:
    """Return the handle of texts that ``submit`` enqueues, in a thread."""
    return await call.state.workers.run(submit, lambda handle: handle.cancel())


async def finished(handle: EncoderHandle[Any]) -> Any:
    """Return the result of a handle; if the caller is cancelled, give it up."""
    current_record().prompt_tokens += handle.num_tokens
    try:
        return await handle
    except BaseException:
        handle.cancel()
        raise
    finally:
        current_record().text_seconds += handle.device_seconds


def _embedded(body: EmbeddingsRequest, model: ServedModel, vectors: Any, num_tokens: int) -> dict[str, Any]:
    data = []
    for index, vector in enumerate(np.asarray(vectors, "<f4")):
        shown = vector.tolist() if body.encoding_format == "float" else base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model.spec.name, "usage": usage}
