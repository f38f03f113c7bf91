"""Tests the engine on the fake device, step by step: each request gets its own answer, whichever requests share its steps."""

import threading
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.engine_schedules import ADAPTERS, HOSTILE, MASKS, Disturbed, Schedule
from support.engine.output_queues import outputs_of, reason_of
from support.quick import examples

from staticllm.core import Variant
from staticllm.errors import BusyError, ClosedError
from staticllm.pipelines.engine.request import Finished, TokenOutput
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import (
    FAKE_VARIANTS,
    add_program,
    assert_empty,
    fake_answer,
    fake_engine,
    fake_request,
    run_to_end,
    run_until,
)


def tokens_of(request):
    """Return the tokens that the request's queue has."""
    return [output.id for output in outputs_of(request) if isinstance(output, TokenOutput)]


def shortened_answer(prompt, num_new, head):
    """Return an answer whose conversation keeps its first ``head`` and its last tokens, 32 in all, when it exceeds 64."""
    conversation, answer = list(prompt), []
    while len(answer) < num_new:
        answer.append(fake_answer(conversation, 1)[-1])
        conversation.append(answer[-1])
        if len(conversation) > 64:
            conversation = [*conversation[:head], *conversation[head - 32 :]]
    return answer


prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(prompts, min_size=1, max_size=9),
        "cancels": st.sets(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=4),
        "moves": st.lists(st.sampled_from(["swap_out", "preempt", "skip", None, None, *HOSTILE]), max_size=12),
        "max_num_seqs": st.integers(1, 4),
        "host_kv_slots": st.sampled_from([0, 40, 256]),
        "gap_ms": st.sampled_from([None, 0.01, 1.0]),
        "kind": st.sampled_from(["packed", "in turns", "recurrent"]),
        "poisoned": st.sets(st.integers(0, 8), max_size=2),
        "adapters": st.lists(st.integers(0, len(ADAPTERS) - 1), max_size=4),
        "compiled": st.none() | st.permutations(range(len(FAKE_VARIANTS))),
        "num_blocks": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
def test_any_schedule_gives_each_request_its_own_answer(schedule):
    """Schedules include swaps, time slices, preemptions, adapters, recurrent and unpackable models, late programs and blocks."""
    is_recurrent = schedule["kind"] == "recurrent"
    variants = FAKE_VARIANTS if schedule["kind"] == "packed" else [v for v in FAKE_VARIANTS if v.sequences == 1]
    engine = fake_engine(
        Disturbed(schedule["policy"], schedule["moves"]),
        schedule["max_num_seqs"],
        variants,
        host_kv_slots=schedule["host_kv_slots"],
        gap_ms=schedule["gap_ms"],
        masks=MASKS,
        is_recurrent=is_recurrent,
        is_staged=schedule["compiled"] is not None,
        num_blocks=schedule["num_blocks"],
    )
    late = [FAKE_VARIANTS[i] for i in schedule["compiled"] or () if FAKE_VARIANTS[i] in engine.runner.programs.late]
    run = Schedule(schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the scheduler Disturbed is replaced by fcfs")
        for step in range(3000):
            run.arrive(engine, step)
            if late and step % 5 == 0:
                add_program(engine.runner, late.pop())
            engine.steps.step()
            if step > 60 and engine.is_idle:
                break
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent)


