"""Tests beam searches in the engine on the fake device: whatever runs beside them, they find what a search alone finds."""

import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.beam_steps import advanced, beam_request
from support.engine.engine_schedules import HOSTILE, MASKS, Disturbed, Schedule, assert_slots_counted
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.errors import ClosedError, NumericalError
from staticllm.pipelines.engine.beams import BeamRequest, _ending_of
from staticllm.pipelines.engine.request import EngineRequest, Finished
from staticllm.pipelines.generation.beam_search import BeamLimits, BeamParams, BeamSearch
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import FAKE_VARIANTS, POISON, assert_empty, fake_engine, fake_request, fake_runner, run_to_end
from staticllm.testing.device import VOCAB_SIZE, fake_next_token


def logits_after(tokens, masks=MASKS):
    """Return the logits of the fake model."""
    line = np.full(VOCAB_SIZE, -1.0, np.float32)
    line[fake_next_token(tokens, masks)] = 1.0
    return line


def expected(request, masks=MASKS):
    """Return the answers of a search without an engine: the best ``num_sequences`` lists of tokens."""
    limits = BeamLimits(request.max_new_tokens, request.stop_token_ids)
    search, beams = BeamSearch(request.beams, request.prompt, limits), [list(request.prompt)]
    while beams:
        steps = advanced(search, [logits_after(beam, masks) for beam in beams])
        beams = [[*beams[step.parent], step.token] for step in steps]
    return [list(hypothesis.tokens) for hypothesis in search.hypotheses()][: request.num_sequences]


def answers_of(request):
    """Return the tokens and the end of each answer."""
    found, ends = {}, {}
    for output in outputs_of(request):
        if isinstance(output, Finished):
            ends[output.index] = output
        else:
            found.setdefault(output.index, []).append(output.id)
    assert sorted(ends) == list(range(request.request.num_sequences))
    return [found.get(index, []) for index in range(len(ends))], ends


searches = st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(2, 6), st.integers(0, 20))
schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 12), st.integers(0, 40)), max_size=4
        ),
        "searches": st.lists(searches, min_size=1, max_size=3),
        "cancels": st.sets(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=2),
        "search_cancels": st.dictionaries(st.integers(0, 2), st.integers(0, 40), max_size=1),
        "moves": st.lists(st.sampled_from(["swap_out", "preempt", "skip", None, None, *HOSTILE]), max_size=12),
        "max_num_seqs": st.integers(1, 6),
        "host_kv_slots": st.sampled_from([0, 40, 256]),
        "gap_ms": st.sampled_from([None, 0.01, 1.0]),
        "is_packable": st.booleans(),
        "poisoned": st.just(()),
        "switches": st.sets(st.integers(1, 60), max_size=2),
        "num_blocks": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
def test_any_schedule_gives_each_search_its_own_answers(schedule):
    """Schedules include fewer places than beams, swaps, preemptions, broken policies, other runners and ordinary requests."""
    variants = FAKE_VARIANTS if schedule["is_packable"] else [v for v in FAKE_VARIANTS if v.sequences == 1]
    engine = fake_engine(
        Disturbed(schedule["policy"], schedule["moves"]),
        schedule["max_num_seqs"],
        variants,
        host_kv_slots=schedule["host_kv_slots"],
        gap_ms=schedule["gap_ms"],
        masks=MASKS,
        num_blocks=schedule["num_blocks"],
        starts_thread=False,
    )
    run, cancels = Schedule(schedule), schedule["search_cancels"]
    found = [
        (arrival, beam_request([500 + 9 * index + i for i in range(length)], num_new, num_beams))
        for index, (length, num_new, num_beams, arrival) in enumerate(schedule["searches"])
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the scheduler Disturbed is replaced by fcfs")
        for step in range(3000):
            run.arrive(engine, step)
            engine.steps.add([request for arrival, request in found if arrival == step])
            for index, (arrival, request) in enumerate(found):
                if cancels.get(index) == step and arrival <= step:
                    request.cancel()
            if step in schedule["switches"]:
                engine.switch(
                    fake_runner(variants, MASKS, num_blocks=schedule["num_blocks"]), engine.core.device.options
                )
            engine.steps.step()
            assert_slots_counted(engine)
            if step > 60 and engine.is_idle:
                break
    for index, (_, request) in enumerate(found):
        answers, ends = answers_of(request)
        assert all(end.error is None for end in ends.values()), ends
        if index in cancels and ends[0].reason == "cancelled":
            continue
        best = expected(request.request)
        assert answers[: len(best)] == best
    assert len(engine.core.device.kv_manager.idle) == 0
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent=False)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_beams_of_one_search_share_calls(name):
    engine = fake_engine(make_policy(name), masks=MASKS, starts_thread=False)
    request = beam_request(range(20), 10, num_beams=4, num_sequences=4)
    run_to_end(engine, [request])
    assert answers_of(request)[0] == expected(request.request)
    assert engine.stats().num_steps <= 2 + 9  # the prompt in at most two calls, then one call per token
    assert engine.stats().num_requests == 1


def test_a_request_beside_a_search_loses_nothing():
    engine = fake_engine(make_policy("dynamic"), max_num_seqs=4, masks=MASKS, starts_thread=False)
    search, other = beam_request(range(20), 10), fake_request(range(100, 130), 20)
    run_to_end(engine, [search, other])
    assert answers_of(search)[0] == expected(search.request)
    assert len(outputs_of(other)) == 21


