"""Tests draft models on the fake device: whatever they guess, answers are the same, and their KV slots follow the answers."""

import warnings
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.engine_schedules import HOSTILE, MASKS, Disturbed, Schedule
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.core import Variant
from staticllm.pipelines.engine.request import TokenOutput
from staticllm.pipelines.engine.speculation import draft_planner
from staticllm.pipelines.engine.speculation.draft_model import MAX_FAILURES, DraftModel
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import (
    FAKE_VARIANTS,
    VOCAB_SIZE,
    assert_empty,
    fake_answer,
    fake_engine,
    fake_next_token,
    fake_request,
    fake_runner,
    run_to_end,
)

ALWAYS = {"MAX_CREDIT": 1e9, "ALLOWANCE": 1e9, "MIN_GAIN": 0.0, "LEAST_CHANCE": 0.0, "CATCH_UP_SHARE": 1e9}
"""Constants with which every draft is checked, whether it pays or not."""


def draft_model_for(engine, masks=None, is_right=lambda tokens: True, variants=FAKE_VARIANTS, seconds=5e-4):
    """Give the engine a draft model that answers as the fake model does, where ``is_right`` says so, in ``seconds`` per call."""
    kinds = masks or (*MASKS[:1],)

    def next_token(tokens):
        return (fake_next_token(tokens, kinds) + (0 if is_right(tokens) else 1)) % VOCAB_SIZE

    runner = fake_runner(variants, kinds, next_token=next_token)
    for program in runner.programs.values():
        run = program.run
        program.run = lambda meanwhile=None, run=run: min(run(meanwhile), seconds)
    model = DraftModel(runner, VOCAB_SIZE)
    engine.core.device.draft_planner.use_model(model)
    return model


def num_slots(model):
    return model.runner.cache.slots.num_used


def modelled(prompt, num_new, **options):
    return fake_request(prompt, num_new, drafts=DraftParams(uses_model=True, **options.pop("params", {})), **options)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("period", [0, 1, 2, 5])
def test_answers_are_those_without_a_draft_model(name, period):
    """Every token of the draft model is right, none is, or some are."""
    engine = fake_engine(make_policy(name), 3)
    model = draft_model_for(engine, is_right=lambda tokens: not period or len(tokens) % period)
    requests = [modelled(range(50 * i, 50 * i + 4 + 3 * i), 20 + i) for i in range(5)]
    expected = [fake_answer(request.tokens, 20 + i) for i, request in enumerate(requests)]
    with patch.multiple(draft_planner, **ALWAYS):
        run_to_end(engine, requests)
    assert [request.tokens for request in requests] == expected
    stats = engine.core.profiler.stats()
    assert stats.drafted_tokens > 0
    assert (stats.accepted_tokens == 0) == (period == 1)
    assert (stats.accepted_tokens == stats.drafted_tokens) == (period == 0)
    assert_empty(engine)
    assert num_slots(model) == 0


prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 25), st.integers(0, 40))
schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(prompts, min_size=1, max_size=6),
        "cancels": st.sets(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=3),
        "moves": st.lists(st.sampled_from(["swap_out", "preempt", "skip", None, None, *HOSTILE]), max_size=8),
        "max_num_seqs": st.integers(1, 4),
        "poisoned": st.sets(st.integers(0, 5), max_size=1),
        "drafters": st.lists(st.sampled_from(["none", "lookup", "model"]), min_size=6, max_size=6),
        "period": st.integers(0, 4),
        "is_tight": st.booleans(),
    }
)
TIGHT = [Variant(rows, kv_len, rows) for rows in (1, 2, 4) for kv_len in (32, 64)] + [Variant(8, 64), Variant(8, 0)]


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
@pytest.mark.filterwarnings("ignore:the scheduler Disturbed is replaced by fcfs")
def test_any_schedule_with_a_draft_model_gives_each_request_its_own_answer(schedule):
    """The draft model's own arena may be too small for all requests; sequences are dropped, and run again."""
    engine = fake_engine(Disturbed(schedule["policy"], schedule["moves"]), schedule["max_num_seqs"], masks=MASKS)
    variants, period = TIGHT if schedule["is_tight"] else FAKE_VARIANTS, schedule["period"]
    model = draft_model_for(engine, MASKS, lambda tokens: not period or len(tokens) % period, variants)
    run = Schedule(schedule)
    with patch.multiple(draft_planner, **ALWAYS):
        for step in range(3000):
            run.arrive(engine, step)
            engine.steps.step()
            if step > 60 and engine.is_idle:
                break
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent=False)
    assert num_slots(model) == 0


