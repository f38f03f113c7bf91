"""The entrance of the cluster: takes HTTP requests from Ray's proxies, and sends each to a replica that suits it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic_core import from_json
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from staticllm.server.app import METRICS, METRICS_TYPE
from staticllm.server.endpoint import CLIENT_GONE
from staticllm.server.http.errors import ApiError, to_json
from staticllm.server.http.limits import LM_STUDIO, PREFIX, check_json, read_body
from staticllm.server.models.served import ModelSpec
from staticllm.server.ray_app.cluster_settings import ClusterSettings
from staticllm.server.ray_app.messages import ReplicaRequest, prompt_of
from staticllm.server.ray_app.prefix_router import keep_tree_here
from staticllm.server.ray_app.relay import Relay
from staticllm.server.ray_app.replay import RESUMED_PATHS, EventReplay, seeded

BODY_SECONDS = 60.0
METRICS_SECONDS = 5.0
ENCODER_PATHS = {
    "/embeddings": "embedding", "/api/embed": "embedding", "/api/embeddings": "embedding",
    "/rerank": "rerank", "/v2/rerank": "rerank",
}  # fmt: skip


class _Joined(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def joined(pages: Mapping[str, bytes]) -> bytes:
    """Return one page of metrics from those of each replica, in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                whole.samples.append(sample._replace(labels={"replica": replica, **sample.labels}))
    registry = CollectorRegistry()
    registry.register(_Joined(families.values()))
    return generate_latest(registry)


class Ingress:
    """Forwards requests. ``handles`` are those of the deployments, by what they serve: ``chat`` and ``encoder``."""

    def __init__(
        self, specs: Sequence[ModelSpec], settings: ClusterSettings, handles: Mapping[str, DeploymentHandle]
    ) -> None:
        self._kinds = {spec.name: spec.kind for spec in specs}
        self._settings = settings
        self._handles = dict(handles)
        if settings.routing == "prefix" and "chat" in self._handles:
            keep_tree_here(self._handles["chat"])

    async def __call__(self, request: Request) -> Response:
        """Return the answer of a replica. Ray cancels the call if the client closes the connection."""
        try:
            body = await read_body(request, self._settings.max_body, BODY_SECONDS)
            path = request.url.path.rstrip("/")
            relay = await asyncio.to_thread(self.relay_of, request, body)
            head = await relay.begin()
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except ApiError as error:
            return error.response(request.url.path)
        if path == METRICS and head.status == 200:  # the key is right
            return Response(await self._metrics(), media_type=METRICS_TYPE)
        answer = StreamingResponse(relay.parts(), head.status)
        answer.raw_headers = [(name.lower(), value) for name, value in head.headers]
        return answer

    async def _metrics(self) -> bytes:
        """Return the metrics of all replicas that answer in time."""
        asked = [handle.broadcast("metrics") for handle in self._handles.values()]
        found = [await each.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True) for each in asked]
        pages = {page[0]: page[1] for each in found for page in each if isinstance(page, tuple)}
        return await asyncio.to_thread(joined, pages)

    def relay_of(self, request: Request, body: bytes) -> Relay:
        """Read a request, and return its way to a replica. Runs in a thread: long bodies take long.

        Raises:
            ApiError: the body has too many parts to be parsed.
        """
        check_json(body)
        values = _values(body)
        path = endpoint_of(request.url.path)
        kind = ENCODER_PATHS.get(path, "chat")
        name = self._model_of(values, kind) if request.method == "POST" else ""  # what is only looked at loads no model
        group = "chat" if self._kinds.get(name, kind) == "chat" else "encoder"
        handle = self._handles.get(group) or next(iter(self._handles.values()))
        asked = ReplicaRequest(
            request.method,
            request.url.path,
            request.url.query.encode(),
            tuple(request.headers.raw),
            (request.client.host, request.client.port) if request.client else None,
            body,
            prompt_of(values),
            name,
        )
        if not (path in RESUMED_PATHS and values.get("stream") is True):
            return Relay(handle, asked)
        return Relay(handle, asked.with_body(to_json(seeded(values)).encode()), EventReplay())

    def _model_of(self, values: dict[str, Any], kind: str) -> str:
        """Return the model that a body asks for: without a name the first of its kind; "" for a wrong name, which the replica
        refuses."""
        name = values.get("model")
        if name is None:
            return next((name for name, each in self._kinds.items() if each == kind), "")
        return name if isinstance(name, str) and name in self._kinds else ""


def endpoint_of(path: str) -> str:
    """Return a path without its prefix, ``/v1`` or LM Studio's ``/api/v0``, and without slashes at its end."""
    path = "/" + path.strip("/")
    for prefix in (PREFIX, LM_STUDIO):
        if path.startswith(prefix + "/"):
            return path.removeprefix(prefix)
    return path


def _values(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body; none if it is something else, which the replica refuses."""
    try:
        found = from_json(body, allow_inf_nan=False) if body else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
