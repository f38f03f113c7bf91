"""Tests calls of plain models whose tensors are used again: each answer is that of its own inputs."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov
import pytest

from staticllm.daemon.models.plain import PlainRequest
from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest
from staticllm.wire.messages import Kind, Message
from tests.support.attach.daemons import RawClient, wait_for


@pytest.fixture
def request_of(daemon, plain_model):
    with RawClient() as client, client.request(client.model(plain_model).body["model"]) as request:
        yield request


def test_calls_of_changing_shapes_and_values_get_their_own_answers(request_of, plain_model):
    native, rng = ov.Core().compile_model(str(plain_model), "CPU"), np.random.default_rng(0)
    request_of.ask(Kind.REQUEST, block=20_000 * 32)
    for rows in (3, 3, 1, 3, 20_000, 3, 20_000, 1, 1):  # also in shared memory
        given = rng.normal(size=(rows, 8)).astype(np.float32)
        (found,) = request_of.infer(given)
        np.testing.assert_array_equal(found, native(given)[0])


def test_a_refused_input_leaves_the_next_call_as_it_is(request_of, plain_model):
    native, given = ov.Core().compile_model(str(plain_model), "CPU"), np.ones((2, 8), np.float32)
    expected = native(given)[0]
    np.testing.assert_array_equal(request_of.infer(given)[0], expected)
    for wrong in (np.ones((2, 8), np.float64), np.ones((2, 7), np.float32), np.ones((2, 8, 1), np.float32)):
        request_of.channel.send_tensors(Message(Kind.INFER), [wrong], [0])
        assert request_of.channel.receive().kind is Kind.FAILED
        np.testing.assert_array_equal(request_of.infer(given)[0], expected)


def test_two_requests_of_a_model_do_not_share_their_inputs(daemon, plain_model):
    native = ov.Core().compile_model(str(plain_model), "CPU")
    with RawClient() as client:
        handle = client.model(plain_model).body["model"]
        with client.request(handle) as one, client.request(handle) as two:
            for value in range(3):
                first, second = np.full((2, 8), value, np.float32), np.full((2, 8), -value, np.float32)
                one.channel.send_tensors(Message(Kind.INFER), [first], [0])
                two.channel.send_tensors(Message(Kind.INFER), [second], [0])
                for request, given in ((one, first), (two, second)):
                    ((_, found),) = request.channel.tensors_of(request.channel.receive())
                    np.testing.assert_array_equal(found, native(given)[0])


@pytest.mark.parametrize("changed", [-3, 60])
def test_a_call_that_waits_has_the_priority_that_its_program_has_now(changed, daemon, plain_model):
    with RawClient(priority=100 + 50) as client, client.request(client.model(plain_model).body["model"]) as request:
        scheduler = daemon.devices.scheduler("CPU")
        held = DeviceRequest(ClientId(99), 0.001)
        scheduler.acquire(held)
        thread = threading.Thread(target=request.infer, args=(np.ones((2, 8), np.float32),))
        thread.start()
        wait_for(lambda: scheduler.is_wanted)
        assert client.ask(Kind.HINT, priority=100 + changed).kind is Kind.OK
        priorities = [each.priority for each in scheduler.waiting]
        scheduler.release(held, 0.001)
        thread.join()
    assert priorities == [changed]


def test_a_priority_that_changes_while_a_call_begins_counts_for_it(daemon, plain_model, monkeypatch):
    with RawClient() as client, client.request(client.model(plain_model).body["model"]) as request:
        scheduler = daemon.devices.scheduler("CPU")
        asked, acquire, set_input = [], scheduler.acquire, PlainRequest._set_input

        def set_input_slowly(*given):
            assert client.ask(Kind.HINT, priority=100 + 7).kind is Kind.OK
            set_input(*given)

        monkeypatch.setattr(PlainRequest, "_set_input", set_input_slowly)
        monkeypatch.setattr(scheduler, "acquire", lambda ask: (asked.append(ask.priority), acquire(ask))[1])
        request.infer(np.ones((2, 8), np.float32))
    assert asked == [7]
