"""Tests the daemon against clients that lie, stall, flood or die: they get one line, and the others notice nothing."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing import connection as mp

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.daemon import server
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel
from staticllm.wire.messages import MAX_FRAME, Kind, Message, encode
from tests.daemons import RawClient, daemon_process, daemon_thread, wait_for
from tests.helpers import EXACT

ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.xml"
    rows = op.parameter([-1, 8], np.float32, name="rows")
    weights = op.constant(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))
    ov.save_model(ov.Model([op.matmul(rows, weights, False, False)], [rows], "m"), path, compress_to_fp16=False)
    return path


@pytest.fixture
def expected(model_path):
    return ov.Core().compile_model(str(model_path), "CPU")(ROWS)[0]


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run", clients=3, models=2, requests=4, block_bytes=1 << 20) as daemon:
        yield daemon


@pytest.fixture
def honest(daemon, model_path, expected):
    """A client whose calls must go on, whatever others do."""
    with RawClient() as client:
        handle = client.model(model_path).body["model"]
        with client.request(handle) as request:
            (found,) = request.infer(ROWS)
            np.testing.assert_array_equal(found, expected)
            yield request
            (found,) = request.infer(ROWS)
            np.testing.assert_array_equal(found, expected)
            assert request.ask(Kind.PING).kind is Kind.OK


def test_a_wrong_key_is_refused(honest, tmp_path):
    (tmp_path / "run" / "key").write_bytes(os.urandom(32))
    with pytest.raises(endpoint.EndpointError, match="does not accept the key"):
        RawClient()


@pytest.mark.parametrize(
    "hello, reason",
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"openvino": "2025.1.0-1"}, "use the same release"),
        ({"session": "0" * 32}, "connect again"),
        ({"protocol": "1"}, "protocol must be a whole number"),
        ({"program": "x" * 1000}, "program must be a text"),
        ({"priority": 1000}, "priority must be a whole number"),
    ],
)
def test_a_client_that_does_not_fit_is_told_why(honest, hello, reason):
    with RawClient(**hello) as client:
        assert client.welcome.kind is Kind.REFUSED
        assert reason in client.welcome.body["reason"]
        assert "\n" not in client.welcome.body["reason"]


def test_there_are_at_most_so_many_clients(honest):
    with RawClient(), RawClient(), RawClient() as one_more, RawClient(watches=True) as watcher:
        assert one_more.welcome.body["reason"] == "3 programs use the daemon, the limit is 3: end one"
        assert watcher.welcome.kind is Kind.WELCOME
    wait_for(lambda: RawClient().welcome.kind is Kind.WELCOME)


def test_a_client_has_at_most_so_many_models_requests_and_bytes(honest, model_path):
    with RawClient() as client:
        first, second = client.model(model_path), client.model(model_path, config={"NUM_STREAMS": 1})
        assert (first.kind, second.kind) == (Kind.OK, Kind.OK)
        assert "the limit is 2: drop one" in client.model(model_path, config={"NUM_STREAMS": 2}).body["reason"]
        client.ask(Kind.RELEASE, second.body["model"])
        requests = [client.request(first.body["model"]) for _ in range(4)]
        with RawClient(client.session) as other:
            answer = other.ask(Kind.REQUEST, first.body["model"], block=0)
            assert "4 infer requests, the limit is 4" in answer.body["reason"]
            requests.pop().close()
            wait_for(lambda: other.ask(Kind.REQUEST, first.body["model"], block=0).kind is Kind.OK)
        answer = requests[0].ask(Kind.REQUEST, first.body["model"], block=1 << 21)
        assert "shared memory" in answer.body["reason"]
        assert requests[0].infer(ROWS)[0].shape == (3, 4)
        for request in requests:
            request.close()


def test_a_client_has_at_most_so_many_connections(honest, daemon):
    object.__setattr__(daemon.limits, "connections", 3)
    with RawClient() as client, RawClient(client.session) as second, RawClient(client.session):
        one_more = RawClient(client.session)
        assert one_more.welcome.kind is Kind.REFUSED
        assert one_more.welcome.body["reason"] == "this program has 3 connections, the limit is 3: drop infer requests"
        one_more.close()
        second.close()
        wait_for(lambda: RawClient(client.session).welcome.kind is Kind.WELCOME)


def test_the_33rd_client_is_told_the_limit(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run"):
        clients = [RawClient() for _ in range(33)]
        assert [client.welcome.kind for client in clients[:32]] == [Kind.WELCOME] * 32
        assert clients[32].welcome.body["reason"] == "32 programs use the daemon, the limit is 32: end one"
        assert clients[0].ask(Kind.PING).kind is Kind.OK
        for client in clients:
            client.close()


def test_a_model_whose_files_have_changed_since_the_program_read_them_is_refused(honest, model_path):
    stamp = [[path.stat().st_size, path.stat().st_mtime_ns] for path in (model_path, model_path.with_suffix(".bin"))]
    with RawClient() as client:
        assert client.model(model_path, stamp=stamp).kind is Kind.OK
        answer = client.model(model_path, stamp=[stamp[0], [stamp[1][0], stamp[1][1] - 1]])
        assert answer.kind is Kind.REFUSED
        assert "have changed since" in answer.body["reason"]


def test_a_model_that_its_client_did_not_wait_for_is_given_back(honest, model_path, daemon, monkeypatch):
    compiling, gate, count = threading.Event(), threading.Event(), len(daemon._connections)
    compile_model = daemon.models._compile

    def slow(source, id):
        compiling.set()
        assert gate.wait(60)
        return compile_model(source, id)

    monkeypatch.setattr(daemon.models, "_compile", slow)
    with RawClient() as client:
        other = RawClient(client.session)
        body = {"path": str(model_path), "device": "CPU", "config": {"NUM_STREAMS": 1}, "mode": "auto"}
        other.channel.send(Message(Kind.MODEL, body=body))
        assert compiling.wait(60)
        assert client.ask(Kind.PING).kind is Kind.OK  # its other connection does not wait
        other.close()
        gate.set()
        wait_for(lambda: len(daemon._connections) == count + 1, 60)
        wait_for(
            lambda: all(not s.describe()["models"] for s in daemon._sessions.values() if s.token == client.session)
        )


def test_shutting_a_closed_connection_ends_no_other(monkeypatch):
    """Another connection gets the number of one that is closed, also in the middle of ``shut``."""
    from staticllm.wire import channel as module

    one, two = socket.socketpair()
    first = Channel(mp.Connection(one.detach()))
    real, made = os.dup, []

    def dup(number):
        closer = threading.Thread(target=first.close)
        closer.start()
        closer.join(0.3)
        made.append(closer)
        made.extend(socket.socketpair())
        return real(number)

    monkeypatch.setattr(module.os, "dup", dup)
    first.shut()
    monkeypatch.undo()
    closer, left, right = made
    closer.join(10)
    left.sendall(b"x")
    assert right.recv(1) == b"x"
    for each in (left, right, two):
        each.close()


def test_a_client_sees_only_its_own_models(honest):
    with RawClient() as client:
        for kind, more in (
            (Kind.REQUEST, {"block": 0}),
            (Kind.GET_PROPERTY, {"name": "NUM_STREAMS"}),
            (Kind.EXPORT, {}),
        ):
            answer = client.ask(kind, 1, **more)
            assert answer.kind is Kind.FAILED
            assert "1" in answer.body["text"]
        assert client.ask(Kind.RELEASE, 1).kind is Kind.OK  # nothing of its own, and nothing of others


def test_models_that_cannot_be_taken_are_refused(honest, model_path, tmp_path, daemon):
    damaged = tmp_path / "damaged.xml"
    shutil.copy(model_path, damaged)
    damaged.with_suffix(".bin").write_bytes(b"short")
    for more, reason in (
        ({"path": str(tmp_path / "no.xml")}, "that exists"),
        ({"path": "model.xml"}, "absolute path"),
        ({"path": str(damaged)}, "export or copy it again"),
        ({"device": "NPU.7"}, "NPU"),
        ({"config": {"NO_SUCH_PROPERTY": 1}}, "NO_SUCH_PROPERTY"),
        ({"config": {"NUM_STREAMS": [1]}}, "text, a number or a bool"),
    ):
        with RawClient() as client:
            answer = client.model(model_path, **more)
            assert answer.kind is Kind.REFUSED, more
            assert reason in answer.body["reason"]
            assert "\n" not in answer.body["reason"]
            assert client.model(model_path).kind is Kind.OK  # it stays usable
    object.__setattr__(daemon.limits, "model_bytes", 200)
    with RawClient() as client:
        assert "its limit is 0 MiB" in client.model(model_path, config={"NUM_STREAMS": 1}).body["reason"]


def test_auto_takes_turns_on_the_device_that_runs_it(honest, model_path, daemon, expected):
    with RawClient() as client:
        handle = client.model(model_path, device="AUTO").body["model"]
        with client.request(handle) as request:
            np.testing.assert_allclose(request.infer(ROWS)[0], expected, rtol=1e-5)
        assert {model.device for _, model in daemon.models.served()} == {"CPU"}


def test_wrong_inputs_fail_as_they_do_natively(honest, model_path):
    compiled = ov.Core().compile_model(str(model_path), "CPU")
    with pytest.raises(RuntimeError) as native:
        compiled(np.zeros((3, 9), np.float32))
    answer = honest.infer(np.zeros((3, 9), np.float32))
    assert answer.kind is Kind.FAILED
    assert answer.body["type"] == "RuntimeError"
    assert answer.body["text"].splitlines()[-1] == str(native.value).splitlines()[-1]


def test_a_connection_without_a_request_or_a_stream_says_so(honest):
    with RawClient() as client:
        for kind, more in ((Kind.RESET, {}), (Kind.STATES, {}), (Kind.PROFILE, {}), (Kind.GET_STATE, {"index": 0})):
            assert "no infer request" in client.ask(kind, **more).body["text"]
        assert client.ask(Kind.CANCEL, request=5, index=None, reason="cancelled").kind is Kind.OK


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.HELLO),
        Message(Kind.DONE),
        Message(Kind.MODEL, body={"path": 5}),
        Message(Kind.MODEL, body={"directory": "x"}),
        Message(Kind.MODEL, body={"directory": "/x", "candidates": [{"device": "CPU", "config": {"no": 1}}]}),
        Message(Kind.INFER, body={"tensors": [["a", "<f4", [1], 0]]}, payload=bytes(64)),
        Message(Kind.HINT, body={"priority": -1}),
        Message(Kind.CANCEL, body={"request": 1, "index": "x", "reason": "stop"}),
    ],
)
def test_a_message_that_is_not_allowed_ends_its_connection_only(honest, model_path, message):
    with RawClient() as client:
        handle = client.model(model_path).body["model"]
        with client.request(handle) as request:
            request.channel.send(message)
            answer = request.channel.receive()
            assert answer.kind in (Kind.REFUSED, Kind.FAILED)
            assert "\n" not in str(answer.body)
        assert client.ask(Kind.PING).kind is Kind.OK


def test_ten_thousand_damaged_frames(honest, num_cases):
    rng = random.Random(3)
    good = encode(Message(Kind.INFER, 1, 2, body={"tensors": [[0, "<f4", [3, 8], 0]]}, payload=bytes(96)))
    left = num_cases(10_000)
    while left:
        raw = endpoint.connect(endpoint.runtime_folder())
        try:
            for _ in range(min(left, rng.randrange(1, 50))):
                left -= 1
                data = bytearray(good if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 200)))
                data[rng.randrange(len(data))] ^= rng.randrange(256)
                raw.send_bytes(bytes(data))
        except OSError:  # the daemon has closed it
            pass
        finally:
            raw.close()


@pytest.mark.parametrize("length", [MAX_FRAME + 1, 0x7FFFFFFF])
def test_a_frame_that_is_too_long_is_not_read(honest, length):
    raw = endpoint.connect(endpoint.runtime_folder())
    with socket.socket(fileno=os.dup(raw.fileno())) as peer:
        peer.sendall(struct.pack("!i", length))
        peer.settimeout(5)
        with pytest.raises(OSError):
            peer.sendall(bytes(1000))
            while peer.recv(100):
                pass
            raise ConnectionResetError
    raw.close()


def test_a_client_that_stalls_in_a_frame_harms_only_itself(honest, monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.2)
    raw = endpoint.connect(endpoint.runtime_folder())
    with socket.socket(fileno=os.dup(raw.fileno())) as peer:
        peer.sendall(struct.pack("!i", 100) + b"half")
        for _ in range(3):
            assert honest.ask(Kind.PING).kind is Kind.OK
        peer.settimeout(5)
        assert peer.recv(1) == b""  # it never said who it is
    raw.close()


def test_a_peer_that_does_not_answer_the_challenge_is_dropped(honest, monkeypatch, tmp_path):
    monkeypatch.setattr(server, "HELLO_SECONDS", 0.2)
    raw = mp.Client(endpoint.address(tmp_path / "run"))
    raw.recv_bytes()  # the challenge
    wait_for(lambda: raw.poll(0.1), 5)
    with pytest.raises(EOFError):
        raw.recv_bytes()
    raw.close()


def test_a_client_that_floods_without_reading_is_cut_and_others_go_on(daemon):
    options = {**EXACT, "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"}
    with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, **options) as pipe:
        alone = str(pipe.generate("Hi", max_new_tokens=16))
        rude = RawClient()
        engine = pipe._engine
        from staticllm.pipelines.model_loader.arguments import resolve_candidates
        from staticllm.pipelines.remote.remote_launch import _plain

        (candidate,) = resolve_candidates("CPU", None, options)
        body = {"device": "CPU", "config": _plain(candidate.config), "explicit": sorted(candidate.explicit)}
        answer = rude.ask(Kind.MODEL, directory=str(staticllm.demo_model_path()), candidates=[body])
        assert answer.kind is Kind.OK, answer.body
        values = {
            "prompt": [1, 2, 3],
            "max_new_tokens": 60,
            "sampling": {},
            "seed": 0,
            "num_sequences": 1,
            "stop_token_ids": [],
            "min_new_tokens": 0,
            "priority": 0,
            "deadline": None,
            "overflow": "stop",
            "arrival": 0.0,
        }
        for number in range(1, 100):
            rude.channel.send(Message(Kind.SUBMIT, answer.body["model"], number, body={"request": values}))
        assert str(pipe.generate("Hi", max_new_tokens=16)) == alone
        rude.close()
        ((_, model),) = daemon.models.served()
        wait_for(lambda: model.engine.is_idle, 10)
        assert engine.stats().finish_reasons["cancelled"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": []},
        {"prompt": [10**9]},
        {"prompt": [-1]},
        {"prompt": ["a"]},
        {"prompt": [1] * 100_000},
        {"num_sequences": 0},
        {"num_sequences": 10**6},
        {"seed": -1},
        {"max_new_tokens": "x"},
        {"overflow": "no"},
        {"sampling": {"temperature": "hot"}},
        {"sampling": {"no_such": 1}},
        {"priority": 1.5},
        {"stop_token_ids": ["x"]},
        {"deadline": "soon"},
        {"more": 1},
    ],
)
def test_requests_with_wrong_fields_are_refused(daemon, change):
    options = {**EXACT, "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"}
    with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, **options) as pipe:
        from staticllm.pipelines.engine.request import EngineRequest

        values = {**EngineRequest((1, 2, 3), max_new_tokens=4).to_dict(), **change}
        engine = pipe._engine
        question = Message(Kind.SUBMIT, number=77, body={"request": values})
        with pytest.raises(staticllm.StaticLLMError) as raised:
            engine._connection.ask(question)
        assert "\n" not in str(raised.value)
        assert len(pipe.generate("Hi", max_new_tokens=4)) > 0


PROGRAM = """
import staticllm, sys
pipe = staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, MAX_PROMPT_LEN=256, PROGRAMS="shared")
handle = pipe.submit("What is an NPU?", max_new_tokens=250, ignore_eos=True)
next(iter(handle))
print("running", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_frees_all_within_a_second(monkeypatch, tmp_path):
    with daemon_process(monkeypatch, tmp_path / "run"):
        options = {"MAX_PROMPT_LEN": 256, "PROGRAMS": "shared"}
        with StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, **options) as pipe:
            alone = str(pipe.generate("What is an NPU?", max_new_tokens=40))
            for _ in range(2):
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
                )
                assert process.stdout.readline() == b"running\n"
                results = []
                thread = threading.Thread(
                    target=lambda: results.append(str(pipe.generate("What is an NPU?", max_new_tokens=40)))  # noqa: B023
                )
                thread.start()
                process.kill()
                start = time.monotonic()
                process.wait()
                process.stdin.close()
                process.stdout.close()
                with RawClient(watches=True) as watcher:
                    wait_for(lambda: len(watcher.ask(Kind.STATS).body["clients"]) == 1)
                    assert time.monotonic() - start < 1.5
                thread.join()
                assert results == [alone]
            wait_for(lambda: pipe.stats().finish_reasons.get("cancelled") == 2)


