"""Fuzzes the daemon behind the greeting: damaged messages of every kind, while another client's answers stay the same."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import struct
import threading
import time
from dataclasses import replace

import numpy as np
import openvino as ov
import psutil
import pytest
from support.models.speech_model import BANDS, COLUMNS
from support.models.whisper_directory import write_whisper

import staticllm
from staticllm.daemon.process import daemon as process
from staticllm.pipelines.daemon_client.remote_launch import plain_config
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.speech_rules import SpeechRules, TimestampParams
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.wire import endpoint, tensors
from staticllm.wire.blocks import Block
from staticllm.wire.messages import BLOCK, EARLIER, QUIET, Kind, Message, ProtocolError, decode, encode
from tests.support.attach.daemons import RawClient, daemon_thread, wait_for
from tests.support.helpers import EXACT

ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
STATEFUL = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
LANGUAGE = {**EXACT, "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"}
HOSTILE = (
    None, True, False, -1, 0, 1, 7, 1.5, 1e308, 10**400, 1 << 31, 1 << 40, 1 << 64, "", "x", "last", "\0", "/", "é" * 300,
    [], [1], [None], [[1]], [-1, 8], [1 << 39, 1 << 39], [[0, "<f4", [3, 8], 0]], [["a", "|O", [1], 0]], {}, {"a": 1},
)  # fmt: skip
FLAGS = [0, 0, 0, 1, BLOCK, QUIET, QUIET, EARLIER, 0xFFFF]
FORBIDDEN = {Kind.STOP}  # allowed, but it would end the test


def with_tensors(kind, arrays, **body):
    described = tensors.describe(arrays, range(len(arrays)))
    return Message(kind, 1, 5, body={**body, "tensors": described}, payload=bytes(tensors.inline(arrays)))


def call_of(names):
    ids = np.array([[5, 6, 7, 8]])
    given = {
        "input_ids": ids,
        "attention_mask": np.ones((1, 4), np.int64),
        "position_ids": np.arange(4)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return [given[name] for name in names]


class Bodies:
    """Valid messages for each kind of connection."""

    def __init__(self, plain_model, names, speech_model):
        self._model = {"path": str(plain_model), "device": "CPU", "config": {}, "mode": "auto"}
        self._names = names
        (candidate,) = resolve_candidates("CPU", None, LANGUAGE)
        body = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
        self.language = {"directory": str(staticllm.demo_model_path()), "candidates": [body]}
        (candidate,) = resolve_candidates("CPU", None, EXACT)
        body = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
        speech = {"num_windows": 3, "heads": [[0, 0]]}
        self.speech = {"directory": str(speech_model), "candidates": [body], "speech": speech}

    def of(self, mode):
        every = [
            Message(Kind.MODEL, body=self._model), Message(Kind.GET_PROPERTY, 1, body={"name": "NUM_STREAMS"}),
            Message(Kind.SET_PROPERTY, 1, body={"values": {}}), Message(Kind.EXPORT, 1), Message(Kind.STATS),
            Message(Kind.STATS, 1, body={"of": "engine"}), Message(Kind.PING), Message(Kind.RELEASE, 9),
            Message(Kind.HINT, body={"priority": 100}), Message(Kind.TRACE, body={"action": "begin"}),
            Message(Kind.REQUEST, 1, body={"block": 1 << 16}), Message(Kind.HELLO, body={"protocol": 1}),
            Message(Kind.CANCEL, body={"request": 5, "index": None, "reason": "cancelled"}),
            Message(Kind.RELEASE, 9, flags=QUIET), Message(Kind.RESET, 1, flags=QUIET),
        ]  # fmt: skip
        if mode == "language":
            request = EngineRequest((1, 2, 3), max_new_tokens=3).to_dict()
            submit = Message(Kind.SUBMIT, 1, 5, body={"request": request})
            identity = {"model": "x"}
            snapshot = {"action": "load", "path": "/nowhere/x", "key": "00", "identity": identity, "tokens": [1, 2]}
            return [*every, *[submit] * 6, Message(Kind.SNAPSHOT, 1, body=snapshot)]
        if mode == "speech":
            return [*every, *self._of_speech()]
        arrays = [ROWS] if mode == "plain" else call_of(self._names)
        infer, state = with_tensors(Kind.INFER, arrays), with_tensors(Kind.SET_STATE, [ROWS], index=0)
        written = with_tensors(Kind.SET_STATE, [ROWS], index=0, in_place=True)
        last = replace(infer, body={**infer.body, "wanted": "last"})
        return [
            *every, *[infer, last] * 4, Message(Kind.RESET, 1), Message(Kind.STATES, 1), Message(Kind.PROFILE, 1), state, written,
            Message(Kind.GET_STATE, 1, body={"index": 0}), Message(Kind.RESET_STATE, 1, body={"index": 0}),
        ]  # fmt: skip

    def _of_speech(self):
        rules = SpeechRules((1,), (2, 3), (4, 5, 6), TimestampParams(7, 9, 3))
        request = EngineRequest((1, 2, 3), max_new_tokens=3, rules=rules).to_dict()
        features = np.zeros((BANDS, COLUMNS), np.float32)
        parts = [
            with_tensors(Kind.ENCODE, [features], window=window, first=0, priority=1, released=[3]) for window in (1, 2)
        ]
        parts += [
            with_tensors(Kind.ENCODE, [features[:2]], window=3, first=0),
            with_tensors(Kind.ENCODE, [features[2:]], window=3, first=2),
        ]
        submits = [Message(Kind.SUBMIT, 1, 5, body={"request": request, "window": window}) for window in (1, 2, 3)]
        aligned = Message(Kind.ALIGN, 1, 6, body={"window": 1, "tokens": [1, 2, 3], "priority": 0})
        return [
            *parts * 2,
            *submits * 2,
            *[aligned] * 3,
            *[Message(Kind.RELEASE_WINDOW, body={"window": n}) for n in (1, 2, 3)],
        ]


def changed_value(rng, value):
    """Return a JSON value with one part that is replaced, removed, doubled or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        found, key = dict(value), rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            del found[key]
        elif what < 0.2:
            found[rng.choice(["shared", "block_size", "wanted", "x", "session", "index"])] = rng.choice(HOSTILE)
        else:
            found[key] = changed_value(rng, value[key])
        return found
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], changed_value(rng, value[index]), *value[index + 1 :], *value[: rng.randrange(2)]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 2, 64, 1 << 20])
    return rng.choice(HOSTILE)


