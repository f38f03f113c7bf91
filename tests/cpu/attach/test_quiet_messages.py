"""Tests the messages that get no answer: resets and releases of attached programs, in number and when they fail."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import time

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from staticllm import demo_model_path
from staticllm.cli.attach import attached_environment
from staticllm.daemon.clients.session import Session
from staticllm.daemon.models.plain import PlainRequest
from staticllm.daemon.packed.request import PackedRequest
from staticllm.wire.channel import Channel
from staticllm.wire.messages import EARLIER, QUIET, Kind, Message
from tests.support.attach.daemons import RawClient, daemon_thread, wait_for

STATEFUL = demo_model_path() / "openvino_model.xml"
ROWS = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.xml"
    rows = op.parameter([-1, 8], np.float32, name="rows")
    ov.save_model(ov.Model([op.abs(rows)], [rows], "m"), path, compress_to_fp16=False)
    return path


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run", models=2) as daemon:
        yield daemon


@pytest.fixture
def run(daemon):
    """A function that runs a program attached to the daemon of this process, and returns what it prints as JSON."""

    def run(code, *arguments):
        environment = attached_environment({**os.environ, "STATICLLM_ATTACH": "require"})
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, capture_output=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def counted(monkeypatch):
    """The messages that the daemon receives, and the numbers of those that it sends, by connection."""
    received, sent = collections.defaultdict(list), collections.Counter()
    receive, write = Channel.receive, Channel.write

    def counting_receive(channel):
        message = receive(channel)
        received[channel].append(message)
        return message

    def counting_write(channel, data):
        sent[channel] += 1
        write(channel, data)

    monkeypatch.setattr(Channel, "receive", counting_receive)
    monkeypatch.setattr(Channel, "write", counting_write)
    return received, sent


CONVERSATIONS = """
import gc, json, sys
import numpy as np, openvino as ov
def call(request):
    ids = np.array([[5, 6, 7]])
    mask = np.ones((1, 3), np.int64)
    given = dict(input_ids=ids, attention_mask=mask, position_ids=np.arange(3)[None], beam_idx=np.zeros(1, np.int32))
    names = [port.get_any_name() for port in request.model_inputs]
    return request.infer({name: given[name] for name in names})["logits"].tolist()
model = ov.Core().compile_model(sys.argv[1], "CPU")
request = model.create_infer_request()
answers = []
for _ in range(4):
    request.reset_state()
    try:
        answers.append(call(request))
    except RuntimeError as error:
        answers.append(str(error))
