"""The paths of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from staticllm.server.endpoint import Answer, ApiCall, bodiless, endpoint
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.responses.create import create
from staticllm.server.responses.fields import ResponsesRequest
from staticllm.server.responses.store import ResponseStore
from staticllm.server.state import ServerState

PATH = "/v1/responses"
MAX_PAGE = 100
_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
_PAGE = [
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
]
_INCLUDE = ("include", "include[]")
"""Without effect: what is remembered is all that the answer had."""
Query = Mapping[str, str]
Find = Callable[[ResponseStore, str, str, Query], dict[str, Any]]


def add_responses_routes(app: FastAPI, state: ServerState, body_schema: dict[str, Any]) -> None:
    """Add the routes to an application. ``body_schema`` describes the body for OpenAPI."""
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
            openapi_extra={"parameters": [_ID, *(_PAGE if find is _input_items else [])]},
            name=f"{method.lower()}_response{path.removeprefix(stored).replace('/', '_')}",
        )


def _answer(state: ServerState, store: ResponseStore, find: Find) -> Answer:
    async def run(request: Request) -> Response:
        client = ApiCall(state, request).client
        id = request.path_params["response_id"]
        query = request.query_params
        return await state.workers.run(lambda: json_response(find(store, id, client, query)))

    return bodiless(state, run)


def _check(query: Query, *known: str) -> None:
    """Raise ``ApiError`` if a query has a parameter that would be ignored."""
    for name in query:
        if name not in known:
            shown = name[:200]
            raise ApiError(400, f"Unknown parameter: {shown!r}", param=shown, code="unknown_parameter")


def _get(store: ResponseStore, id: str, owner: str, query: Query) -> dict[str, Any]:
    _check(query, *_INCLUDE, "stream")
    if query.get("stream", "false").lower() not in ("false", "0", ""):
        raise _invalid("stream", "an answer that is remembered is returned as a whole, so leave it out")
    return store.get(id, owner).response


def _delete(store: ResponseStore, id: str, owner: str, query: Query) -> dict[str, Any]:
    _check(query)
    store.remove(id, owner)
    return {"id": id, "object": "response", "deleted": True}


def _input_items(store: ResponseStore, id: str, owner: str, query: Query) -> dict[str, Any]:
    """Return the page of items that the query asks for: by default all, the newest first, as OpenAI lists them."""
    _check(query, *_INCLUDE, *(str(each["name"]) for each in _PAGE))
    items = store.get(id, owner).items
    order = query.get("order", "desc")
    after = query.get("after")
    limit = query.get("limit", "")
    ordered = [*items] if order == "asc" else [*reversed(items)]
    ids = [item["id"] for item in ordered]
    if order not in ("asc", "desc"):
        raise _invalid("order", "must be asc or desc")
    if after is not None and after not in ids:
        raise _invalid("after", "is the id of no item")
    if limit and not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_PAGE):
        raise _invalid("limit", f"must be a number from 1 to {MAX_PAGE}")
    rest = ordered if after is None else ordered[ids.index(after) + 1 :]
    page = rest[: int(limit)] if limit else rest
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(page) < len(rest)}


def _invalid(name: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid {name}: {reason}", param=name, code="invalid_value")
