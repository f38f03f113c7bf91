"""Tests the daemon against clients that lie, stall, flood or die: they get one line, and the others notice nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing import connection as mp

import numpy as np
import pytest
from click.testing import CliRunner

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.cli import cli
from staticllm.daemon.process import daemon as process
from staticllm.wire import endpoint
from staticllm.wire.messages import MAX_FRAME, Kind, Message, encode
from tests.support.attach.daemons import RawClient, daemon_process, daemon_thread, wait_for
from tests.support.helpers import EXACT
from tests.support.inside import engine_of

ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


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
def test_a_message_that_is_not_allowed_ends_its_connection_only(honest, plain_model, message):
    with RawClient() as client:
        handle = client.model(plain_model).body["model"]
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


@pytest.mark.skipif(sys.platform == "win32", reason="frames of a socket; a pipe there has whole messages")
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


@pytest.mark.skipif(sys.platform == "win32", reason="frames of a socket; a pipe there has whole messages")
def test_a_client_that_stalls_in_a_frame_harms_only_itself(honest, monkeypatch):
    monkeypatch.setattr(process, "HELLO_SECONDS", 0.2)
    raw = endpoint.connect(endpoint.runtime_folder())
    with socket.socket(fileno=os.dup(raw.fileno())) as peer:
        peer.sendall(struct.pack("!i", 100) + b"half")
        for _ in range(3):
            assert honest.ask(Kind.PING).kind is Kind.OK
        peer.settimeout(5)
        assert peer.recv(1) == b""  # it never said who it is
    raw.close()


def test_a_peer_that_does_not_answer_the_challenge_is_dropped(honest, monkeypatch, tmp_path):
    monkeypatch.setattr(process, "HELLO_SECONDS", 0.2)
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
        engine = engine_of(pipe)
        from staticllm.pipelines.daemon_client.remote_launch import plain_config
        from staticllm.pipelines.launch.arguments import resolve_candidates

        (candidate,) = resolve_candidates("CPU", None, options)
        body = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
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
        engine = engine_of(pipe)
        question = Message(Kind.SUBMIT, number=77, body={"request": values})
        with pytest.raises(staticllm.StaticLLMError) as raised:
            engine.connection.ask(question)
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
def test_a_model_that_cannot_be_dropped_keeps_no_daemon(monkeypatch, tmp_path, plain_model, what):
    monkeypatch.setattr(process, "TICK_SECONDS", 0.05)
    limits = {"idle_seconds": 0.5, "idle_model_seconds": 0.0}
    with daemon_thread(monkeypatch, tmp_path / "run", **limits) as daemon, monkeypatch.context() as change:
        client = RawClient()
        client.model(plain_model)
        ((_, model),) = daemon.models.served()
        change.setattr(model if what == "close" else daemon.models, what, fail)
        time.sleep(0.2)  # some ticks
        if what == "drop_idle":
            change.undo()
        client.close()
        wait_for(daemon.is_stopping.is_set)


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
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["daemon.log", "lock", "stopped"]


def test_idle_seconds_for_a_daemon_that_runs_already_are_said_to_have_no_effect(monkeypatch, tmp_path):
    with daemon_process(monkeypatch, tmp_path / "run") as process:
        found = CliRunner().invoke(cli, ["daemon", "start", "--idle-seconds", "7.5"])
        serves = f"daemon {process.pid} serves {tmp_path / 'run'}\n"
        assert (found.exit_code, found.stdout) == (0, serves)
        assert found.stderr == (
            f"daemon {process.pid} runs already, on which --idle-seconds 7.5 has no effect: end it first with staticllm daemon "
            "stop\n"
        )
        again = CliRunner().invoke(cli, ["daemon", "start"])
        assert (again.exit_code, again.output) == (0, serves)