client = model._remote._client
del model, request
gc.collect()
print(json.dumps(answers))
"""


def test_a_reset_and_a_release_are_one_message_without_an_answer(run, counted):
    first, *others = run(CONVERSATIONS, STATEFUL)
    np.testing.assert_allclose(others, [first] * 3, atol=1e-4)
    received, sent = counted
    kinds = {channel: [message.kind for message in messages] for channel, messages in received.items()}
    (calls,) = (channel for channel, found in kinds.items() if Kind.INFER in found)
    assert [kind for kind in kinds[calls] if kind is not Kind.REQUEST] == [Kind.HELLO, *[Kind.RESET, Kind.INFER] * 4]
    assert sent[calls] == len(kinds[calls]) - 4
    (control,) = (channel for channel, found in kinds.items() if Kind.RELEASE in found)
    assert kinds[control].count(Kind.RELEASE) == 1
    assert sent[control] == len(kinds[control]) - 1
    quiet = [message.kind for messages in received.values() for message in messages if message.flags & QUIET]
    assert collections.Counter(quiet) == {Kind.RESET: 4, Kind.RELEASE: 1}


def failing_once(monkeypatch, owner, number, text):
    """Let the reset with this number, from 1 on, raise in the daemon."""
    reset, numbers = owner.reset, []

    def failing(request):
        numbers.append(request)
        if len(numbers) == number:
            raise RuntimeError(text)
        reset(request)

    monkeypatch.setattr(owner, "reset", failing)


def test_a_program_hears_of_a_failed_reset_in_its_next_call_and_begins_anew_after_it(run, monkeypatch):
    failing_once(monkeypatch, PackedRequest, 2, "the device is on fire")
    first, failed, third, fourth = run(CONVERSATIONS, STATEFUL)
    assert failed == "reset_state() failed, so this call was not run: the device is on fire"
    np.testing.assert_allclose([third, fourth], [first] * 2, atol=1e-4)


def test_a_failed_reset_concerns_only_the_next_question_of_its_request(daemon, plain_model, monkeypatch):
    failing_once(monkeypatch, PlainRequest, 1, "the device is on fire")
    with RawClient() as client:
        handle = client.model(plain_model).body["model"]
        with client.request(handle) as request, client.request(handle) as other:
            request.channel.send(Message(Kind.RESET, 1, flags=QUIET))
            answer = request.infer(ROWS)
            assert (answer.kind, answer.flags, answer.body["text"]) == (Kind.FAILED, EARLIER, "the device is on fire")
            for each in (other, request):
                np.testing.assert_array_equal(each.infer(ROWS)[0], np.abs(ROWS))
            assert client.ask(Kind.PING).kind is Kind.OK


def test_a_reset_after_a_failed_one_makes_it_good(daemon, plain_model, monkeypatch):
    failing_once(monkeypatch, PlainRequest, 1, "the device is on fire")
    with RawClient() as client, client.request(client.model(plain_model).body["model"]) as request:
        for _ in range(2):
            request.channel.send(Message(Kind.RESET, 1, flags=QUIET))
        np.testing.assert_array_equal(request.infer(ROWS)[0], np.abs(ROWS))


def test_a_quiet_reset_without_a_request_is_told_and_a_failed_release_is_only_logged(daemon, monkeypatch, caplog):
    def failing(session, handle):
        raise RuntimeError(f"model {handle} does not go")

    monkeypatch.setattr(Session, "release", failing)
    with RawClient() as client:
        client.channel.send(Message(Kind.RESET, 1, flags=QUIET))
        answer = client.ask(Kind.STATES, 1)
        assert answer.flags == EARLIER
        assert "no infer request" in answer.body["text"]
        client.channel.send(Message(Kind.RELEASE, 7, flags=QUIET))
        assert client.ask(Kind.PING).kind is Kind.OK
    assert "model 7 does not go" in caplog.text


@pytest.mark.parametrize("kind", sorted(set(Kind) - {Kind.RESET, Kind.RELEASE}))
def test_other_messages_must_not_be_quiet(daemon, kind):
    with RawClient() as client:
        client.channel.send(Message(kind, flags=QUIET, body={"name": "x"}))
        answer = client.channel.receive()
        assert answer.kind is Kind.REFUSED
        assert kind.name in answer.body["reason"]
        with pytest.raises((EOFError, OSError)):
            client.channel.receive()


MANY_MODELS = """
import gc, json, sys
import openvino as ov
core, modes = ov.Core(), []
for streams in range(1, 6):
    model = core.compile_model(sys.argv[1], "CPU", {"INFERENCE_NUM_THREADS": streams})
    modes.append(model._remote.mode)
    del model
    gc.collect()
print(json.dumps(modes))
"""


def test_a_model_that_was_dropped_does_not_count_for_the_next_one(run, plain_model, monkeypatch):
    release = Session.release

    def slow(session, handle):
        time.sleep(0.2)
        release(session, handle)

    monkeypatch.setattr(Session, "release", slow)
    assert run(MANY_MODELS, plain_model) == ["plain"] * 5  # the limit is 2, and a refused one would raise


DROPPED_IN_A_CALL = """
import gc, json, sys
import openvino as ov
model = ov.Core().compile_model(sys.argv[1], "CPU")
client = model._remote._client
with client._held():
    del model
    gc.collect()
    waiting = len(client._released)
print(json.dumps([waiting, len(client._released)]), flush=True)
sys.stdin.readline()
"""


def test_a_model_that_is_dropped_in_the_middle_of_a_call_is_given_back_after_it(daemon, plain_model):
    program = subprocess.Popen(
        [sys.executable, "-c", DROPPED_IN_A_CALL, str(plain_model)], env=attached_environment(dict(os.environ)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with program:
        try:
            assert json.loads(program.stdout.readline()) == [1, 0]
            ((slot, _),) = daemon.models.served()
            wait_for(lambda: slot.num_users == 0)
            assert program.poll() is None, "the program must still be connected"
        finally:
            program.kill()