def test_groups_and_the_next_turn_of_a_conversation():
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    request = beam_request(range(20), 6, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
    run_to_end(engine, [request])
    (best, other), _ = answers_of(request)
    assert [best, other] == expected(request.request)
    follow = fake_request([*range(20), *best, 5, 6], 3)
    run_to_end(engine, [follow])
    assert follow.num_cached >= 20 + len(best) - 1


def test_the_progress_of_a_search_is_that_of_one_request():
    """Its beams, and the sequences that clients feed, are no requests of their own."""
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    request = beam_request(range(10), 8)
    engine.steps.add([request])
    for _ in range(6):
        engine.steps.step()
        assert [each.id for each in engine.progress().requests] == [request.request.id]
    run_to_end(engine)
    assert not engine.progress().requests


def test_a_search_whose_numbers_are_not_finite_ends_alone():
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    bad, good = beam_request([1, 2, POISON], 5), beam_request([1, 2, 3], 5)
    run_to_end(engine, [bad, good])
    _, ends = answers_of(bad)
    assert all(isinstance(end.error, NumericalError) for end in ends.values())
    assert answers_of(good)[0] == expected(good.request)
    assert_empty(engine)


def test_a_deadline_gives_the_best_beams_so_far():
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    request = beam_request(range(10), 40)
    engine.steps.add([request])
    for _ in range(6):
        engine.steps.step()
    request.cancel()
    run_to_end(engine)
    answers, ends = answers_of(request)
    assert {str(end.reason) for end in ends.values()} == {"cancelled"}
    assert all(3 <= len(answer) <= 6 for answer in answers)
    assert_empty(engine)


def test_closing_the_engine_ends_a_search():
    engine = fake_engine(make_policy("dynamic"), masks=MASKS)
    queue = engine.submit(beam_request(range(10), 1000).request)
    engine.close()
    ends = [queue.get(5), queue.get(5)]
    assert [str(end.reason) for end in ends] == ["cancelled"] * 2
    with pytest.raises(ClosedError):
        engine.submit(beam_request(range(10), 3).request)


def test_an_exception_in_the_engine_ends_a_search(monkeypatch):
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    request = beam_request(range(10), 40)
    engine.steps.add([request])
    for _ in range(4):
        engine.steps.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.calls, "count_call", lambda *_: 1 // 0)
        engine.steps.step()
    _, ends = answers_of(request)
    assert all(end.error is not None for end in ends.values())
    again = beam_request(range(10), 5)
    run_to_end(engine, [again])
    assert answers_of(again)[0] == expected(again.request)
    assert_empty(engine)


def test_a_request_survives_json():
    request = beam_request(range(10), 5, stop_strings=("a", "b")).request
    again = EngineRequest.from_dict(request.to_dict())
    assert again.beams == request.beams
    assert again.stop_strings == request.stop_strings


@pytest.mark.parametrize("length_penalty", [1000.0, -1000.0])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_scores_beyond_the_range_of_floats_end_no_other_request(length_penalty, is_cancelled):
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    params = BeamParams(3, length_penalty=length_penalty)
    search = BeamRequest(EngineRequest(tuple(range(20)), max_new_tokens=9, beams=params), VOCAB_SIZE)
    other = fake_request(range(100, 130), 20)
    engine.steps.add([search, other])
    for _ in range(6):
        engine.steps.step()
    if is_cancelled:
        search.cancel()
    run_to_end(engine)
    _, ends = answers_of(search)
    assert ends[0].error is None
    assert len(outputs_of(other)) == 21
    assert_empty(engine)


def test_an_error_in_the_end_of_a_search_ends_it_alone(monkeypatch):
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    search, other = beam_request(range(20), 9), fake_request(range(100, 130), 20)
    monkeypatch.setattr(BeamSearch, "hypotheses", lambda _: 1 // 0)
    run_to_end(engine, [search, other])
    assert all(end.error is not None for end in answers_of(search)[1].values())
    assert len(outputs_of(other)) == 21
    assert_empty(engine)


def test_an_error_in_the_end_of_a_cancelled_search_leaves_a_usable_engine(monkeypatch):
    engine = fake_engine(make_policy("dynamic"), masks=MASKS, starts_thread=False)
    search, other = beam_request(range(20), 9), fake_request(range(100, 130), 20)
    engine.steps.add([search, other])
    for _ in range(6):
        engine.steps.step()
    search.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(BeamSearch, "hypotheses", lambda _: 1 // 0)
        run_to_end(engine)
    assert all(end.error is not None for end in answers_of(search)[1].values())
    assert isinstance(outputs_of(other)[-1], Finished)
    run_to_end(engine, [again := fake_request(range(50), 3)])
    assert len(outputs_of(again)) == 4
    assert_empty(engine)


@pytest.mark.parametrize("stop", ["\u4f60\u597d", "ab", "\U0001f600"])
@pytest.mark.parametrize("before", ["", "x", "\u4f60\u4f60\u4f60", "\U0001f642x"])
def test_a_stop_string_is_found_whose_characters_are_several_tokens(stop, before):
    """Tokens are bytes here, and every second one has no text at all, as special tokens have none."""

    def decode(tokens):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    has_ended = _ending_of(beam_request(range(4), 99, stop_strings=(stop,)).request, decode)
    tokens = [token for byte in (before + stop).encode() for token in (300, byte)]
    assert [has_ended(tokens[:count]) for count in range(1, len(tokens) + 1)] == [False] * (len(tokens) - 1) + [True]
