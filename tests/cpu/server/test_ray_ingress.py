"""Tests how the ingress of a cluster reads requests, without a cluster."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from starlette.requests import Request

from staticllm import demo_model_path
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ModelSpec, demo_spec
from staticllm.server.ray_app import ingress as module
from staticllm.server.ray_app.cluster_settings import ClusterSettings


@pytest.fixture
def ingress():
    specs = [
        demo_spec(),
        ModelSpec("tiny", demo_model_path(), "embedding"),
        ModelSpec("order", demo_model_path(), "rerank"),
    ]
    handles = {
        name: SimpleNamespace(options=lambda name=name, **_: SimpleNamespace(name=name)) for name in ("chat", "encoder")
    }
    return module.Ingress(specs, ClusterSettings(routing="load"), handles)


def request(path, body=b"{}"):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "client": None,
             "server": ("127.0.0.1", 80), "scheme": "http"}  # fmt: skip
    return Request(scope, receive)


@pytest.mark.parametrize("prefix", ["", "/v1", "/api/v0"])
@pytest.mark.parametrize("slash", ["", "/"])
def test_every_form_of_a_path_finds_its_replicas(ingress, prefix, slash):
    relay = ingress.relay_of(request(f"{prefix}/embeddings{slash}"), b'{"input": "a"}')
    assert relay.handle.name == "encoder"
    assert relay.request.model == "tiny"
    relay = ingress.relay_of(request(f"{prefix}/rerank{slash}"), b'{"query": "a"}')
    assert relay.handle.name == "encoder"
    assert relay.request.model == "order"
    relay = ingress.relay_of(request(f"{prefix}/chat/completions{slash}"), b'{"stream": true, "messages": []}')
    assert relay.handle.name == "chat"
    assert relay.replay is not None
    assert b'"seed":' in relay.request.body


def test_a_body_is_read_off_the_event_loop(ingress, monkeypatch):
    import asyncio

    threads = []

    def relay(request, body):
        threads.append(threading.get_ident())
        raise ApiError(400, "seen")

    monkeypatch.setattr(ingress, "relay_of", relay)
    assert asyncio.run(ingress(request("/v1/chat/completions"))).status_code == 400
    assert threads
    assert threads[0] != threading.get_ident()


def test_a_wide_body_is_refused_before_it_is_parsed(ingress, monkeypatch):
    monkeypatch.setattr(module, "from_json", lambda *_, **__: pytest.fail("it is parsed"))
    with pytest.raises(ApiError, match="100000 arrays"):
        ingress.relay_of(request("/v1/chat/completions"), b'{"messages":[' + b"[]," * 200_000 + b"[]]}")