def fuzzed(rng, message):
    """Return the bytes of a damaged message; some remain valid."""
    for _ in range(rng.randrange(1, 3)):
        what = rng.randrange(6)
        if what <= 2:
            message = replace(message, body=changed_value(rng, message.body) if message.body else {"x": 1})
            if not isinstance(message.body, dict):
                message = replace(message, body={"value": message.body})
        elif what == 3:
            message = replace(message, handle=rng.choice([0, 1, 2, 1 << 63]), number=rng.choice([0, 5, (1 << 64) - 1]))
        elif what == 4:
            noise = rng.randbytes(rng.choice([0, 1, 64, 96, 500]))
            message = replace(message, payload=noise, flags=rng.choice(FLAGS))
        else:
            message = replace(message, kind=rng.choice([kind for kind in Kind if kind not in FORBIDDEN]))
    data = bytearray(encode(message))
    if rng.random() < 0.15 and message.kind is not Kind.MODEL:  # a byte of a path could name any file
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif rng.random() < 0.05:
        del data[rng.randrange(len(data)) :]
    elif rng.random() < 0.05:
        struct.pack_into("<I", data, 4, rng.choice([0, 1, 1 << 20, (1 << 32) - 1]))
    with contextlib.suppress(ProtocolError):
        if decode(bytes(data)).kind in FORBIDDEN:
            return fuzzed(rng, message)
    return bytes(data)


def open_client(bodies, mode, plain_model):
    """Return a client, and its connection that takes messages about a model of this mode."""
    client = RawClient()
    if mode in ("language", "speech"):
        assert client.ask(Kind.MODEL, **getattr(bodies, mode)).body.get("model") == 1
        return client, client
    path = plain_model if mode == "plain" else staticllm.demo_model_path() / "openvino_model.xml"
    more = {"config": STATEFUL, "mode": "exact" if mode == "stateful" else "auto"} if mode != "plain" else {}
    assert client.model(path, **more).body.get("model") == 1
    return client, client.request(1)


def is_quiet(data):
    """Return whether a message gets no answer."""
    with contextlib.suppress(ProtocolError):
        message = decode(data)
        return message.kind in (Kind.RESET, Kind.RELEASE) and message.flags & (QUIET | BLOCK) == QUIET
    return False


def attack(rng, bodies, mode, plain_model, count):
    """Send ``count`` damaged messages, on as many connections as it takes."""
    messages = bodies.of(mode)
    while count > 0:
        client, target = open_client(bodies, mode, plain_model)
        with contextlib.suppress(EOFError, OSError, ProtocolError):  # the daemon has closed it
            while count > 0:
                count -= 1
                data = fuzzed(rng, rng.choice(messages))
                target.channel.connection.send_bytes(data)
                if is_quiet(data):
                    continue
                if not target.channel.poll(0.5):  # it may wait for a part of the message that never comes
                    break
                target.channel.receive()
        target.close()
        client.close()


