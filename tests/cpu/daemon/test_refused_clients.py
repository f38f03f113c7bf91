"""Tests what the daemon refuses: clients that do not fit, what goes over its limits, and models that cannot be taken."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from multiprocessing import connection as mp

import numpy as np
import openvino as ov
import pytest

from staticllm import DeviceError, StaticLLMPipeline, demo_model_path
from staticllm.daemon.process import lifetime
from staticllm.server.models.homes import WorkerHome
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel
from staticllm.wire.file_stamp import stamp_of
from staticllm.wire.messages import PROTOCOL, Kind, Message
from tests.support.attach.daemons import RawClient, daemon_thread, wait_for
from tests.support.command_line import in_here

ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def test_a_wrong_key_is_refused(honest, tmp_path):
    (tmp_path / "run" / "key").write_bytes(os.urandom(32))
    with pytest.raises(endpoint.EndpointError, match="does not accept the key"):
        RawClient()


def test_the_name_of_a_program_cannot_forge_lines_of_the_log_or_the_terminal(honest):
    with RawClient(program="a\r\nprogram 1 (b)\x1b[31m") as client:
        names = [each["program"] for each in client.ask(Kind.STATS).body["clients"]]
    assert "a??program 1 (b)?[31m" in names


@pytest.mark.parametrize(
    "hello, reason",
    [
        ({"protocol": 99}, "speaks protocol 99"),
        ({"openvino": "2025.1.0-1"}, "use the same release"),
        ({"session": "0" * 32}, "connect again"),
        ({"protocol": "1"}, "HELLO: protocol is '1': must be int"),
        ({"program": "x" * 1000}, ": must be str of length <= 256"),
        ({"priority": 1000}, "HELLO: priority is 1000: must be int <= 200"),
    ],
)
def test_a_client_that_does_not_fit_is_told_why(honest, hello, reason):
    with RawClient(**hello) as client:
        assert client.welcome.kind is Kind.REFUSED
        assert reason in client.welcome.body["reason"]
        assert "\n" not in client.welcome.body["reason"]


ANOTHER_VERSION = """
import sys
from pathlib import Path
import openvino as ov
from staticllm.daemon.process import daemon, lifetime
daemon.PROTOCOL = int(sys.argv[2])
ov.get_version = lambda: sys.argv[3]
lifetime.serve(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("protocol, openvino", [(PROTOCOL - 1, "1.2.3"), (PROTOCOL + 1, "1.2.3"), (PROTOCOL, "1.2.3")])
def test_a_daemon_of_another_version_can_be_stopped(tmp_path, monkeypatch, protocol, openvino):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    with subprocess.Popen([sys.executable, "-c", ANOTHER_VERSION, folder, str(protocol), openvino]) as daemon:
        try:
            wait_for(lambda: endpoint.answers(folder), 30)
            with RawClient() as client:
                assert client.welcome.kind is Kind.REFUSED
            assert lifetime.stop(folder) == daemon.pid
            assert daemon.wait(20) == 0
        finally:
            daemon.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have names of their own")
def test_a_runtime_folder_with_too_long_a_path_is_one_line_everywhere(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 130)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    for command in ("start", "stop", "status", "top"):
        done = in_here("daemon", command)
        assert done.returncode == 1
        assert done.stderr.startswith(f"Error: the runtime folder {folder} makes the path of a socket ")
        assert done.stderr.endswith("set STATICLLM_RUNTIME_DIR to a shorter path\n")
        assert done.stderr.count("\n") == 1
    with pytest.raises(DeviceError, match=r"^the daemon cannot be reached: the runtime folder .* to a shorter path$"):
        StaticLLMPipeline(demo_model_path(), "CPU", daemon=True)
    with pytest.raises(endpoint.EndpointError, match="to a shorter path"):
        str(WorkerHome("a model", lambda: None).folder)
    assert not folder.exists()


def test_there_are_at_most_so_many_clients(honest):
    with RawClient(), RawClient(), RawClient() as one_more, RawClient(watches=True) as watcher:
        assert one_more.welcome.body["reason"] == "3 programs use the daemon, the limit is 3: end one"
        assert watcher.welcome.kind is Kind.WELCOME
    wait_for(lambda: RawClient().welcome.kind is Kind.WELCOME)


def test_a_client_has_at_most_so_many_models_requests_and_bytes(honest, plain_model):
    with RawClient() as client:
        first, second = client.model(plain_model), client.model(plain_model, config={"NUM_STREAMS": 1})
        assert (first.kind, second.kind) == (Kind.OK, Kind.OK)
        assert "the limit is 2: drop one" in client.model(plain_model, config={"NUM_STREAMS": 2}).body["reason"]
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


def test_models_that_are_compiled_at_once_count_for_the_limit(honest, plain_model, daemon, tmp_path):
    with RawClient() as client, contextlib.ExitStack() as stack:
        for _ in range(3):  # what cannot be compiled takes no place
            assert "that exists" in client.model(tmp_path / "no.xml").body["reason"]
        others = [stack.enter_context(RawClient(client.session)) for _ in range(6)]
        with daemon.devices.compiling:
            for streams, other in enumerate(others, 1):
                body = {"path": str(plain_model), "device": "CPU", "config": {"NUM_STREAMS": streams}, "mode": "auto"}
                other.channel.send(Message(Kind.MODEL, body=body))
        answers = [other.channel.receive() for other in others]
        refused = [answer for answer in answers if answer.kind is not Kind.OK]
        assert len(refused) == 4
        assert {answer.body["reason"] for answer in refused} == {"this program has 2 models, the limit is 2: drop one"}
        client.ask(Kind.RELEASE, next(answer for answer in answers if answer.kind is Kind.OK).body["model"])
        assert client.model(plain_model).kind is Kind.OK


def test_a_client_has_at_most_so_many_connections(honest, daemon):
    object.__setattr__(daemon.limits, "connections", 3)
    with RawClient() as client, RawClient(client.session) as second, RawClient(client.session):
        one_more = RawClient(client.session)
        assert one_more.welcome.kind is Kind.REFUSED
        assert one_more.welcome.body["reason"] == "this program has 3 connections, the limit is 3: drop infer requests"
        one_more.close()
        second.close()
        wait_for(lambda: RawClient(client.session).welcome.kind is Kind.WELCOME)


def test_clients_that_leave_before_they_are_welcome_take_no_place(daemon, monkeypatch):
    gone, join = threading.Semaphore(0), daemon.join

    def late(hello, channel):
        assert gone.acquire(timeout=10)
        return join(hello, channel)

    monkeypatch.setattr(daemon, "join", late)
    body = {"protocol": PROTOCOL, "openvino": ov.get_version(), "pid": os.getpid(), "program": "test"}
    for _ in range(2 * daemon.limits.clients * (daemon.limits.requests + 1)):
        channel = Channel(endpoint.connect(endpoint.runtime_folder()))
        channel.send(Message(Kind.HELLO, body=body))
        channel.close()
        gone.release()
        wait_for(lambda: not daemon.greetings)
    gone.release()
    with RawClient() as client:
        assert client.welcome.kind is Kind.WELCOME
        assert client.ask(Kind.PING).kind is Kind.OK
    wait_for(lambda: not (daemon.connections or daemon.greetings or daemon.sessions))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_whose_connection_cannot_be_made_takes_no_place(daemon, monkeypatch):
    def no_memory(*_, **__):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr("staticllm.daemon.process.daemon.Connection", no_memory)
        with pytest.raises((EOFError, OSError)):
            RawClient()
    with RawClient() as client:
        assert client.welcome.kind is Kind.WELCOME
        assert len(daemon.sessions) == 1


def test_the_33rd_client_is_told_the_limit(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run"):
        clients = [RawClient() for _ in range(33)]
        assert [client.welcome.kind for client in clients[:32]] == [Kind.WELCOME] * 32
        assert clients[32].welcome.body["reason"] == "32 programs use the daemon, the limit is 32: end one"
        assert clients[0].ask(Kind.PING).kind is Kind.OK
        for client in clients:
            client.close()


def test_a_model_whose_files_have_changed_since_the_program_read_them_is_refused(honest, plain_model):
    stamp = [list(stamp_of(path)) for path in (plain_model, plain_model.with_suffix(".bin"))]
    with RawClient() as client:
        assert client.model(plain_model, stamp=stamp).kind is Kind.OK
        for place in range(4):  # each of size, times and number
            other = [*stamp[1][:place], stamp[1][place] - 1, *stamp[1][place + 1 :]]
            answer = client.model(plain_model, stamp=[stamp[0], other])
            assert answer.kind is Kind.REFUSED
            assert "have changed since" in answer.body["reason"]


def test_a_model_that_its_client_did_not_wait_for_is_given_back(honest, plain_model, daemon, monkeypatch):
    compiling, gate, count = threading.Event(), threading.Event(), len(daemon.connections)
    compile_model = daemon.models._compile

    def slow(source, id):
        compiling.set()
        assert gate.wait(60)
        return compile_model(source, id)

    monkeypatch.setattr(daemon.models, "_compile", slow)
    with RawClient() as client:
        other = RawClient(client.session)
        body = {"path": str(plain_model), "device": "CPU", "config": {"NUM_STREAMS": 1}, "mode": "auto"}
        other.channel.send(Message(Kind.MODEL, body=body))
        assert compiling.wait(60)
        assert client.ask(Kind.PING).kind is Kind.OK  # its other connection does not wait
        other.close()
        gate.set()
        wait_for(lambda: len(daemon.connections) == count + 1, 60)
        wait_for(lambda: all(not s.describe()["models"] for s in daemon.sessions.values() if s.token == client.session))


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


def test_models_that_cannot_be_taken_are_refused(honest, plain_model, tmp_path, daemon):
    damaged = tmp_path / "damaged.xml"
    shutil.copy(plain_model, damaged)
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
            answer = client.model(plain_model, **more)
            assert answer.kind is Kind.REFUSED, more
            assert reason in answer.body["reason"]
            assert "\n" not in answer.body["reason"]
            assert client.model(plain_model).kind is Kind.OK  # it stays usable
    object.__setattr__(daemon.limits, "model_bytes", 200)
    with RawClient() as client:
        assert "its limit is 0 MiB" in client.model(plain_model, config={"NUM_STREAMS": 1}).body["reason"]


def test_auto_takes_turns_on_the_device_that_runs_it(honest, plain_model, daemon, expected):
    with RawClient() as client:
        handle = client.model(plain_model, device="AUTO").body["model"]
        with client.request(handle) as request:
            np.testing.assert_allclose(request.infer(ROWS)[0], expected, rtol=1e-5)
        assert {model.device for _, model in daemon.models.served()} == {"CPU"}


def test_wrong_inputs_fail_as_they_do_natively(honest, plain_model):
    compiled = ov.Core().compile_model(str(plain_model), "CPU")
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
