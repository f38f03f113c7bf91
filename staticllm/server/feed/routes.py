"""``/api/scheduler``: the feed of one model as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.endpoint import guarded
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.state import LOOK_SECONDS, ServerState

SCHEDULER = "/api/scheduler"
MAX_CURSOR_DIGITS = 15
QUERY: list[dict[str, Any]] = [
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]


def scheduler(state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def read(request: Request) -> Response:
        async def answer() -> Response:
            query = request.query_params
            unknown = sorted(set(query) - {"model", "after"})
            if unknown:
                raise ApiError(
                    400, f"Unknown parameter: {unknown[0][:200]!r}", param=unknown[0][:200], code="unknown_parameter"
                )
            model = state.hub.find(query.get("model"), "chat")
            document = state.scheduler.reader(model, state.settings.device, _cursor(query.get("after", "0")))
            head = {
                "model": model.spec.name,
                "models": [
                    {"name": each.spec.name, "type": each.spec.kind, "status": state.hub.status(each)}
                    for each in state.hub.models.values()
                ],
            }
            response = await state.observers.run_within(LOOK_SECONDS, lambda: json_response({**head, **document()}))
            response.headers["Cache-Control"] = "no-store"
            return response

        return await guarded(state, request, answer())

    read.__name__ = "scheduler"
    return read


def _cursor(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_CURSOR_DIGITS):
        raise ApiError(
            400, f"Invalid after: {text[:40]!r} is no cursor: give that of the last answer, or 0", param="after",
            code="invalid_value",
        )  # fmt: skip
    return int(text)
