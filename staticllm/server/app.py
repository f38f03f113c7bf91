"""Makes the ASGI application: its endpoints, and the layers that every request passes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from staticllm.core import ProgressEvent
from staticllm.errors import ConfigError
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.server import catalog
from staticllm.server.anthropic.fields import CountRequest, MessagesRequest
from staticllm.server.anthropic.routes import count_tokens, messages
from staticllm.server.catalog import describe, model_list
from staticllm.server.decisions.openai import DecisionsRequest, decisions
from staticllm.server.decisions.systemone import PATH as SYSTEMONE
from staticllm.server.decisions.systemone import systemone
from staticllm.server.endpoint import Answer, bodiless, count_refusal, endpoint, form_endpoint
from staticllm.server.feed import encoder_of
from staticllm.server.http.access import AccessMiddleware, Origins, Preflights
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.http.forms import Uploads
from staticllm.server.http.lifecycle import LifecycleMiddleware
from staticllm.server.http.limits import PathMiddleware
from staticllm.server.models.kinds import served_kinds
from staticllm.server.ollama import routes as ollama
from staticllm.server.openai.chat import ChatRequest, chat_completions
from staticllm.server.openai.completions import CompletionRequest, completions
from staticllm.server.openai.encoders import EmbeddingsRequest, RerankRequest, embeddings, rerank
from staticllm.server.openai.infill import InfillRequest, infill
from staticllm.server.openai.speech import TranscriptionRequest, TranslationRequest, transcriptions, translations
from staticllm.server.openai.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from staticllm.server.page_files import ASSETS, add_page_files
from staticllm.server.responses.fields import ResponsesRequest
from staticllm.server.responses.routes import add_responses_routes
from staticllm.server.settings import ServerSettings
from staticllm.server.state import LOOK_SECONDS, ServerState
from staticllm.server.telemetry import AccessLog, Sink, TelemetryMiddleware

OPENAI_POSTS: tuple[tuple[str, type[BaseModel], Any], ...] = (
    ("/v1/chat/completions", ChatRequest, chat_completions),
    ("/v1/completions", CompletionRequest, completions),
    ("/v1/messages", MessagesRequest, messages),
    ("/v1/messages/count_tokens", CountRequest, count_tokens),
    ("/v1/decisions", DecisionsRequest, decisions),
    ("/v1/embeddings", EmbeddingsRequest, embeddings),
    ("/v1/rerank", RerankRequest, rerank),
    ("/v2/rerank", RerankRequest, rerank),
    ("/rerank", RerankRequest, rerank),
    ("/infill", InfillRequest, infill),
    ("/tokenize", TokenizeRequest, tokenize),
    ("/detokenize", DetokenizeRequest, detokenize),
)
POSTS: tuple[tuple[str, type[BaseModel], Any], ...] = (*OPENAI_POSTS, *ollama.POSTS)
FORMS: tuple[tuple[str, type[BaseModel], Any], ...] = (
    ("/v1/audio/transcriptions", TranscriptionRequest, transcriptions),
    ("/v1/audio/translations", TranslationRequest, translations),
)
"""The endpoints whose body is a form with a file."""
MODELS = "/v1/models"
HEALTH = "/health"
METRICS = "/metrics"
SCHEMA = "/openapi.json"
SCHEDULER = "/api/scheduler"
SCHEDULER_QUERY: list[dict[str, Any]] = [
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]
MAX_CURSOR_DIGITS = 15
OPEN_PATHS = (HEALTH, *ASSETS)
"""Paths that need no key. The files of the page hold no data, and ask for the key that their requests need."""
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def create_app(state: ServerState) -> FastAPI:
    """Return the application of a server. Its models begin to load when it starts, and are unloaded when it ends."""
    sinks = make_sinks(state.settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.hub.start()
        yield
        await state.hub.close()
        state.workers.close()
        state.observers.close()
        for sink in sinks:
            sink.close()

    app = FastAPI(
        title="staticllm", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=SCHEMA, redirect_slashes=False
    )
    _add_posts(app, state)
    _add_gets(app, state)
    add_responses_routes(app, state, _body_schema(ResponsesRequest))
    add_page_files(app, state)
    _add_heads(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    _add_layers(app, state, sinks)
    return app


def _add_posts(app: FastAPI, state: ServerState) -> None:
    """Add the endpoints that take JSON or a form, and those that refuse to change models."""
    uploads = Uploads(state.settings.max_waiting)
    posts = (*POSTS, *(post for kind in served_kinds().values() for post in kind.posts()))
    for path, answer, schema in (
        *((path, endpoint(state, kind, handler), _body_schema(kind)) for path, kind, handler in posts),
        *((path, form_endpoint(state, kind, handler, uploads), _form_schema(kind)) for path, kind, handler in FORMS),
    ):
        app.add_api_route(path, answer, methods=["POST"], openapi_extra=schema, response_model=None)
    app.add_api_route(SYSTEMONE, systemone(state), methods=["POST"], response_model=None)
    refusal = ollama.refusal(state)
    methods = [*ollama.REFUSED_METHODS]
    for path in ollama.REFUSED:
        app.add_api_route(path, refusal, methods=methods, response_model=None, include_in_schema=False)


def _add_gets(app: FastAPI, state: ServerState) -> None:
    for path, answer in {**_gets(state), **catalog.gets(state), **ollama.gets(state)}.items():
        app.add_api_route(path, answer, methods=["GET"], response_model=None)
    parameters = {"parameters": SCHEDULER_QUERY}
    app.add_api_route(SCHEDULER, _scheduler(state), methods=["GET"], openapi_extra=parameters, response_model=None)


def make_sinks(settings: ServerSettings) -> list[Sink]:
    """Return the access log and the spans that the settings ask for.

    Raises:
        ConfigError: the log cannot be written, or OpenTelemetry is not installed.
    """
    sinks: list[Sink] = []
    if settings.has_spans:
        try:
            from staticllm.server.spans import otlp_spans

            sinks.append(otlp_spans())
        except ModuleNotFoundError as error:
            raise ConfigError(f'--otel: {error.name} is not installed: pip install "staticllm[otel]"') from None
    if settings.access_log is not None:
        sinks.append(AccessLog(settings.access_log))
    return sinks


def _add_layers(app: FastAPI, state: ServerState, sinks: Sequence[Sink]) -> None:
    """Add what every request passes, and count what is refused there."""

    def refused(error: ApiError) -> None:
        count_refusal(state, error)

    async def http_error(request: Request, error: Exception) -> Response:
        found = _http_error(request, error)
        refused(found)
        return found.response(request.scope["path"])

    app.add_exception_handler(HTTPException, http_error)
    origins = Origins(state.settings)  # the last layer that is added is the first that a request passes
    app.add_middleware(LifecycleMiddleware, lifecycle=state.lifecycle, on_refusal=refused)
    app.add_middleware(
        AccessMiddleware, settings=state.settings, origins=origins, on_refusal=refused, open_paths=OPEN_PATHS
    )
    app.add_middleware(Preflights, origins=origins, on_refusal=refused)
    app.add_middleware(TelemetryMiddleware, sinks=sinks)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    app.add_middleware(PathMiddleware, paths=paths)


def _gets(state: ServerState) -> dict[str, Answer]:
    async def models(request: Request) -> Response:
        return json_response(model_list(state))

    async def one_model(request: Request) -> Response:
        return json_response(describe(state, state.hub.named(request.path_params["name"])))

    async def health(request: Request) -> Response:
        return _health(state)

    async def metrics(request: Request) -> Response:
        text = await state.observers.run_within(LOOK_SECONDS, state.metrics.text)
        return Response(text, media_type=METRICS_TYPE)

    return {
        MODELS: models, MODELS + "/{name:path}": bodiless(state, one_model), HEALTH: health,
        METRICS: bodiless(state, metrics),
    }  # fmt: skip


def _scheduler(state: ServerState) -> Answer:
    async def scheduler(request: Request) -> Response:
        query = request.query_params
        unknown = sorted(set(query) - {"model", "after"})
        if unknown:
            raise ApiError(
                400, f"Unknown parameter: {unknown[0][:200]!r}", param=unknown[0][:200], code="unknown_parameter"
            )
        has_chat = any(each.spec.kind == "chat" for each in state.hub.models.values())
        model = state.hub.find(query.get("model"), "chat") if has_chat or "model" in query else None
        document = state.scheduler.reader(model, _cursor(query.get("after", "0")))
        head = {
            "model": None if model is None else model.spec.name,
            "models": [
                {"name": each.spec.name, "type": each.spec.kind, "status": state.hub.status(each)}
                for each in state.hub.models.values()
            ],
            "encoders": [encoder_of(each) for each in state.hub.loaded if isinstance(each.pipeline, EncoderPipeline)],
        }
        response = await state.observers.run_within(LOOK_SECONDS, lambda: json_response({**head, **document()}))
        response.headers["Cache-Control"] = "no-store"
        return response

    return bodiless(state, scheduler)


def _cursor(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_CURSOR_DIGITS):
        raise ApiError(
            400, f"Invalid after: {text[:40]!r} is no cursor: give that of the last answer, or 0", param="after",
            code="invalid_value",
        )  # fmt: skip
    return int(text)


def _health(state: ServerState) -> Response:
    """Return 200 if requests are served: 503 while the server stops, and until a model that is being loaded is the first."""
    loading = []
    for model in state.hub.loading:
        event = model.progress
        loading.append({"model": model.spec.name, **({} if event is None else _shown(event))})
    if state.lifecycle.is_stopping:
        return json_response({"status": "stopping"}, 503)
    is_ready = bool(state.hub.loaded) or not loading
    headers = {} if is_ready else {"Retry-After": "1"}
    body = {"status": "ok" if is_ready else "loading", "loading": loading}
    return json_response(body, 200 if is_ready else 503, headers)


def _shown(event: ProgressEvent) -> dict[str, Any]:
    return {
        "stage": event.stage, "index": event.index, "total": event.total, "seconds": round(event.seconds, 3),
        "fraction": round(event.fraction, 4),
    }  # fmt: skip


def _add_heads(app: FastAPI) -> None:
    """Let each route of GET answer HEAD as well: the same headers, without the body, which uvicorn leaves out."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            app.router.routes.append(Route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False))


def _http_error(request: Request, error: Exception) -> ApiError:
    """Return the error for an unknown path or method, in the form of all errors."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    method = request.method
    is_unknown = error.status_code in (404, 405)
    shown = "".join(each if each.isprintable() else "\ufffd" for each in path[:200])
    message = f"{method} {shown} is not served: {SCHEMA} lists what is" if is_unknown else str(error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the part of a route's description that names the schema of its body."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _form_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the part of a route's description that names the schema of its form: a file, and fields beside it."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    file = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
    return {
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {"allOf": [file, reference]}}}}
    }


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with the schemas of all bodies."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        kinds: list[type[BaseModel]] = [*(kind for _, kind, _ in (*POSTS, *FORMS)), ResponsesRequest]
        for kind in kinds:
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[kind.__name__] = schema
        app.openapi_schema = found
    return app.openapi_schema
