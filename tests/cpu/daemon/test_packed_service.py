"""Tests stateful models through the daemon: packed where possible, as they are with mode exact, with the original's logits."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov
import pytest

import staticllm
from staticllm.daemon.packed import request as packed_request
from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest
from staticllm.wire.messages import Kind, Message
from tests.support.attach.daemons import RawClient, daemon_thread, wait_for

CONFIG = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
PROMPT = [[5, 6, 7, 8, 9, 10, 11]]


@pytest.fixture(scope="module")
def path():
    return staticllm.demo_model_path() / "openvino_model.xml"


@pytest.fixture(scope="module")
def native(path):
    return ov.Core().compile_model(str(path), "CPU", CONFIG)


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run") as daemon:
        yield daemon


def arrays_of(names, ids, num_past):
    """Return the inputs of a call that runs ``ids [1, n]`` after ``num_past`` tokens."""
    ids = np.asarray(ids)
    mask = np.ones((1, num_past + ids.shape[1]), np.int64)
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (np.cumsum(mask, 1) - 1)[:, -ids.shape[1] :],
        "beam_idx": np.zeros(1, np.int32),
    }
    return [given[name] for name in names]


def call_of(native, ids, num_past):
    return arrays_of(names_of(native), ids, num_past)


def greedy(names, infer, count=8):
    """Return the tokens and logits of a greedy answer, as optimum-intel computes it."""
    ids, past, tokens, all_logits = np.array(PROMPT), 0, [], []
    for _ in range(count):
        logits = infer(arrays_of(names, ids, past))
        past += ids.shape[1]
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids[0, 0]))
        all_logits.append(logits)
    return tokens, all_logits


def names_of(native):
    return [port.get_any_name() for port in native.inputs]


def expected(native):
    request = native.create_infer_request()
    names = names_of(native)
    return greedy(names, lambda arrays: request.infer(dict(zip(names, arrays, strict=True)))["logits"].copy())


@pytest.mark.parametrize("mode, served", [("auto", "packed"), ("exact", "stateful")])
def test_an_unmodified_loop_gets_the_originals_logits(daemon, native, path, mode, served):
    tokens, logits = expected(native)
    with RawClient() as client:
        answer = client.model(path, config=CONFIG, mode=mode)
        assert answer.body["mode"] == served
        with client.request(answer.body["model"]) as request:
            for _ in range(2):
                found, found_logits = greedy(names_of(native), lambda arrays: request.infer(*arrays)[0])
                assert found == tokens
                for one, other in zip(found_logits, logits, strict=True):
                    assert one.shape == other.shape
                    np.testing.assert_allclose(one, other, atol=0 if mode == "exact" else 2e-4)
                assert request.ask(Kind.RESET).kind is Kind.OK


def test_two_programs_get_their_tokens_and_one_that_goes_leaves_nothing(daemon, native, path):
    tokens, _ = expected(native)
    results, barrier = [], threading.Barrier(2)

    def run():
        with RawClient() as client:
            handle = client.model(path, config=CONFIG).body["model"]
            with client.request(handle) as request:
                barrier.wait()
                for _ in range(4):
                    results.append(greedy(names_of(native), lambda arrays: request.infer(*arrays)[0])[0])
                    request.ask(Kind.RESET)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tokens] * 8
    ((slot, _),) = daemon.models.served()
    wait_for(lambda: slot.num_users == 0)


def test_tokens_that_wait_together_share_a_call(daemon, native, path):
    tokens, _ = expected(native)
    with RawClient() as one, RawClient() as other:
        requests = [client.request(client.model(path, config=CONFIG).body["model"]) for client in (one, other)]
        for request in requests:
            request.infer(*call_of(native, PROMPT, 0))
        engine = daemon.models.served()[0][1].engine
        gate, found = threading.Event(), []
        engine.call_soon(gate.wait)  # the engine is busy until both tokens have arrived
        wait_for(lambda: not engine.steps.callbacks)
        before = engine.stats().num_steps
        step = call_of(native, [[tokens[0]]], len(PROMPT[0]))
        threads = [
            threading.Thread(target=lambda request=request: found.append(request.infer(*step)[0]))
            for request in requests
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(engine.steps.callbacks) == 2)
        gate.set()
        for thread in threads:
            thread.join()
        assert [int(logits[0, -1].argmax()) for logits in found] == [tokens[1]] * 2
        assert engine.stats().num_steps == before + 1
        wait_for(lambda: [c["rows_by_phase"].get("decode") for c in daemon.stats()["clients"]] == [1, 1])
        clients, (slot, _) = daemon.stats()["clients"], daemon.models.served()[0]
        decode = [client["by_phase"]["decode"] for client in clients]
        assert decode[0] == pytest.approx(decode[1])  # half of the call each
        for client in clients:
            assert client["rows_by_phase"]["prefill"] in (1, 7)  # the second prompt may reuse all but one token
            assert client["device_seconds"] == pytest.approx(sum(client["by_phase"].values()))
            assert client["read_bytes"] > slot.num_bytes
        for request in requests:
            request.close()


def test_a_priority_that_changes_reaches_the_sequences_and_the_device(daemon, native, path, monkeypatch):
    with RawClient(priority=100 + 3) as client:
        handle = client.model(path, config=CONFIG).body["model"]
        engine, scheduler = daemon.models.served()[0][1].engine, daemon.devices.scheduler("CPU")
        asked, take = [], scheduler.acquire
        monkeypatch.setattr(scheduler, "acquire", lambda ask: (asked.append(ask), take(ask))[1])
        (session,) = daemon.sessions.values()
        with client.request(handle) as request:
            request.infer(*call_of(native, PROMPT, 0))
            asks = [ask for ask in asked if ask.payers]
            assert [(ask.priority, *ask.payers) for ask in asks] == [(3, session.client)] * len(asks) != []
            (state,) = engine.core.device.kv_manager.idle.states.values()
            assert state.info.priority == 3
            assert client.ask(Kind.HINT, priority=100 + 7).kind is Kind.OK
            wait_for(lambda: state.info.priority == 7)
            del asked[:]
            request.infer(*call_of(native, [[1]], len(PROMPT[0])))
            assert {ask.priority for ask in asked if ask.payers} == {7}


def test_the_priority_of_an_idle_program_does_not_raise_the_step_of_another(daemon, native, path):
    with RawClient(program="idle") as idle, RawClient(program="busy") as busy:
        requests = [client.request(client.model(path, config=CONFIG).body["model"]) for client in (idle, busy)]
        for request in requests:
            request.infer(*call_of(native, PROMPT, 0))
        scheduler = daemon.devices.scheduler("CPU")
        held, third = (DeviceRequest(ClientId(number), 0.001, priority=50) for number in (98, 99))
        scheduler.acquire(held)
        step = call_of(native, [[1]], len(PROMPT[0]))
        threads = [
            threading.Thread(target=requests[1].infer, args=step),
            threading.Thread(target=scheduler.acquire, args=(third,)),
        ]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda number=number: len(scheduler.waiting) == number)
        assert idle.ask(Kind.HINT, priority=100 + 100).kind is Kind.OK
        priorities = sorted(each.priority for each in scheduler.waiting)
        scheduler.release(held, 0.001)
        is_first = third in scheduler.running
        wait_for(lambda: third.is_granted)
        scheduler.release(third, 0.001)
        for thread in threads:
            thread.join()
        for request in requests:
            request.close()
    assert priorities == [0, 50]
    assert is_first


def test_a_priority_that_changes_while_a_call_begins_counts_for_its_sequences(daemon, native, path, monkeypatch):
    with RawClient() as client:
        handle = client.model(path, config=CONFIG).body["model"]
        engine = daemon.models.served()[0][1].engine
        new_sequence = packed_request.ClientSequence

        def open_slowly(*given):
            sequence = new_sequence(*given)
            assert client.ask(Kind.HINT, priority=100 + 7).kind is Kind.OK
            return sequence

        monkeypatch.setattr(packed_request, "ClientSequence", open_slowly)
        with client.request(handle) as request:
            request.infer(*call_of(native, PROMPT, 0))
            (state,) = engine.core.device.kv_manager.idle.states.values()
            assert state.info.priority == 7


def test_a_priority_counts_for_all_clients_of_a_process(daemon):
    """Attached programs have a client for each pipeline of GenAI, and say a priority only once."""
    with RawClient() as client, RawClient(), RawClient(program="other"):
        assert client.ask(Kind.HINT, priority=100 + 7).kind is Kind.OK
        assert sorted(session.priority for session in daemon.sessions.values()) == [0, 7, 7]


def test_the_call_of_a_program_that_dies_runs_no_further(daemon, native, path):
    client = RawClient()
    request = client.request(client.model(path, config=CONFIG).body["model"])
    ((slot, service),) = daemon.models.served()
    engine, gate = service.engine, threading.Event()
    engine.call_soon(gate.wait)  # the engine is busy until the program has gone
    wait_for(lambda: not engine.steps.callbacks)
    before = engine.stats().num_steps
    request.channel.send_tensors(Message(Kind.INFER), call_of(native, PROMPT, 0), range(len(names_of(native))))
    wait_for(lambda: len(engine.steps.callbacks) == 2)  # a sequence and its feed
    client.close()
    wait_for(lambda: not slot.num_users)
    gate.set()
    wait_for(lambda: not daemon.connections)
    assert engine.stats().num_steps == before
    assert not engine.core.requests
    assert not engine.steps.callbacks
    request.close()


def test_the_hint_returns_the_last_row_only(daemon, native, path):
    _, logits = expected(native)
    with RawClient() as client:
        handle = client.model(path, config=CONFIG).body["model"]
        with client.request(handle) as request:
            mask = np.ones((1, 7), np.int64)
            given = {
                "input_ids": np.array(PROMPT),
                "attention_mask": mask,
                "position_ids": np.cumsum(mask, 1) - 1,
                "beam_idx": np.zeros(1, np.int32),
            }
            arrays = [given[name] for name in names_of(native)]
            request.channel.send_tensors(Message(Kind.INFER, body={"wanted": "last"}), arrays, range(len(arrays)))
            ((_, found),) = request.channel.tensors_of(request.channel.receive())
            assert found.shape[1] == 1
            np.testing.assert_allclose(found[:, -1], logits[0][:, -1], atol=2e-4)


def test_properties_and_states_of_a_packed_model(daemon, native, path):
    with RawClient() as client:
        handle = client.model(path, config=CONFIG).body["model"]
        for name in ("INFERENCE_PRECISION_HINT", "EXECUTION_DEVICES"):
            assert client.ask(Kind.GET_PROPERTY, handle, name=name).kind is Kind.OK
        assert client.ask(Kind.GET_PROPERTY, handle, name="NO_SUCH").kind is Kind.FAILED
        with client.request(handle) as request:
            names = request.ask(Kind.STATES).body["names"]
            assert names == [state.name for state in native.create_infer_request().query_state()]
            assert request.ask(Kind.PROFILE).kind is Kind.FAILED