SEPARATE = (
    *(Variant(1, kv_len) for kv_len in (32, 64, 128)),
    *(Variant(rows, kv_len, 4) for rows in (4, 16) for kv_len in (32, 64, 128)),
    *(Variant(8, kv_len) for kv_len in (0, 128)),
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("is_users", [False, True])
def test_a_small_packed_program_installed_first_ends_no_request(name, is_users):
    """Four sequences that use more slots than the program sees must take turns until the next program is installed."""
    engine = fake_engine(Disturbed(name, ["skip"]) if is_users else make_policy(name), 4, SEPARATE, is_staged=True)
    requests = [fake_request(range(40 * i, 40 * i + 12 + i), 20) for i in range(9)]
    expected = [fake_answer(request.tokens, 20) for request in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.steps.add(requests)
        for variant in sorted(engine.runner.programs.late):
            for _ in range(12):
                engine.steps.step()
            add_program(engine.runner, variant)
        run_to_end(engine, [])
    assert [request.tokens for request in requests] == expected
    assert_empty(engine)
    engine.close()


def test_a_first_token_is_posted_at_once_and_later_ones_while_the_next_call_runs():
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    request = fake_request(range(2, 30), 6)
    engine.steps.add([request])
    num_posted = []
    while not engine.is_idle:
        engine.steps.step()
        num_posted.append(len(tokens_of(request)))
    engine.close()
    first = num_posted.index(1)
    assert num_posted[first:] == [1, 0, 1, 1, 1, 2], "the call that ends an answer posts all that is left"


def test_beside_a_first_token_later_ones_of_others_and_the_record_wait_for_the_next_call():
    engine = fake_engine(make_policy("chunked"), starts_thread=False)
    stream, late = fake_request(range(2, 12), 20), fake_request(range(40, 50), 6, num_sequences=2)
    run_until(engine, lambda: stream.num_generated > 2, [stream])
    tokens_of(stream)
    engine.steps.add([late])
    num_steps, num_posted = engine.stats().num_steps, 0
    while not late.num_generated:
        engine.steps.step()
        num_posted += len(tokens_of(stream))
        num_steps += 1
    assert len(tokens_of(late)) == 2, "one for each answer"
    assert num_posted == stream.num_generated - 3, "the newest of the stream waits"
    assert engine.stats().num_steps == num_steps, "each call is recorded in the next one"
    run_to_end(engine)
    engine.close()


class Seen:
    """Plans as ``fcfs`` does, and keeps what it saw."""

    def __init__(self):
        self.views, self._policy = [], make_policy("fcfs")

    def plan(self, view):
        self.views.append(view)
        return self._policy.plan(view)


def test_the_only_request_is_planned_without_its_cached_prefix():
    policy = Seen()
    engine = fake_engine(policy, 4, starts_thread=False)
    first = fake_request(range(2, 30), 4)
    run_to_end(engine, [first])
    conversation = [*range(2, 30), *first.tokens[-4:]]
    alone = fake_request([*conversation, 40, 41], 2)
    expected = fake_answer([*conversation, 40, 41], 2)
    policy.views.clear()
    run_to_end(engine, [alone])
    (seen,) = policy.views[0].requests
    assert seen.num_computed == len(conversation) - 1 and seen.num_left == 3, "the last token of an answer has no slot"
    assert alone.tokens[-2:] == expected[-2:]
    policy.views.clear()
    both = [fake_request([*conversation, 42 + i], 2) for i in range(2)]
    run_to_end(engine, both)
    assert [each.num_computed for each in policy.views[0].requests] == [0, 0], "they may need each other's slots"
    assert_empty(engine)
    engine.close()


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_every_policy_serves_more_requests_than_may_run(name, max_num_seqs):
    engine = fake_engine(make_policy(name), max_num_seqs)
    requests = [fake_request(range(10 * i, 10 * i + 3 + 5 * i), 8) for i in range(9)]
    expected = [fake_answer(request.tokens, 8) for request in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_to_end(engine, requests)
    assert [request.tokens for request in requests] == expected
    assert all(reason_of(request) == "length" for request in requests)
    assert_empty(engine)


def test_several_sequences_share_a_call():
    engine = fake_engine(make_policy("dynamic"))
    requests = [fake_request(range(50 * i, 50 * i + 5), 20) for i in range(4)]
    run_to_end(engine, requests)
    assert engine.core.profiler.stats().num_steps < 30, "80 tokens in packed steps"


def test_cancellation_between_the_chunks_of_a_prompt():
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(range(60), 5)
    engine.steps.add([request])
    engine.steps.step()
    assert engine.core.device.kv_manager.table[request.id].status == "prefilling"
    request.cancel()
    engine.steps.step()
    assert reason_of(request) == "cancelled"
    assert not request.num_generated
    assert_empty(engine)


def test_a_deadline_ends_a_request_and_keeps_its_tokens():
    engine = fake_engine(make_policy("fcfs"))
    late, fine = fake_request([1, 2], 5, deadline=0.0), fake_request([1, 2], 5)
    run_to_end(engine, [late, fine])
    assert (reason_of(late), reason_of(fine)) == ("deadline", "length")


def test_a_full_queue_refuses_requests_and_loses_none():
    engine = fake_engine(make_policy("fcfs"), max_waiting=2, starts_thread=False)
    requests = [fake_request([1, 2, i], 3) for i in range(3)]
    engine.submit_state(requests[0])
    engine.submit_state(requests[1])
    with pytest.raises(BusyError, match="2 requests wait, MAX_WAITING is 2"):
        engine.submit_state(requests[2])
    run_to_end(engine, [])
    engine.submit_state(requests[2])
    run_to_end(engine, [])
    assert [reason_of(request) for request in requests] == ["length"] * 3


def test_higher_priority_runs_first():
    engine = fake_engine(make_policy("fcfs"), max_num_seqs=1)
    low, high = fake_request([1, 2], 3), fake_request([3, 4], 3, priority=5)
    run_to_end(engine, [low, high])
    assert high.token_times[-1] < low.token_times[0]


def test_closing_while_a_switch_is_pending_ends_every_request():
    """New requests wait for the other runner. If the engine is closed first, they end as cancelled like all others."""
    engine, other = fake_engine(make_policy("fcfs"), starts_thread=False), fake_engine(make_policy("fcfs"))
    running, waiting = fake_request([1, 2, 3], 60), fake_request([4, 5, 6], 4)
    engine.steps.add([running])
    engine.steps.step()
    switched = []
    engine.switch(other.runner, other.core.device.options, lambda: switched.append(True))
    engine.submit_state(waiting)
    for _ in range(3):
        engine.steps.step()
    engine.close()
    assert [reason_of(request) for request in (running, waiting)] == ["cancelled", "cancelled"]
    assert not switched
    assert engine.is_idle


def test_a_switch_happens_between_two_requests_and_is_reported():
    engine, other = fake_engine(make_policy("fcfs"), starts_thread=False), fake_engine(make_policy("fcfs"))
    running, waiting = fake_request([1, 2, 3], 9), fake_request([4, 5, 6], 4)
    engine.steps.add([running])
    engine.steps.step()
    switched = []
    engine.switch(other.runner, other.core.device.options, lambda: switched.append(engine.is_idle))
    engine.submit_state(waiting)
    run_to_end(engine, [])
    assert engine.runner is other.runner
    assert len(switched) == 1
    assert [reason_of(request) for request in (running, waiting)] == ["length", "length"]
    assert waiting.tokens == fake_answer([4, 5, 6], 4)


def test_requests_that_wait_for_a_switch_can_be_cancelled_or_expire():
    engine, other = fake_engine(make_policy("fcfs"), starts_thread=False), fake_engine(make_policy("fcfs"))
    running = fake_request([1, 2, 3], 60)
    engine.steps.add([running])
    engine.steps.step()
    engine.switch(other.runner, other.core.device.options)
    cancelled, late, waiting = fake_request([4], 4), fake_request([5], 4, deadline=0.0), fake_request([6], 4)
    for request in (cancelled, late, waiting):
        engine.submit_state(request)
    cancelled.cancel()
    engine.steps.step()
    assert (reason_of(cancelled), reason_of(late)) == ("cancelled", "deadline")
    assert running.queue.get(0) is not None
    run_to_end(engine, [])
    assert waiting.tokens == fake_answer([6], 4)


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_full_prompt_in_the_host_pool_continues_by_its_overflow_rule(num_running):
    variants = (
        *FAKE_VARIANTS,
        *(Variant(64, kv_len) for kv_len in (0, 64, 128)),
        Variant(1, 256),
        Variant(64, 256),
    )
    engine = fake_engine(make_policy("prefill_first"), 1, variants, max_seq_len=64, host_kv_slots=512)
    engine.steps.add([fake_request([1, 2, 3], 30) for _ in range(num_running)])
    for _ in range(4):
        engine.steps.step()
    request = fake_request(range(64), 10, overflow="shift")
    run_to_end(engine, [request])
    assert tokens_of(request) == shortened_answer(range(64), 10, head=4)
    assert_empty(engine)


# -- the thread


def test_the_engine_thread_serves_requests_and_ends_on_close():
    engine = fake_engine(make_policy("dynamic"))
    requests = [fake_request(range(i, i + 10), 10) for i in range(6)]
    for request in requests:
        engine.submit_state(request)
    engine.close(drain=True)
    assert [reason_of(request) for request in requests] == ["length"] * 6
    assert engine.step_host.thread.has_begun
    assert not engine.step_host.thread.is_alive()
    with pytest.raises(ClosedError):
        engine.submit_state(fake_request([1], 1))
    with pytest.raises(ClosedError):
        engine.run_between_steps(lambda: None)
    engine.close()


def test_an_engine_without_a_thread_drains_on_the_callers():
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    request = fake_request([1, 2], 10)
    engine.submit_state(request)
    assert not outputs_of(request)
    engine.close(drain=True)
    assert request.tokens == fake_answer([1, 2], 10)
    with pytest.raises(ClosedError):
        engine.submit_state(fake_request([1], 1))
    engine.close()


def test_closing_without_draining_cancels_requests():
    engine = fake_engine(make_policy("dynamic"))
    request = fake_request([1, 2], 1_000_000, overflow="shift")  # it never ends by itself
    engine.submit_state(request)
    first = request.queue.get(5)
    engine.close()
    rest = outputs_of(request)
    assert isinstance(first, TokenOutput)
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason == "cancelled"
    assert_empty(engine)


def test_a_callback_runs_between_steps_and_its_error_reaches_the_caller():
    engine = fake_engine(make_policy("dynamic"))
    assert engine.run_between_steps(lambda: threading.current_thread().name) == "staticllm-engine"
    with pytest.raises(KeyError):
        engine.run_between_steps(lambda: {}["x"])
    engine.close()


# -- overflow


@pytest.mark.parametrize(("rule", "head"), [("shift", 4), ("truncate_middle", 8)])
def test_a_full_conversation_continues_with_the_tokens_that_the_rule_keeps(rule, head):
    engine = fake_engine(make_policy("dynamic"), max_seq_len=64)
    request, other = fake_request(range(40), 60, overflow=rule), fake_request(range(500, 510), 60)
    run_to_end(engine, [request, other])
    assert tokens_of(request) == shortened_answer(range(40), 60, head)
    assert len(tokens_of(other)) == 55, "the rule of the other is to stop"
    assert_empty(engine)
