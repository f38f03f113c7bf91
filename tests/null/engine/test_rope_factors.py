"""Tests models whose RoPE factors depend on the length of a text, on the fake device: answers are those of one call over all.

A token of the fake model that was computed with other factors is another token, so every key of the wrong length shows.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.beam_steps import advanced, beam_request
from support.engine.engine_drafters import Guesser, always_drafting
from support.engine.engine_schedules import Disturbed
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.core import Variant
from staticllm.errors import SnapshotError
from staticllm.kvcache.sequence import Conditions
from staticllm.kvcache.snapshot import load, save
from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.engine.speculation.draft_model import DraftModel
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.generation.beam_search import BeamLimits, BeamSearch
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.profiling.trace import recording
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
    run_until,
)

ALONE = tuple(variant for variant in FAKE_VARIANTS if variant.sequences == 1 or variant.rows == 1)
LIMITS = st.lists(st.integers(1, 50), min_size=1, max_size=2, unique=True).map(lambda found: tuple(sorted(found)))


def right_answer(limits):
    return lambda tokens, limit: fake_answer(tokens, limit, rope_limits=limits)[len(tokens) :]


def new_request(family, length, num_new, count, is_drafted, limits):
    """Return a request; those of one family begin alike."""
    prompt = tuple(range(300 * family, 300 * family + length))
    asked = EngineRequest(
        prompt, num_sequences=count, max_new_tokens=num_new, drafts=DraftParams(max_tokens=4) if is_drafted else None
    )
    request = RequestState(asked, VOCAB_SIZE)
    if is_drafted:
        request.sequences[0].drafts.drafters.append(Guesser(right_answer(limits), lambda place: place % 5))
    return request


def answers_of(request):
    found = [[] for _ in range(request.request.num_sequences)]
    for output in outputs_of(request):
        if isinstance(output, TokenOutput):
            found[output.index].append(output.id)
        else:
            assert output.error is None, output.error
    return found


def expected_beams(request, limits):
    search = BeamSearch(request.beams, request.prompt, BeamLimits(request.max_new_tokens, request.stop_token_ids))
    beams = [list(request.prompt)]
    while beams:
        lines = []
        for beam in beams:
            line = np.full(VOCAB_SIZE, -1.0, np.float32)
            line[fake_next_token(beam, rope_limits=limits)] = 1.0
            lines.append(line)
        beams = [[*beams[step.parent], step.token] for step in advanced(search, lines)]
    return [list(hypothesis.tokens) for hypothesis in search.hypotheses()][: request.num_sequences]


prompts = st.tuples(st.integers(0, 1), st.integers(1, 50), st.integers(1, 14), st.integers(1, 3), st.booleans())
schedules = st.fixed_dictionaries(
    {
        "limits": LIMITS,
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(prompts, min_size=1, max_size=6),
        "searches": st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=1),
        "moves": st.lists(st.sampled_from([None, "swap_out", "preempt", "skip"]), max_size=20),
        "max_num_seqs": st.integers(1, 4),
        "host_kv_slots": st.sampled_from([0, 40, 256]),
        "is_packable": st.booleans(),
        "num_blocks": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
def test_any_schedule_gives_each_request_the_answer_of_one_call_over_its_text(schedule):
    """Bursts with common beginnings, drafts, several answers and beams, that cross limits and are swapped and preempted."""
    limits = schedule["limits"]
    engine = fake_engine(
        Disturbed(schedule["policy"], schedule["moves"]),
        schedule["max_num_seqs"],
        FAKE_VARIANTS if schedule["is_packable"] else ALONE,
        host_kv_slots=schedule["host_kv_slots"],
        is_packable=schedule["is_packable"],
        num_blocks=schedule["num_blocks"],
        rope_limits=limits,
    )
    requests = [new_request(*prompt, limits) for prompt in schedule["prompts"]]
    searches = [beam_request(range(length), num_new) for length, num_new in schedule["searches"]]
    with always_drafting():
        run_to_end(engine, [*requests, *searches])
    for request in requests:
        prompt = request.request.prompt
        answer = fake_answer(prompt, request.request.max_new_tokens, rope_limits=limits)[len(prompt) :]
        assert answers_of(request) == [answer] * request.request.num_sequences
    for search in searches:
        assert answers_of(search) == expected_beams(search.request, limits)
    assert_empty(engine)


@pytest.mark.parametrize("host_kv_slots", [0, 256])
def test_turns_of_a_conversation_across_a_limit_reuse_keys_of_the_same_factors_only(host_kv_slots):
    engine = fake_engine(make_policy("fcfs"), host_kv_slots=host_kv_slots, rope_limits=(30,))
    turns = [fake_request(range(length), 1) for length in (20, 26, 40, 44, 24)]
    for turn in turns:
        run_to_end(engine, [turn])
        assert turn.tokens == fake_answer(turn.request.prompt, 1, rope_limits=(30,))
    assert [turn.num_cached for turn in turns[:4]] == [0, 20, 0, 40]
    assert turns[4].num_cached == (23 if host_kv_slots else 0)


def test_an_answer_that_crosses_a_limit_is_computed_anew_once_and_says_so():
    engine = fake_engine(make_policy("fcfs"), rope_limits=(30,))
    request = fake_request(range(28), 8)
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [request])
    outputs = [output for output in outputs_of(request) if isinstance(output, TokenOutput)]
    assert request.tokens == fake_answer(range(28), 8, rope_limits=(30,))
    assert [output.num_recomputed for output in outputs] == [0, 0, 0, 30, 30, 30, 30, 30]
    assert [step.prefill_rows for step in trace.steps if step.prefill] == [16, 12, 16, 15]
    assert [step.preempted for step in trace.steps if step.preempted] == [(request.id,)]


@pytest.mark.parametrize("length", range(12, 21))
def test_beams_that_cross_a_limit_are_computed_anew(length):
    engine = fake_engine(make_policy("fcfs"), rope_limits=(20,))
    search = beam_request(range(length), 6)
    run_to_end(engine, [search])
    outputs = [output for output in outputs_of(search) if isinstance(output, TokenOutput)]
    found = [[output.id for output in outputs if output.index == index] for index in range(2)]
    assert found == expected_beams(search.request, (20,))
    assert {output.num_recomputed for output in outputs} == {20 if length > 15 else 0}


def test_a_prompt_that_waits_in_the_host_pool_is_computed_anew_when_its_first_token_crosses_a_limit():
    """Its keys never entered the arena, because another request decodes there."""
    engine = fake_engine(make_policy("prefill_first"), max_num_seqs=1, rope_limits=(12,))
    first, second = fake_request(range(300, 304), 7), fake_request(range(12), 6)
    run_until(engine, lambda: first.num_generated, [first])
    run_until(engine, lambda: second.num_generated, [second])
    assert second.state.kv.num_recomputed == 12
    run_to_end(engine)
    assert first.tokens == fake_answer(range(300, 304), 7, rope_limits=(12,))
    assert second.tokens == fake_answer(range(12), 6, rope_limits=(12,))
    assert_empty(engine)


def test_a_draft_model_computes_its_sequences_anew_when_they_cross_a_limit():
    runner = fake_runner(FAKE_VARIANTS, rope_limits=(24,))
    model = DraftModel(runner, VOCAB_SIZE)
    for length in (20, 23, 24, 25, 40, 22):
        state = new_request(0, length, 9, 1, True, (24,)).sequences[0]
        (draft,) = model.propose([(state, 4)])
        assert list(draft.tokens) == fake_answer(range(length), 4, rope_limits=(24,))[length:]
        model.forget(state.id)


def test_a_runner_without_an_engine_crosses_limits():
    runner = fake_runner([Variant(16, 0), Variant(16, 64), Variant(1, 64), Variant(2, 64, 2)], rope_limits=(18, 22))
    sequence, tokens = runner.cache.open(), list(range(17))
    token = int(runner.prefill(sequence, tokens).argmax())
    while len(tokens) < 26:
        assert token == fake_next_token(tokens, rope_limits=(18, 22))
        tokens.append(token)
        token = int(runner.decode(sequence, token).argmax())
    assert sequence.tokens == tokens
    assert sequence.conditions == Conditions(factors=2)


def test_a_snapshot_notes_the_factors_of_its_keys(tmp_path):
    runner = fake_runner([Variant(16, 0), Variant(16, 64), Variant(1, 64)], rope_limits=(18,))
    sequence = runner.cache.open()
    runner.prefill(sequence, list(range(20)))
    path = tmp_path / "kv"
    save(runner.cache.copy_out(sequence), path, {})
    assert load(path, {}, runner.cache.layout, 64).conditions == Conditions(factors=1)
    plain = fake_runner([Variant(16, 0), Variant(16, 64), Variant(1, 64)])
    with pytest.raises(
        SnapshotError, match="RoPE factors 1, the model takes 1 for its lengths: load it with a greater"
    ):
        load(path, {}, plain.cache.layout, 64)