@contextlib.contextmanager
def honest(path, daemon):
    """A client that checks in between that its logits are what they were.

    Those of the model as it is are bit-identical; of the packed one they depend on its slots in the last bits, also alone.
    """
    names = [port.get_any_name() for port in ov.Core().read_model(str(path)).inputs]
    with RawClient() as client:
        exact, packed = (client.model(path, config=STATEFUL, mode=mode).body["model"] for mode in ("exact", "auto"))
        with client.request(exact) as as_it_is, client.request(packed) as request:
            (expected,) = as_it_is.infer(*call_of(names))

            def check():
                assert as_it_is.ask(Kind.RESET).kind is Kind.OK
                (found,) = as_it_is.infer(*call_of(names))
                np.testing.assert_array_equal(found, expected)
                (found,) = request.infer(*call_of(names))
                np.testing.assert_allclose(found, expected, atol=2e-4)
                request.channel.send(Message(Kind.RESET, 1, flags=QUIET))

            check()
            yield check, names


@pytest.mark.parametrize("mode", ["plain", "stateful", "packed", "language", "speech"])
def test_damaged_messages_harm_no_other_client_and_leave_nothing(mode, monkeypatch, tmp_path, plain_model, num_cases):
    monkeypatch.setattr(process, "TICK_SECONDS", 0.1)
    path = staticllm.demo_model_path() / "openvino_model.xml"
    with (
        daemon_thread(monkeypatch, tmp_path / "run", clients=8, block_bytes=1 << 24, idle_model_seconds=0.2) as daemon,
        honest(path, daemon) as (check, names),
    ):
        bodies = Bodies(plain_model, names, write_whisper(tmp_path / "whisper"))
        attack(
            random.Random(0), bodies, mode, plain_model, 20
        )  # what is made once, such as pools of threads, exists now
        at_rest = wait_for_rest(daemon, 1)
        failures = []
        threads = [threading.Thread(target=run, args=(seed, failures, bodies, mode, plain_model, num_cases(500)))
                   for seed in (1, 2)]  # fmt: skip
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            check()
        for thread in threads:
            thread.join()
        assert failures == []
        check()
        end = time.monotonic() + 60
        while (left := exceeding(resources(daemon), at_rest)) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == {}


def run(seed, failures, *args):
    try:
        attack(random.Random(seed), *args)
    except BaseException as error:
        failures.append(repr(error))


def resources(daemon):
    """Return the numbers of everything that clients have in the daemon, by name."""
    gc.collect()  # a compiled model in a cycle holds its mapped weights file
    process = psutil.Process()
    counts = {
        "sessions": len(daemon.sessions), "connections": len(daemon.connections), "models": len(daemon.models.served()),
        "usages": len(daemon.devices.usages), "handles": process.num_fds() if hasattr(process, "num_fds") else 0,
        "blocks": sum(each._block_bytes for each in tuple(daemon.sessions.values())),
    }  # fmt: skip
    for thread in threading.enumerate():
        counts[thread.name.split("-")[0] + thread.name[-12:].rstrip("0123456789 ()_-")] = 0
    for thread in threading.enumerate():
        counts[thread.name.split("-")[0] + thread.name[-12:].rstrip("0123456789 ()_-")] += 1
    return counts


MADE_ONCE = {"handles": 1}
"""The weights file of the last language model stays mapped: one handle after 500 messages, and after 1500."""


def exceeding(found, before):
    allowed = {name: before.get(name, 0) + MADE_ONCE.get(name, 0) for name in found}
    return {name: (count, allowed[name]) for name, count in found.items() if count > allowed[name]}


def wait_for_rest(daemon, num_clients):
    wait_for(lambda: len(daemon.sessions) == num_clients and len(daemon.models.served()) == 2, 60)
    wait_for(lambda: len(daemon.connections) == 3, 60)
    return resources(daemon)


def test_the_daemon_takes_no_memory_from_a_client(monkeypatch, tmp_path, plain_model):
    """A client could make it shorter later, and reading it would end the daemon."""
    with daemon_thread(monkeypatch, tmp_path / "run"), RawClient() as client, RawClient() as bad:
        block = Block.create(1 << 16)
        bad.channel.connection.send_bytes(encode(Message(Kind.PING, flags=BLOCK, body={"block_size": 1 << 16})))
        with contextlib.suppress(OSError):
            block.send(bad.channel.connection)
        answer = bad.channel.receive()
        assert answer.kind is Kind.REFUSED
        assert "memory" in answer.body["reason"]
        block.close()
        assert client.ask(Kind.PING).kind is Kind.OK
        assert endpoint.runtime_folder().is_dir()
        assert json.dumps(answer.body)
