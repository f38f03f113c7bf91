"""Tests many requests at once on the CPU: handles, callbacks, event loops, deadlines, full queues and closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.helpers import EXACT, tokens_of
from support.quick import examples

import staticllm
from staticllm import BusyError, ClosedError, GenerationConfigError, PromptError, StaticLLMPipeline
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import POLICIES

pytestmark = pytest.mark.usefixtures("shared_programs")

SMALL = {"MAX_PROMPT_LEN": 96, "MIN_RESPONSE_LEN": 64, **EXACT}


@pytest.fixture(scope="module")
def pipe(zoo):
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_NUM_SEQS=4, **SMALL) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def single(zoo):
    """A pipeline that runs one request at a time and keeps nothing of it."""
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_NUM_SEQS=1, PREFIX_CACHING=False, **SMALL) as pipe:
        yield pipe


def held_slots(pipe):
    """Return the slots in use, without those of idle conversations, and the number of requests in the engine."""
    engine = pipe.engine
    return engine.run_between_steps(
        lambda: (
            engine.runner.cache.slots.num_used - engine.core.device.kv_manager.prefix.idle_slots,
            len(engine.core.device.kv_manager.states),
            engine.core.device.kv_manager.host_pool.num_swapped_slots,
        )
    )


@pytest.mark.parametrize(
    "programs", ["shared", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("separate", "blocks"))]
)
@pytest.mark.parametrize(
    "scheduler",
    [
        name if name in ("dynamic", "chunked") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(POLICIES)
    ],
)
def test_concurrent_requests_have_the_tokens_of_single_runs(zoo, prompt_of, scheduler, programs, single):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((3, 70, 20, 90, 41, 1, 33))]
    with StaticLLMPipeline(
        zoo / "llama", "CPU", PROGRAMS=programs, MAX_NUM_SEQS=3, SCHEDULER=scheduler, **SMALL
    ) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handles = [pipe.submit(np.array(prompt), max_new_tokens=24, ignore_eos=True) for prompt in prompts]
            together = [handle.result().tokens[0] for handle in handles]
        assert held_slots(pipe) == (0, 0, 0)
    assert together == [tokens_of(single, prompt, 24) for prompt in prompts]


def test_a_list_of_prompts_runs_together_and_in_order(pipe, prompt_of):
    prompts = np.array([prompt_of(12, seed) for seed in range(9)])
    before = pipe.stats().num_steps
    batch = pipe.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert pipe.stats().num_steps - before < 9 * 16 / 2
    assert batch.tokens == [tokens_of(pipe, prompt, 16) for prompt in prompts]
    assert batch.perf_metrics.get_num_generated_tokens() == 9 * 16
    texts = pipe.generate(["hello", "good morning"], max_new_tokens=5, ignore_eos=True)
    assert texts.texts == [
        str(pipe.generate(text, max_new_tokens=5, ignore_eos=True)) for text in ("hello", "good morning")
    ]
    with pytest.raises(GenerationConfigError, match="a streamer for 2 prompts"):
        pipe.generate(["a", "b"], streamer=lambda piece: None)


def test_a_list_longer_than_the_queue_is_served(zoo):
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_WAITING=2, MAX_NUM_SEQS=2, **SMALL) as pipe:
        results = pipe.generate(["hello"] * 20, max_new_tokens=3, ignore_eos=True)
        assert len(set(results.texts)) == 1
        assert len(results.texts) == 20


def test_a_handle_gives_text_tokens_and_the_result(pipe):
    expected = pipe.generate("hello", max_new_tokens=12, ignore_eos=True)
    handle = pipe.submit("hello", max_new_tokens=12, ignore_eos=True)
    assert "".join(handle) == expected
    assert handle.is_done
    assert handle.finish_reason == "length"
    assert handle.result() == expected
    assert handle.result().tokens == expected.tokens
    assert list(pipe.submit("hello", max_new_tokens=12, ignore_eos=True).tokens()) == expected.tokens[0]
    waiting = pipe.submit("hello", max_new_tokens=60, ignore_eos=True)
    with pytest.raises(TimeoutError, match="it goes on"):
        waiting.result(timeout=0.0)
    assert len(waiting.result(timeout=30).tokens[0]) == 60


def test_cancel_returns_the_tokens_so_far(pipe):
    handle = pipe.submit("hello", max_new_tokens=64, ignore_eos=True)
    tokens = handle.tokens()
    next(tokens)
    handle.cancel()
    rest = list(tokens)
    result = handle.result()
    assert result.finish_reasons == ["cancelled"]
    assert len(result.tokens[0]) == len(rest) + 1 < 64
    handle.cancel()
    assert held_slots(pipe) == (0, 0, 0)


def test_cancel_before_the_first_token_returns_an_empty_answer(zoo, prompt_of):
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_NUM_SEQS=1, SCHEDULER="fcfs", **SMALL) as pipe:
        first = pipe.submit("hello", max_new_tokens=60, ignore_eos=True)
        waiting = pipe.submit(np.array(prompt_of(90)), max_new_tokens=60)
        waiting.cancel()
        assert waiting.result().tokens == [[]]
        assert waiting.finish_reason == "cancelled"
        assert len(first.result().tokens[0]) == 60


def test_a_dropped_handle_cancels_its_request(pipe):
    pipe.submit("hello", max_new_tokens=64, ignore_eos=True)
    gc.collect()
    for _ in range(200):
        if held_slots(pipe)[1] == 0:
            break
        time.sleep(0.01)
    assert held_slots(pipe) == (0, 0, 0)


def test_a_deadline_gives_the_reason_deadline(pipe):
    late = pipe.submit("hello", max_new_tokens=64, ignore_eos=True, deadline_ms=0.01)
    result = late.result()
    assert result.finish_reasons == ["deadline"]
    assert len(result.tokens[0]) < 64
    assert pipe.submit("hello", max_new_tokens=4, ignore_eos=True, deadline_ms=60_000).result().finish_reasons == [
        "length"
    ]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"deadline_ms": 0}, "deadline_ms=0: must be milliseconds"),
        ({"deadline_ms": "soon"}, "deadline_ms='soon'"),
        ({"priority": "high"}, "priority='high': must be a whole number"),
        ({"overflow": "wrap"}, "overflow='wrap': must be one of stop, truncate_middle, shift"),
        ({"max_tokens": 5}, "unknown option 'max_tokens'"),
    ],
)
def test_bad_options_of_submit_are_refused(pipe, options, word):
    with pytest.raises(GenerationConfigError) as error:
        pipe.submit("hello", **options)
    assert word in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises((GenerationConfigError, PromptError)):
        pipe.submit(["a", "b"])
    assert held_slots(pipe) == (0, 0, 0)


def test_a_full_queue_raises_busy_error(zoo):
    with StaticLLMPipeline(zoo / "llama", "CPU", MAX_WAITING=1, MAX_NUM_SEQS=1, SCHEDULER="fcfs", **SMALL) as pipe:
        running = pipe.submit("hello", max_new_tokens=64, ignore_eos=True)
        next(running.tokens())
        waiting = pipe.submit("hello", max_new_tokens=2, ignore_eos=True)
        with pytest.raises(BusyError, match="1 requests wait, MAX_WAITING is 1"):
            for _ in range(5):
                pipe.submit("hello", max_new_tokens=2)
        assert len(running.result().tokens[0]) == 64
        assert len(waiting.result().tokens[0]) == 2


def test_callbacks_run_in_threads_of_their_own(pipe):
    seen, threads = [], set()

    def callback(text):
        threads.add(threading.current_thread().name)
        seen.append(text)

    handle = pipe.submit("hello", max_new_tokens=8, ignore_eos=True, callback=callback)
    assert handle.result() == "".join(seen)
    assert threads == {"staticllm-callback"}


def test_a_failing_callback_ends_only_its_request(pipe):
    def callback(text):
        raise ZeroDivisionError("mine")

    bad = pipe.submit("hello", max_new_tokens=64, ignore_eos=True, callback=callback)
    good = pipe.submit("hello", max_new_tokens=8, ignore_eos=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        bad.result()
    assert len(good.result().tokens[0]) == 8
    assert held_slots(pipe) == (0, 0, 0)


def test_a_slow_callback_does_not_delay_other_requests(pipe):
    may_go_on = threading.Event()

    def callback(text):
        assert may_go_on.wait(60), "the other request waits for this callback"

    slow = pipe.submit("hello", max_new_tokens=30, ignore_eos=True, callback=callback)
    pipe.generate("good morning", max_new_tokens=10, ignore_eos=True)
    may_go_on.set()
    assert len(slow.result().tokens[0]) == 30


def test_async_for_leaves_the_event_loop_responsive(pipe):
    async def read(text):
        return "".join([piece async for piece in pipe.submit(text, max_new_tokens=10, ignore_eos=True)])

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        answers = await asyncio.gather(*(read(text) for text in ("hello", "good morning", "hello")))
        ticking.cancel()
        return answers, ticks

    answers, ticks = asyncio.run(main())
    assert answers == [
        str(pipe.generate(t, max_new_tokens=10, ignore_eos=True)) for t in ("hello", "good morning", "hello")
    ]
    assert ticks > 10, "the event loop stood still"


def test_leaving_an_async_loop_cancels_the_request(pipe):
    async def first():
        async for piece in pipe.submit("hello", max_new_tokens=64, ignore_eos=True):
            return piece
        return None

    assert asyncio.run(first())
    gc.collect()
    pipe.generate("hello", max_new_tokens=1)
    assert held_slots(pipe) == (0, 0, 0)


def test_a_chat_and_other_requests_run_together(pipe):
    pipe.start_chat()
    beside = pipe.submit("hello", max_new_tokens=40, ignore_eos=True)
    first = pipe.generate("good morning", max_new_tokens=4, ignore_eos=True)
    second = pipe.generate("and you?", max_new_tokens=4, ignore_eos=True)
    pipe.finish_chat()
    assert second.perf_metrics.get_num_cached_tokens() > 0
    assert len(first.tokens[0]) == 4
    assert len(beside.result().tokens[0]) == 40


def test_a_pipeline_runs_a_policy_of_the_user(zoo):
    class LastComeFirstServed:
        def plan(self, view):
            newest = max([*view.waiting, *view.prefilling], key=lambda request: request.arrival, default=None)
            if newest is not None and view.free_slots > 200:
                return Plan(prefill=((newest.id, min(16, newest.num_left)),))
            swap_in = view.swapped[: view.free_seqs]
            return Plan(decode=tuple(r.id for r in (*view.running, *swap_in)), swap_in=tuple(r.id for r in swap_in))

    with (
        StaticLLMPipeline(zoo / "llama", "CPU", scheduler=LastComeFirstServed(), **SMALL) as pipe,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        results = pipe.generate(["hello", "good morning", "hello"], max_new_tokens=6, ignore_eos=True)
    assert results.texts[0] == results.texts[2]
    with pytest.raises(staticllm.ConfigError, match="must be one of dynamic"):
        StaticLLMPipeline(zoo / "llama", "CPU", scheduler="fifo")


# -- ends


def test_closing_ends_threads_and_requests(zoo):
    before = {*threading.enumerate()}
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", **SMALL)
    running = pipe.submit("hello", max_new_tokens=64, ignore_eos=True)
    next(running.tokens())
    pipe.close()
    assert running.result().finish_reasons[0] in ("cancelled", "length")
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert left <= {"staticllm-long-call"}  # a compiler that runs cannot be ended
    with pytest.raises(ClosedError, match="the pipeline is closed"):
        pipe.generate("hello")
    pipe.close()


def test_draining_waits_for_the_answers(zoo):
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", **SMALL)
    handles = [pipe.submit("hello", max_new_tokens=30, ignore_eos=True) for _ in range(5)]
    pipe.close(drain=True)
    assert [handle.finish_reason or handle.result().finish_reasons[0] for handle in handles] == ["length"] * 5


def test_a_dropped_pipeline_ends_its_thread(zoo):
    before = {*threading.enumerate()}  # some of others may end meanwhile
    pipe = StaticLLMPipeline(zoo / "llama", "CPU", **SMALL)
    pipe.generate("hello", max_new_tokens=2)
    assert pipe.wait_until_complete(60)
    assert [thread.name for thread in {*threading.enumerate()} - before] == ["staticllm-engine"]
    del pipe
    gc.collect()
    assert not {*threading.enumerate()} - before


# -- isolation and leaks


@pytest.fixture(scope="module")
def solo_tokens(pipe, prompt_of):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((2, 11, 30, 64, 90, 17))]
    prompts += [[*prompts[3][:40], *prompt_of(9, 7)], [*prompts[3][:40], *prompt_of(20, 8)]]
    return [(prompt, tokens_of(pipe, prompt, 24)) for prompt in prompts]


schedules = st.lists(
    st.tuples(st.integers(0, 7), st.integers(1, 24), st.sampled_from([None, None, None, 1, 5]), st.booleans()),
    min_size=2,
    max_size=10,
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_shared_steps_give_the_tokens_of_single_runs(pipe, solo_tokens, schedule):
    """Up to ten requests with common prefixes share four places, so that some are swapped out; some are cancelled."""
    handles = []
    for which, count, cancel_after, pauses in schedule:
        prompt, answer = solo_tokens[which]
        handle = pipe.submit(np.array(prompt), max_new_tokens=count, ignore_eos=True)
        handles.append((handle, answer[:count], cancel_after))
        if pauses:
            next(handles[0][0].tokens(), None)
    for handle, _, cancel_after in handles:
        if cancel_after is not None:
            tokens = handle.tokens()
            for _ in range(cancel_after):
                next(tokens, None)
            handle.cancel()
    for handle, answer, cancel_after in handles:
        tokens = handle.result().tokens[0]
        assert tokens == answer[: len(tokens)]
        assert cancel_after is not None or len(tokens) == len(answer)
    assert held_slots(pipe) == (0, 0, 0)
