"""Tests failures in the engine, on the fake device: a failure ends only the requests to which it belongs."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter

import pytest
from support.engine.output_queues import outputs_of

from staticllm.errors import DeviceError, GenerationConfigError, NumericalError
from staticllm.kvcache import cache as cache_module
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import (
    POISON,
    VOCAB_SIZE,
    assert_empty,
    fake_answer,
    fake_engine,
    fake_request,
    run_to_end,
    run_until,
)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_non_finite_logits_end_only_their_own_request(name):
    """Such a request spoils every call that it is in, so the other requests run again without it."""
    engine = fake_engine(make_policy(name))
    innocent = [fake_request(range(20 * i, 20 * i + 5 + 3 * i), 9) for i in range(8)]
    guilty = [fake_request([1, POISON, 3], 9), fake_request([*range(60, 80), POISON], 9)]
    engine.steps.add([*innocent[:3], guilty[0], *innocent[3:6], guilty[1], *innocent[6:]])
    run_to_end(engine, [])
    for request in guilty:
        end = outputs_of(request)[-1]
        assert isinstance(end.error, NumericalError)
        assert not request.num_generated
    for index, request in enumerate(innocent):
        assert request.tokens == fake_answer(range(20 * index, 20 * index + 5 + 3 * index), 9)
    assert_empty(engine)


def test_suspected_requests_take_turns_with_the_others():
    engine = fake_engine(make_policy("dynamic"), max_num_seqs=2)
    decoding = [fake_request([7, 8, i], 40) for i in range(2)]
    run_until(engine, lambda: decoding[1].num_generated >= 3, decoding)
    prompts = [fake_request([i, i + 1, i + 2], 2) for i in range(30, 36)]
    engine.steps.add([fake_request([POISON], 2), *prompts])
    gaps, seen = [0], decoding[0].num_generated
    for _ in range(60):
        engine.steps.step()
        gaps.append(gaps[-1] + 1 if decoding[0].num_generated == seen else 0)
        seen = decoding[0].num_generated
        if decoding[0].num_generated == 40:
            break
    assert max(gaps) <= 3, "decoding requests do not wait for all suspects"
    run_to_end(engine, [])
    assert all(request.num_generated == request.request.max_new_tokens for request in (*decoding, *prompts))


def test_non_finite_slots_are_never_kept(monkeypatch):
    """In a model with windows, a request's own logits may be finite while its slots would spoil those of the others."""
    engine = fake_engine(make_policy("fcfs"))
    request, other = fake_request([1, 2, 3], 5), fake_request([4, 5, 6], 5)
    monkeypatch.setattr(cache_module, "is_finite", lambda rows: not (rows[..., 0] == 2).any())
    run_to_end(engine, [request, other])
    assert isinstance(outputs_of(request)[-1].error, NumericalError)
    assert other.tokens == fake_answer([4, 5, 6], 5)


@pytest.mark.parametrize("part", ["arena.write", "slots.allocate"])
def test_an_exception_inside_commit_recomputes_the_requests(monkeypatch, part):
    engine = fake_engine(make_policy("fcfs"))
    first, second = fake_request([1, 2, 3], 12), fake_request(range(30, 60), 4)
    run_until(engine, lambda: first.num_generated >= 3, [first])
    owner, _, method = part.partition(".")
    target = getattr(engine.runner.cache, owner)

    def fail(*_):
        raise RuntimeError("disk on fire")

    engine.steps.add([second])
    monkeypatch.setattr(target, method, fail)
    engine.steps.step()
    monkeypatch.undo()
    run_to_end(engine, [])
    assert isinstance(outputs_of(second)[-1].error, DeviceError)
    assert first.tokens == fake_answer([1, 2, 3], 12)
    assert_empty(engine)


def test_a_failing_device_call_ends_only_the_requests_in_it(monkeypatch):
    engine = fake_engine(make_policy("fcfs"))
    running, arriving = fake_request([1, 2, 3], 8), fake_request(range(20), 3)
    run_until(engine, lambda: running.num_generated, [running])
    for variant, program in engine.runner.programs.items():
        if variant.rows > 4:
            monkeypatch.setattr(program, "run", lambda meanwhile: (_ for _ in ()).throw(RuntimeError("device lost\n")))
    engine.steps.add([arriving])
    run_to_end(engine, [])
    assert str(outputs_of(arriving)[-1].error) == "the device failed: device lost"
    assert running.tokens == fake_answer([1, 2, 3], 8)


