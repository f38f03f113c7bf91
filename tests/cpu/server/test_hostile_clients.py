"""Tests of clients that mean harm: headers that are read in two ways, paths, many connections, floods, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

from staticllm.errors import ConfigError
from staticllm.server.http import access
from staticllm.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
SECONDS = 60
CLIENT = httpx.Client(timeout=SECONDS, verify=False, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A client that keeps no connection open."""


def talk(url, data, seconds=SECONDS):
    """Send bytes to a server, and return all that it sends until it closes the connection."""
    with connected(url, seconds) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def connected(url, seconds=SECONDS):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=seconds)


def rejected(served, reason):
    """Return how many requests were refused for a reason, and the option that would have helped."""
    page = CLIENT.get(served.url + "/metrics").text
    lines = [line for line in page.splitlines() if f'reason="{reason}"' in line and "_total{" in line]
    return {line.partition('knob="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


POST = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HIDDEN = b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SMUGGLED = {
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\naaaaa",
    "length and coding": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    "coding and length": POST + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n" + HIDDEN,
    "length and coding of a GET": GET + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    "coding of HTTP/1.0": b"POST /v1/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    + HIDDEN,
    "coding twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
    "unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + HIDDEN,
    "folded header": GET + b"X-One: a\r\n b\r\n\r\n",
    "folded coding": POST + b"Transfer-Encoding:\r\n\tchunked\r\n\r\n" + HIDDEN,
    "folded first header": b"GET /v1/models HTTP/1.1\r\n X: y\r\nHost: 127.0.0.1\r\n\r\n",
    "line feeds alone": b"GET /v1/models HTTP/1.1\nHost: 127.0.0.1\n\n",
    "one line feed alone": GET + b"X-One: a\nContent-Length: 9\r\n\r\n",
    "line feed alone at the end": GET + b"X-One: a\r\n\n",
    "carriage return alone": GET + b"X-One: a\rContent-Length: 9\r\n\r\n",
    "NUL in a name": GET + b"X\x00One: a\r\n\r\n",
    "NUL in a value": GET + b"X-One: a\x00b\r\n\r\n",
    "space before the colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "sign in a length": POST + b"Content-Length: +2\r\n\r\n{}",
    "negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "no colon": GET + b"bad header\r\n\r\n",
    "two hosts": GET + b"Host: b\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "another version": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLED)
def test_what_could_hide_a_second_request_is_refused_in_one_line(served, case):
    before = rejected(served, "invalid_http").get("", 0)
    head, _, rest = talk(served.url, SMUGGLED[case]).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert rest.startswith(b"Invalid HTTP request")
    assert b"\n" not in rest
    assert b"HTTP/1.1 200" not in rest
    assert rejected(served, "invalid_http") == {"": before + 1}


def test_a_hidden_request_behind_a_good_one_is_refused(served):
    """Each request of a connection is looked at, also if it came with the one before, and in pieces."""
    good = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    found = talk(served.url, good + SMUGGLED["folded header"])
    assert found.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 200 " in found
    assert b"folded over several lines" in found
    with connected(served.url) as connection:
        for byte in SMUGGLED["one line feed alone"]:
            with contextlib.suppress(ConnectionError):  # it is refused before its end
                connection.sendall(bytes([byte]))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_good_requests_in_pieces_and_in_one_piece_are_answered(served):
    data = GET + b"X-One: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    assert talk(served.url, data + data + last).count(b"HTTP/1.1 200 ") == 3
    with connected(served.url) as connection:
        for byte in data + last:
            connection.sendall(bytes([byte]))
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.count(b"HTTP/1.1 200 ") == 2


PATHS = [
    "/v1/models/../../../../etc/passwd",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/models/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/..%5c..%5cboot.ini",
    "/v1/models//etc/passwd",
    "/v1/models/%00",
    "/v1/models/demo%00",
    "/v1/models/demo/../demo",
    "/api/v0/models/..%2f..%2fetc%2fpasswd",
    "/props?model=../../../etc/passwd",
    "/api/scheduler?model=..%2f..%2fetc%2fpasswd",
    "/../../etc/passwd",
    "/..%2f..%2fetc%2fpasswd",
    "/page/..%2f..%2fapp.py",
    "/app.js/../../app.py",
    "//etc/passwd",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_raw_path_leaves_no_folder(served, path):
    """Nothing normalises it on the way: names are looked up among the served ones, and never joined to a folder."""
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    head, _, rest = talk(served.url, request.encode()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"root:" not in rest
    message = httpx.Response(404, content=rest).json()["error"]["message"]
    assert "\n" not in message
    assert "\x00" not in message


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "demo/../demo", "..\\demo", "demo\x00", "C:\\x", "\n"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/v1/rerank", "/api/chat", "/api/show"])
def test_a_model_name_leaves_no_folder(served, path, name):
    fields = {
        "/v1/completions": {"prompt": "a"}, "/v1/embeddings": {"input": "a"}, "/v1/rerank": {"query": "a", "documents": ["a"]},
        "/api/show": {},
    }.get(path, {"messages": [{"role": "user", "content": "Hello"}]})  # fmt: skip
    found = CLIENT.post(served.url + path, json={"model": name, **fields})
    assert found.status_code == 404
    assert "root:" not in found.text
    error = found.json()["error"]
    assert "\n" not in (error if isinstance(error, str) else error["message"])


NOT_LOCAL = [
    "0.0.0.0",
    "::",
    "192.168.1.5",
    "fe80::1",
    "example.com",
    "",
    "127.0.0.1.evil.example",
    "localhost.evil",
    "[::]",
]


@pytest.mark.parametrize("host", NOT_LOCAL)
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match="there is no API key: give --api-key, or --insecure") as refused:
        ServerSettings(host=host).check()
    assert "\n" not in str(refused.value)
    ServerSettings(host=host, api_keys=("key",)).check()
    ServerSettings(host=host, is_insecure=True).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_local_address_needs_none(host):
    ServerSettings(host=host).check()


@pytest.mark.parametrize("given", ["one", "two", "three", "wrong", "", "\u00e9", "one "])
def test_each_key_is_compared_whole_and_in_constant_time(monkeypatch, given):
    """All keys are compared, whichever is right, as digests of one length; nothing else looks at them."""
    keys, compared, original = ("one", "two", "three"), [], hmac.compare_digest

    def compare(left, right):
        compared.append((left, right))
        return original(left, right)

    settings = ServerSettings(api_keys=keys)
    layer = access.AccessMiddleware(None, settings, access.Origins(settings), lambda error: None, ())
    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    header = f"Bearer {given}".encode()
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", header)], "client": ("127.0.0.1", 1)}
    refusal = layer.refusal(scope)
    assert (refusal is None) == (given.strip() in keys)
    assert len(compared) == len(keys)
    assert {type(side) for pair in compared for side in pair} == {bytes}
    assert {len(side) for pair in compared for side in pair} == {32}


def test_refusals_of_every_layer_are_counted():
    with serving(api_keys=("right",), allowed_origins=("https://chat.example",)) as served:
        key = {"Authorization": "Bearer right"}

        def counted(reason):
            page = CLIENT.get(served.url + "/metrics", headers=key).text
            return [line for line in page.splitlines() if f'reason="{reason}"' in line and "_total{" in line]

        def ask(method, path, **headers):
            return CLIENT.request(method, served.url + path, headers=headers).status_code

        foreign = {"Origin": "https://evil.example"}
        assert ask("GET", "/v1/models") == 401
        assert ask("GET", "/v1/models", **foreign) == 403
        assert ask("OPTIONS", CHAT, **foreign, **{"Access-Control-Request-Method": "POST"}) == 403
        assert ask("GET", "/v1/unknown", **key) == 404
        assert ask("GET", "/unknown/2", **key) == 404
        assert ask("DELETE", CHAT, **key) == 405
        assert counted("invalid_api_key") == ['staticllm_rejected_requests_total{knob="",reason="invalid_api_key"} 1.0']
        assert counted("origin_not_allowed") == [
            'staticllm_rejected_requests_total{knob="--allowed-origins",reason="origin_not_allowed"} 2.0'
        ]
        assert counted("not_found") == ['staticllm_rejected_requests_total{knob="",reason="not_found"} 2.0']
        assert len(counted("method_not_allowed")) == 1
        served.state.lifecycle.is_stopping = True
        assert ask("GET", "/v1/models", **key) == 503
        assert counted("stopping") == ['staticllm_rejected_requests_total{knob="",reason="stopping"} 1.0']
    with serving() as local:
        assert CLIENT.get(local.url + "/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert rejected(local, "host_not_allowed") == {"": 1}


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/models/demo", "/api/tags", "/api/version", "/metrics", "/",
                                  "/api/v0/models", "/props", "/api/scheduler"])  # fmt: skip
def test_head_answers_as_get_without_the_body(served, path):
    whole, head = (CLIENT.request(method, served.url + path) for method in ("GET", "HEAD"))
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert "content-length" in head.headers
    assert CLIENT.head(served.url + CHAT).status_code == 405


def test_more_connections_than_allowed_are_503():
    with serving(max_connections=4) as served:
        held = served.server.server_state.connections
        wait_for(lambda: not held, SECONDS)
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(connected(served.url))
            wait_for(lambda: len(held) == 4, SECONDS)
            refused = CLIENT.get(served.url + "/v1/models")
            error = refused.json()["error"]
            assert refused.status_code == 503
            assert error["code"] == "too_many_connections"
            assert refused.headers["retry-after"]
            assert "--max-connections" in error["message"]
            assert "\n" not in error["message"]
        wait_for(lambda: not held, SECONDS)
        assert CLIENT.get(served.url + "/v1/models").status_code == 200
        assert rejected(served, "too_many_connections") == {"--max-connections": 1}


def test_a_flood_of_tokenize_is_bounded_and_stops_no_stream():
    """While every thread is busy, 64 calls per thread wait, and more are refused; a stream goes on."""
    with serving(num_threads=1, properties={"MIN_RESPONSE_LEN": 6000}) as served, ThreadPoolExecutor(80) as pool:
        gate, is_closed = threading.Event(), threading.Event()
        body = {**HELLO, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        try:
            with CLIENT.stream("POST", served.url + CHAT, json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                work = served.state.workers.run(lambda: (is_closed.set(), gate.wait(SECONDS)))
                held = asyncio.run_coroutine_threadsafe(work, served.loop)
                assert is_closed.wait(SECONDS)
                asked = [
                    pool.submit(CLIENT.post, served.url + "/tokenize", json={"content": "a b c " * 100})
                    for _ in range(80)
                ]
                wait_for(lambda: sum(each.done() for each in asked) == 16, SECONDS)
                for _ in range(5):
                    next(lines)
                assert CLIENT.get(served.url + "/health").status_code == 200
                gate.set()
                found = [each.result() for each in asked]
        finally:
            gate.set()
        held.result(SECONDS)
        assert sorted(each.status_code for each in found) == [200] * 64 + [429] * 16
        assert all(int(each.headers["retry-after"]) >= 1 for each in found if each.status_code == 429)
        served.wait_until_idle()


def slow_reader(served, request):
    """Return a connection whose buffers are small, on which a request was sent."""
    served._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SECONDS)
    connection.connect((host, int(port)))
    connection.sendall(request)
    return connection


def test_a_client_that_takes_nothing_is_left_after_a_time():
    """Its stream is cancelled, and its connection does not wait for what it never takes."""
    with serving(send_seconds=1.0, properties={"MIN_RESPONSE_LEN": 6000}) as served:
        body = {
            **HELLO,
            "max_tokens": 5000,
            "ignore_eos": True,
            "stream": True,
            "n": 5,
            "logprobs": True,
            "temperature": 1,
        }
        content = httpx.Request("POST", served.url, json=body).content
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        with slow_reader(served, head.encode() + content):
            wait_for(lambda: served.state.lifecycle.num_requests == 1, SECONDS)
            wait_for(lambda: served.state.lifecycle.num_requests == 0, SECONDS)
            wait_for(lambda: not served.server.server_state.connections, SECONDS)
            served.wait_until_idle()
            assert "staticllm_cancelled_requests_total 1.0" in CLIENT.get(served.url + "/metrics").text


def test_a_whole_answer_that_nobody_takes_is_dropped_after_a_time():
    """It is in the buffer, and the connection would be closed once it was sent: never."""
    with serving(send_seconds=1.0) as served:
        request = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        with slow_reader(served, (request + b"\r\n") * 8 + request + b"Connection: close\r\n\r\n"):
            wait_for(lambda: served.server.server_state.connections, SECONDS)
            wait_for(lambda: not served.server.server_state.connections, SECONDS)