def test_requests_share_the_calls_of_the_draft_model():
    engine = fake_engine(make_policy("fcfs"), 4)
    model = draft_model_for(engine)
    requests = [modelled(range(20 * i, 20 * i + 9), 30) for i in range(4)]
    with patch.multiple(draft_planner, **ALWAYS):
        run_to_end(engine, requests)
    calls = sum(program.num_runs for program in model.runner.programs.values())
    drafted = engine.core.profiler.stats().drafted_tokens
    assert calls < drafted * 0.75, "fewer calls than drafted tokens"


def test_rejected_tokens_are_cut_and_accepted_ones_not_computed_again():
    engine = fake_engine(make_policy("fcfs"), 1)
    model = draft_model_for(engine, is_right=lambda tokens: len(tokens) % 4)
    request = modelled(range(12), 40)
    counted = []
    commit = model.runner.cache.commit

    def counting(step, buffers, accepted=None):
        counted.extend(len(segment.tokens) for segment in step.segments)
        return commit(step, buffers, accepted)

    model.runner.cache.commit = counting
    with patch.multiple(draft_planner, **ALWAYS):
        run_to_end(engine, [request])
    stats = engine.core.profiler.stats()
    assert request.tokens == fake_answer(range(12), 40)
    rejected = stats.drafted_tokens - stats.accepted_tokens
    assert sum(counted) <= 12 + 40 + rejected, "each token once, and those that were rejected"


def test_a_draft_ends_where_the_model_is_unsure():
    """The fake logits are 1 for the chosen token and -1 for 996 others: a probability of 0.0074."""
    for confidence, is_drafting in ((0.005, True), (0.01, False)):
        engine = fake_engine(make_policy("fcfs"), 1)
        draft_model_for(engine, is_right=lambda tokens: True)
        runner = engine.core.device.draft_planner.model.runner
        for program in runner.programs.values():
            program._next_token = None  # its logits are then 1 and -1
        request = modelled(range(12), 20, params={"confidence": confidence})
        with patch.multiple(draft_planner, **ALWAYS):
            run_to_end(engine, [request])
        assert request.tokens == fake_answer(range(12), 20)
        assert bool(engine.core.profiler.stats().drafted_tokens) == is_drafting


def test_a_failing_draft_model_ends_no_request():
    engine = fake_engine(make_policy("fcfs"), 2)
    model = draft_model_for(engine)

    def fail(meanwhile=None):
        raise RuntimeError("the device is gone")

    for program in model.runner.programs.values():
        program.run = fail
    requests = [modelled(range(9), 20), modelled(range(30, 40), 20)]
    with patch.multiple(draft_planner, **ALWAYS), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_to_end(engine, requests)
    assert [request.tokens for request in requests] == [fake_answer(range(9), 20), fake_answer(range(30, 40), 20)]
    assert [str(warning.message) for warning in caught] == ["the draft model is not used any more: the device is gone"]
    assert model.num_failures == MAX_FAILURES


def test_a_draft_model_that_is_as_slow_as_the_model_is_hardly_asked():
    """Nine ms for a drafted token, which saves nine ms if it is right: the engine finds out from the costs alone."""
    variants = [*(Variant(rows, 512, rows) for rows in (1, 2, 4)), Variant(64, 512), Variant(64, 0)]
    engine = fake_engine(make_policy("fcfs"), 1, variants, max_seq_len=512)
    model = draft_model_for(engine, variants=variants, seconds=9e-3)
    request = modelled(range(9), 400)
    run_to_end(engine, [request])
    calls = sum(program.num_runs for program in model.runner.programs.values())
    spent = engine.core.profiler.stats().device_seconds + 9e-3 * calls
    assert (
        spent <= 1.1 * 400 * 9e-3
    )  # quietly 1.03; the host's real time counts, and a busy machine makes steps look longer
    assert request.tokens == fake_answer(range(9), 400)


def test_a_cheap_draft_model_pays():
    engine = fake_engine(make_policy("fcfs"), 1)
    model = draft_model_for(engine, seconds=5e-4)
    request = modelled(range(9), 50)
    run_to_end(engine, [request])
    stats = engine.core.profiler.stats()
    assert stats.num_steps < 30
    assert stats.accepted_tokens == stats.drafted_tokens > 20
    assert stats.draft_seconds > 0
    assert stats.draft_seconds == pytest.approx(model.seconds)
    outputs = [output for output in outputs_of(request) if isinstance(output, TokenOutput)]
    assert sum(output.num_accepted for output in outputs) == stats.accepted_tokens


def test_a_stop_token_ends_a_draft():
    answer = fake_answer(range(9), 12)
    engine = fake_engine(make_policy("fcfs"), 1)
    draft_model_for(engine)
    request = modelled(range(9), 40, stop_token_ids=frozenset(answer[-1:]))
    with patch.multiple(draft_planner, **ALWAYS):
        run_to_end(engine, [request])
    assert request.tokens == answer[: answer.index(answer[-1], 9) + 1]
    stats = engine.core.profiler.stats()
    assert stats.drafted_tokens == stats.accepted_tokens