def fail(*_):
    raise RuntimeError("the device is lost")


@pytest.mark.parametrize("what", ["close", "drop_idle"])
def test_a_model_that_cannot_be_dropped_keeps_no_daemon(monkeypatch, tmp_path, model_path, what):
    monkeypatch.setattr(server, "TICK_SECONDS", 0.05)
    limits = {"idle_seconds": 0.5, "idle_model_seconds": 0.0}
    with daemon_thread(monkeypatch, tmp_path / "run", **limits) as daemon, monkeypatch.context() as change:
        client = RawClient()
        client.model(model_path)
        ((_, model),) = daemon.models.served()
        change.setattr(model if what == "close" else daemon.models, what, fail)
        time.sleep(0.2)  # some ticks
        if what == "drop_idle":
            change.undo()
        client.close()
        wait_for(daemon._is_stopping.is_set)


def test_a_daemon_that_nobody_uses_ends_and_there_is_only_one(monkeypatch, tmp_path):
    with daemon_process(monkeypatch, tmp_path / "run", "--idle-seconds", "3") as process:
        with RawClient():  # so that it does not end before the second one has begun, however slow this machine is
            again = subprocess.run(
                [sys.executable, "-m", "staticllm", "daemon", "start", "--foreground"],
                capture_output=True,
                text=True,
                check=False,
            )
            assert again.returncode == 1
            assert "a daemon serves" in again.stderr
            time.sleep(4)
            assert process.poll() is None
        assert process.wait(20) == 0
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["daemon.log", "lock"]