def test_a_failure_outside_the_call_ends_all_requests_and_the_engine_continues(monkeypatch):
    engine = fake_engine(make_policy("fcfs"))
    first, second = fake_request([1, 2, 3], 30), fake_request([4, 5, 6], 30)
    run_until(engine, lambda: second.num_generated, [first, second])
    first.cancel()

    def fail(*_):
        raise MemoryError("no memory for a copy")

    monkeypatch.setattr(engine.core.device.kv_manager.prefix, "keep", fail)
    engine.steps.step()
    monkeypatch.undo()
    assert {outputs_of(request)[-1].reason for request in (first, second)} == {"error"}
    third = fake_request([1, 2, 3], 5)
    run_to_end(engine, [third])
    assert third.tokens == fake_answer([1, 2, 3], 5)
    assert_empty(engine)


def test_a_sampling_error_ends_only_its_own_request():
    engine, everything = fake_engine(make_policy("dynamic")), frozenset(range(VOCAB_SIZE))
    bad, good = fake_request([1, 2], 5, stop_token_ids=everything, min_new_tokens=2), fake_request([3, 4], 5)
    run_to_end(engine, [bad, good])
    assert isinstance(outputs_of(bad)[-1].error, GenerationConfigError)
    assert outputs_of(good)[-1].reason == "length"
    assert_empty(engine)


def test_a_failure_while_a_request_is_admitted_loses_no_other_request(monkeypatch):
    engine = fake_engine(make_policy("fcfs"))
    first, second, third = (fake_request([i, i + 1], 3) for i in (1, 5, 9))
    add = engine.core.device.kv_manager.add

    def fails_for_the_second(state):
        if state.request is second.request:
            raise MemoryError
        add(state)

    monkeypatch.setattr(engine.core.device.kv_manager, "add", fails_for_the_second)
    engine.steps.add([first, second, third])
    run_to_end(engine, [])
    assert [str(outputs_of(request)[-1].reason) for request in (first, second, third)] == ["error", "error", "length"]
    assert third.tokens == fake_answer([9, 10], 3)
    assert_empty(engine)


@pytest.mark.parametrize("place", ["serving.report", "feeds.end_held", "device.kv_manager.clear"])
def test_no_reader_waits_if_ending_everything_fails_too(monkeypatch, place):
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    first, second = fake_request([1, 2, 3], 50), fake_request([4, 5], 50)
    engine.steps.add([first, second])
    for _ in range(4):
        engine.steps.step()

    def fail(*_):
        raise RuntimeError("a bug")

    *owner, name = place.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "_execute", fail)
        patch.setattr(attrgetter(".".join(owner))(engine.core), name, fail)
        engine.steps.step()
    assert {str(outputs_of(request)[-1].reason) for request in (first, second)} == {"error"}
    third = fake_request([1, 2, 3], 5)
    run_to_end(engine, [third])
    assert third.tokens == fake_answer([1, 2, 3], 5)
    assert_empty(engine)


class Turns:
    """The device of an engine that notes whether a step of it runs now."""

    is_wanted = False

    def __init__(self):
        self.is_used = False

    @contextmanager
    def turn(self, worker, limits):
        self.is_used = True
        yield
        self.is_used = False

    def hurry(self, priority, client):
        pass

    def close(self):
        pass


def test_a_model_that_cannot_show_its_rotations_fails_only_requests_that_need_them(monkeypatch):
    engine = fake_engine(make_policy("fcfs"), starts_thread=False)
    innocent = fake_request([1, 2, 3], 12)
    guilty = fake_request([4, 5], 12, overflow="context_shift")
    later = fake_request([6, 7], 12, overflow="context_shift")

    def fail(*_):
        raise RuntimeError("the device is on holiday")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.runner), "rows_at", fail)
        run_to_end(engine, [innocent, guilty])
    assert "holiday" in str(outputs_of(guilty)[-1].error)
    assert innocent.tokens == fake_answer([1, 2, 3], 12)
    run_to_end(engine, [later])
    assert later.tokens == fake_answer([6, 7], 12)
    assert_empty(engine)


def test_rotations_are_found_in_a_turn_of_the_device_and_without_the_lock_of_submit(monkeypatch):
    engine = fake_engine(make_policy("fcfs"), starts_thread=False)
    turns = Turns()
    engine.steps.device_use = turns
    seen = []
    rows_at = type(engine.runner).rows_at

    def is_free():
        with engine.step_host.wake:
            return True

    def look(runner, token, position):
        with ThreadPoolExecutor(1) as other:
            seen.append((turns.is_used, other.submit(is_free).result(5)))
        return rows_at(runner, token, position)

    monkeypatch.setattr(type(engine.runner), "rows_at", look)
    run_to_end(engine, [fake_request([4, 5], 12, overflow="context_shift")])
    assert set(seen) == {(True, True)}
