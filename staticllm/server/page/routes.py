"""The routes of the web page: its files, and the feed of the scheduler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.api_error import ApiError, json_response
from staticllm.server.endpoint import guarded
from staticllm.server.page.assets import ASSETS, HEADERS, Asset, read_asset
from staticllm.server.state import LOOK_SECONDS, ServerState

SCHEDULER = "/api/scheduler"
MAX_CURSOR_DIGITS = 15
_QUERY: list[dict[str, Any]] = [
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]


def add_page_routes(app: FastAPI, state: ServerState) -> list[str]:
    """Add the routes to an application, and return their paths."""
    for path in ASSETS:
        app.add_api_route(
            path,
            _file(state, read_asset(path)),
            methods=["GET", "HEAD"],
            include_in_schema=False,
            response_model=None,
        )
    app.add_api_route(
        SCHEDULER, _scheduler(state), methods=["GET"], openapi_extra={"parameters": _QUERY}, response_model=None
    )
    return [*ASSETS, SCHEDULER]


def _file(state: ServerState, asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": asset.tag}

    async def file(request: Request) -> Response:
        async def answer() -> Response:
            if request.headers.get("if-none-match") == asset.tag:
                return Response(status_code=304, headers=headers)
            return Response(asset.data, headers=headers, media_type=asset.media_type)

        return await guarded(state, request, answer())

    return file


def _scheduler(state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def scheduler(request: Request) -> Response:
        async def answer() -> Response:
            query = request.query_params
            unknown = sorted(set(query) - {"model", "after"})
            if unknown:
                raise ApiError(
                    400, f"Unknown parameter: {unknown[0][:200]!r}", param=unknown[0][:200], code="unknown_parameter"
                )
            model = state.hub.find(query.get("model"), "chat")
            read = state.scheduler.reader(model, state.settings.device, _cursor(query.get("after", "0")))
            head = {
                "model": model.spec.name,
                "models": [
                    {"name": each.spec.name, "type": each.spec.kind, "status": state.hub.status(each)}
                    for each in state.hub.models.values()
                ],
            }
            response = await state.observers.run_within(LOOK_SECONDS, lambda: json_response({**head, **read()}))
            response.headers["Cache-Control"] = "no-store"
            return response

        return await guarded(state, request, answer())

    return scheduler


def _cursor(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_CURSOR_DIGITS):
        raise ApiError(
            400, f"Invalid after: {text[:40]!r} is no cursor: give that of the last answer, or 0", param="after",
            code="invalid_value",
        )  # fmt: skip
    return int(text)
