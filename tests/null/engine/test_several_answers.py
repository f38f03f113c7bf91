"""Tests several answers to one prompt: the prompt runs once, and each answer is that of a single request."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.core import FinishReason, Variant
from staticllm.errors import NumericalError, StaticLLMError
from staticllm.pipelines.engine.request import EngineRequest, Finished, TokenOutput, output_from_dict, output_to_dict
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import assert_empty, fake_engine, fake_request, run_to_end, run_until

SAMPLING = SamplingParams(do_sample=True, temperature=0.4, rng_seed=1)


def new_engine(policy, is_recurrent):
    if not is_recurrent:
        return fake_engine(make_policy(policy))
    variants = [Variant(rows, kv_len) for rows in (1, 4, 16) for kv_len in (0, 64) if rows > 1 or kv_len]
    return fake_engine(make_policy(policy), variants=variants, is_recurrent=True)


def answers_of(request):
    """Return the tokens and the end of each answer."""
    count = request.request.num_sequences
    tokens, ends = [[] for _ in range(count)], [None] * count
    for output in outputs_of(request):
        if isinstance(output, TokenOutput):
            assert ends[output.index] is None, "a token after the end of its answer"
            tokens[output.index].append(output.id)
        else:
            ends[output.index] = output
    return tokens, ends


def alone(prompt, num_new, seed, **options):
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(prompt, num_new, sampling=SAMPLING, seed=seed, **options)
    run_to_end(engine, [request])
    return answers_of(request)[0][0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("is_recurrent", [False, True])
def test_answers_are_those_of_single_requests(policy, is_recurrent):
    engine = new_engine(policy, is_recurrent)
    several = fake_request(range(20), 8, sampling=SAMPLING, seed=5, num_sequences=6)
    other = fake_request(range(300, 310), 12)
    run_to_end(engine, [several, other])
    tokens, ends = answers_of(several)
    single = new_engine("fcfs", is_recurrent)
    for index in range(6):
        request = fake_request(range(20), 8, sampling=SAMPLING, seed=5 + index)
        run_to_end(single, [request])
        assert tokens[index] == answers_of(request)[0][0], index
    assert len({tuple(answer) for answer in tokens}) > 1, "the seeds differ"
    assert [end.reason for end in ends] == ["length"] * 6
    assert_empty(engine)


def test_the_prompt_runs_once_and_its_slots_are_shared():
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(range(24), 6, sampling=SAMPLING, num_sequences=4)
    run_until(engine, lambda: len(request.sequences) >= 4, [request])
    assert engine.runner.cache.slots.num_used == 24
    assert engine.runner.cache.slots.num_shared == 24
    run_to_end(engine, [])
    stats = engine.core.profiler.stats()
    assert stats.prefill_rows_per_second > 0
    assert stats.num_requests == 4
    assert stats.num_tokens == 24
    assert_empty(engine)


@settings(deadline=None, max_examples=examples(60))
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(1, 5)), min_size=1, max_size=5),
    max_num_seqs=st.integers(1, 4),
    host_kv_slots=st.sampled_from([0, 40, 256]),
    gap_ms=st.sampled_from([None, 0.01]),
    cancelled=st.integers(0, 6),
    step=st.integers(1, 40),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_any_schedule_gives_every_answer_its_own_tokens(
    requests, max_num_seqs, host_kv_slots, gap_ms, cancelled, step, policy
):
    engine = fake_engine(make_policy(policy), max_num_seqs, host_kv_slots=host_kv_slots, gap_ms=gap_ms)
    asked = [
        fake_request(range(9 * i, 9 * i + length), num_new, sampling=SAMPLING, seed=100 * i, num_sequences=count)
        for i, (length, num_new, count) in enumerate(requests)
    ]
    engine.steps.add(asked)
    for _ in range(step):
        engine.steps.step()
    if cancelled < len(asked):
        asked[cancelled].cancel()
    run_to_end(engine, [])
    for i, ((length, num_new, _), request) in enumerate(zip(requests, asked, strict=True)):
        for index, (tokens, end) in enumerate(zip(*answers_of(request), strict=True)):
            expected = alone(range(9 * i, 9 * i + length), num_new, 100 * i + index)
            assert end.error is None, (i, index)
            assert tokens == expected[: len(tokens)], (i, index)
            assert len(tokens) == num_new or (i == cancelled and end.reason == "cancelled")
    assert_empty(engine)


def test_one_answer_can_be_cancelled_alone():
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(range(10), 20, sampling=SAMPLING, num_sequences=3)
    run_until(engine, lambda: all(state.num_generated > 2 for state in request.sequences), [request])
    engine.cancel(request.id, 1)
    run_to_end(engine, [])
    tokens, ends = answers_of(request)
    assert [end.reason for end in ends] == ["length", "cancelled", "length"]
    assert len(tokens[0]) == len(tokens[2]) == 20
    assert len(tokens[1]) < 20
    engine.cancel(request.id)  # no effect, because the request has ended
    assert_empty(engine)


def test_a_request_that_never_begins_ends_all_its_answers():
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(range(10), 20, num_sequences=3, deadline=0.0)
    run_to_end(engine, [request])
    assert [(end.index, end.reason) for end in outputs_of(request)] == [(i, "deadline") for i in range(3)]


CHILD = """
import json, sys
from staticllm.pipelines.engine.request import Finished
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import VOCAB_SIZE, fake_engine, run_to_end
state = RequestState(EngineRequest.from_dict(json.loads(sys.stdin.read())), VOCAB_SIZE)
run_to_end(fake_engine(make_policy("fcfs")), [state])
while not isinstance(output := state.queue.get(0), Finished):
    print(output.id)
"""


def test_a_request_survives_a_json_round_trip():
    request = EngineRequest(
        (1, 2, 3), SAMPLING, seed=9, max_new_tokens=7, stop_token_ids=frozenset({996}), overflow="shift",
        deadline=time.perf_counter() + 60,
    )  # fmt: skip
    text = json.dumps(request.to_dict())
    back = EngineRequest.from_dict(json.loads(text))
    assert back.deadline == pytest.approx(request.deadline, abs=1)
    assert back.arrival == pytest.approx(request.arrival, abs=1)
    assert replace(back, id=request.id, deadline=request.deadline, arrival=request.arrival) == request
    child = subprocess.run([sys.executable, "-c", CHILD], input=text, capture_output=True, text=True, check=True)
    here = fake_request((1, 2, 3), 7, sampling=SAMPLING, seed=9)
    run_to_end(fake_engine(make_policy("fcfs")), [here])
    assert [int(line) for line in child.stdout.split()] == answers_of(here)[0][0]


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput(7, -0.5, 12.25, 0.001, 2, 0.5, 3),
        Finished(FinishReason.STOP, index=1),
        Finished(FinishReason.ERROR, NumericalError("not finite")),
        Finished(FinishReason.ERROR, ValueError("of another library")),
    ],
)
def test_an_output_survives_a_json_round_trip(output):
    back = output_from_dict(json.loads(json.dumps(output_to_dict(output))))
    if isinstance(output, TokenOutput) or output.error is None:
        assert back == output
    else:
        assert (back.reason, back.index, str(back.error)) == (output.reason, output.index, str(output.error))
        assert type(back.error) is (NumericalError if isinstance(output.error, NumericalError) else StaticLLMError)
