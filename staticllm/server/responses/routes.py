"""The paths of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.api_error import json_response
from staticllm.server.endpoint import Call, endpoint, guarded
from staticllm.server.responses.create import create
from staticllm.server.responses.fields import ResponsesRequest
from staticllm.server.responses.store import ResponseStore
from staticllm.server.state import ServerState

PATH = "/v1/responses"
Answer = Callable[[Request], Awaitable[Response]]


def add_responses_routes(app: FastAPI, state: ServerState, body_schema: dict[str, Any]) -> list[str]:
    """Add the routes to an application, and return their paths. ``body_schema`` describes the body for OpenAPI."""
    store = ResponseStore()
    handler = partial(create, store)
    handler.__name__ = "create_response"  # type: ignore[attr-defined]
    app.add_api_route(
        PATH,
        endpoint(state, ResponsesRequest, handler),
        methods=["POST"],
        openapi_extra=body_schema,
        response_model=None,
    )
    stored = PATH + "/{response_id}"
    for path, method, find in (
        (stored, "GET", _get),
        (stored, "DELETE", _delete),
        (stored + "/input_items", "GET", _input_items),
    ):
        app.add_api_route(
            path,
            _answer(state, store, find),
            methods=[method],
            response_model=None,
            openapi_extra={"parameters": [_ID]},
            name=f"{method.lower()}_response{path.removeprefix(stored).replace('/', '_')}",
        )
    return [PATH]


_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
Find = Callable[[ResponseStore, str, str], dict[str, Any]]


def _answer(state: ServerState, store: ResponseStore, find: Find) -> Answer:
    async def run(request: Request) -> Response:
        async def answer() -> Response:
            found = find(store, request.path_params["response_id"], Call(state, request).client)
            return await state.workers.run(lambda: json_response(found))

        return await guarded(state, request, answer())

    return run


def _get(store: ResponseStore, id: str, owner: str) -> dict[str, Any]:
    return store.get(id, owner).response


def _delete(store: ResponseStore, id: str, owner: str) -> dict[str, Any]:
    store.remove(id, owner)
    return {"id": id, "object": "response", "deleted": True}


def _input_items(store: ResponseStore, id: str, owner: str) -> dict[str, Any]:
    items = [*reversed(store.get(id, owner).items)]  # the newest first, as OpenAI lists them
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False}
