"""Tests drafts in the engine on the fake device: answers are those without drafts, and drafts never cost more than they may."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.engine_drafters import KINDS, Guesser, drafting_request
from support.engine.engine_schedules import HOSTILE, MASKS, Disturbed, Schedule
from support.engine.output_queues import outputs_of, reason_of
from support.quick import examples

from staticllm.core import Variant
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.profiling.trace import Trace, recording
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import FAKE_VARIANTS, assert_empty, fake_answer, fake_engine, fake_request, run_to_end

ALONE = (
    *(Variant(1, kv_len) for kv_len in (32, 64, 128)),
    *(Variant(rows, kv_len, 1, rows - 1) for rows in (2, 4, 8) for kv_len in (32, 64, 128)),
    *(Variant(16, kv_len) for kv_len in (0, 32, 64, 128)),
)
"""Variants of a model that cannot share calls, with logits after every row of a draft."""
LONG = (
    *(Variant(rows, kv_len, rows) for rows in (1, 2, 4, 8) for kv_len in (512, 4096)),
    *(Variant(64, kv_len) for kv_len in (0, 512, 4096)),
)

prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 25), st.integers(0, 40))
schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(prompts, min_size=1, max_size=7),
        "cancels": st.sets(st.tuples(st.integers(0, 6), st.integers(0, 60)), max_size=3),
        "moves": st.lists(st.sampled_from(["swap_out", "preempt", "skip", None, None, *HOSTILE]), max_size=12),
        "max_num_seqs": st.integers(1, 4),
        "host_kv_slots": st.sampled_from([0, 40, 256]),
        "gap_ms": st.sampled_from([None, 0.01, 1.0]),
        "poisoned": st.sets(st.integers(0, 6), max_size=1),
        "is_packable": st.booleans(),
        "drafters": st.lists(st.sampled_from(KINDS), min_size=7, max_size=7),
        "num_blocks": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
@pytest.mark.filterwarnings("ignore:the scheduler Disturbed is replaced by fcfs")
def test_any_schedule_with_drafts_gives_each_request_its_own_answer(schedule):
    """Right, wrong and mixed drafts, with swaps, time slices, preemptions, prefixes and requests that do not draft."""
    engine = fake_engine(
        Disturbed(schedule["policy"], schedule["moves"]),
        schedule["max_num_seqs"],
        FAKE_VARIANTS if schedule["is_packable"] else ALONE,
        host_kv_slots=schedule["host_kv_slots"],
        gap_ms=schedule["gap_ms"],
        masks=MASKS,
        is_packable=schedule["is_packable"],
        num_blocks=schedule["num_blocks"],
    )
    run = Schedule(schedule)
    for step in range(3000):
        run.arrive(engine, step)
        engine.steps.step()
        if step > 60 and engine.is_idle:
            break
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent=False)


def tokens_of(request):
    return [output.id for output in outputs_of(request) if isinstance(output, TokenOutput)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_answers_with_drafts_are_those_without(kind, name):
    engine = fake_engine(make_policy(name), 3)
    requests = [drafting_request(range(50 * i, 50 * i + 4 + i), 20 + i, kind) for i in range(5)]
    expected = [fake_answer(request.tokens, 20 + i) for i, request in enumerate(requests)]
    run_to_end(engine, requests)
    assert [request.tokens for request in requests] == expected
    assert all(reason_of(request) == "length" for request in requests)
    assert_empty(engine)
    stats = engine.core.profiler.stats()
    assert stats.num_tokens == 20 + 21 + 22 + 23 + 24
    if kind in ("right", "wrong"):
        assert stats.drafted_tokens > 0
        assert stats.accepted_tokens == (stats.drafted_tokens if kind == "right" else 0)


def test_right_drafts_save_calls_and_their_slots_are_not_computed_again():
    engine = fake_engine(make_policy("fcfs"))
    request = drafting_request(range(10), 40, "right")
    run_to_end(engine, [request])
    stats = engine.core.profiler.stats()
    assert stats.num_steps <= 1 + 3 + 36 / 4 + 1, (
        "three plain steps, then up to four tokens per call, or six in eight rows"
    )
    assert stats.slots_in_use == 49
    assert request.tokens == fake_answer(range(10), 40)


@pytest.mark.parametrize("kind", ["none", "right", "mixed"])
def test_a_stop_token_within_a_draft_ends_the_answer(kind):
    answer = fake_answer(range(7), 30)[7:]
    for place in range(12):
        engine = fake_engine(make_policy("fcfs"))
        stops = frozenset([answer[place]])
        request = drafting_request(range(7), 30, kind, stop_token_ids=stops, min_new_tokens=0)
        run_to_end(engine, [request])
        assert tokens_of(request)[-1] == answer[place]
        assert request.tokens[7:] == answer[: answer.index(answer[place]) + 1]
        assert request.state.info.num_computed == len(request.tokens) - 1, "the last token has no slot"
        assert_empty(engine)


@pytest.mark.parametrize("num_new", range(1, 12))
def test_no_more_tokens_than_max_new_tokens(num_new):
    engine = fake_engine(make_policy("fcfs"))
    request = drafting_request(range(5), num_new, "right")
    run_to_end(engine, [request])
    assert request.tokens == fake_answer(range(5), num_new)


@pytest.mark.parametrize("rule", ["stop", "shift", "truncate_middle"])
def test_a_full_conversation_ends_or_is_shortened_as_without_drafts(rule):
    results = []
    for kind in ("none", "right", "wrong", "mixed", "lookup"):
        engine = fake_engine(make_policy("dynamic"), max_seq_len=64)
        request = drafting_request(range(50), 60, kind, overflow=rule)
        run_to_end(engine, [request])
        *tokens, end = outputs_of(request)
        results.append(([token.id for token in tokens], end.reason))
        assert_empty(engine)
    assert results == results[:1] * len(results)
    assert len(results[0][0]) == (15 if rule == "stop" else 60)


SAMPLING = SamplingParams(
    do_sample=True,
    temperature=2.0,
    top_k=50,
    top_p=0.95,
    repetition_penalty=1.3,
    frequency_penalty=0.2,
    wants_logprobs=True,
)


class Replayed:
    """Proposes the tokens of a known answer, with every fifth one wrong."""

    def __init__(self, tokens):
        self.known = tokens

    def answer(self, tokens, limit):
        return self.known[len(tokens) : len(tokens) + limit]


@pytest.mark.parametrize("policy", ["fcfs", "dynamic"])
def test_sampling_draws_the_same_tokens_with_the_same_seed(policy):
    """The random numbers advance once per token, penalties and min_new_tokens see the tokens between."""

    def outputs(known):
        engine = fake_engine(make_policy(policy))
        params = None if known is None else DraftParams()
        options = {"sampling": SAMPLING, "min_new_tokens": 9, "stop_token_ids": frozenset(range(0, 997, 40))}
        requests = [fake_request(range(9 * i, 9 * i + 9), 30, seed=i, drafts=params, **options) for i in range(3)]
        for request, tokens in zip(requests, known or (), strict=False):
            guesser = Guesser(Replayed(tokens).answer, lambda place: place % 5)
            request.state.drafts.drafters.append(guesser)
        run_to_end(engine, requests)
        found = [[(o.id, o.logprob) for o in outputs_of(r) if isinstance(o, TokenOutput)] for r in requests]
        return found, [request.tokens for request in requests], engine.core.profiler.stats()

    plain, tokens, _ = outputs(None)
    drafted, _, stats = outputs(tokens)
    assert drafted == plain
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


class _Failing:
    """A logits processor that forbids every token after ``count`` tokens."""

    is_active, remedy = True, ""

    def __init__(self, count):
        self.count = count

    def process(self, logits):
        if not self.count:
            logits[:] = -float("inf")

    def accept(self, token):
        self.count -= 1


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("kind", ["none", "right"])
def test_a_sampler_that_fails_within_a_draft_ends_its_request_after_the_tokens_before(count, kind):
    engine = fake_engine(make_policy("fcfs"))
    request, other = drafting_request(range(5), 20, kind), drafting_request(range(40, 50), 20, "right")
    request.state.sampler.processors = (_Failing(count),)
    run_to_end(engine, [request, other])
    *tokens, end = outputs_of(request)
    assert [token.id for token in tokens] == fake_answer(range(5), count)[5:]
    assert isinstance(end.error, GenerationConfigError)
    assert other.tokens == fake_answer(range(40, 50), 20)
    assert_empty(engine)


def test_a_recurrent_model_checks_no_drafts():
    variants = [Variant(rows, kv_len) for rows in (1, 4, 16) for kv_len in (0, 64) if rows > 1 or kv_len]
    engine = fake_engine(make_policy("fcfs"), variants=[*variants, Variant(4, 64, 1, 3)], is_recurrent=True)
    request = drafting_request(range(10), 12, "wrong")
    run_to_end(engine, [request])
    assert request.tokens == fake_answer(range(10), 12, is_recurrent=True)
    assert engine.core.profiler.stats().drafted_tokens == 0


def test_drafts_take_no_slots_from_others():
    """The arena is nearly full: drafts are cut to the free slots, and nobody is preempted because of them."""
    results = []
    for kind in ("none", "right"):
        engine = fake_engine(make_policy("dynamic"), 4, max_seq_len=64)
        requests = [drafting_request(range(30 * i, 30 * i + 20), 12, kind) for i in range(4)]
        run_to_end(engine, requests)
        results.append(engine.core.profiler.stats().num_preemptions)
        assert [request.tokens for request in requests] == [
            fake_answer(range(30 * i, 30 * i + 20), 12) for i in range(4)
        ]
    assert results[1] <= results[0]


# -- costs, on the fake device's clock: 8 ms per call and 1 ms per row


def seconds_of(kind, num_new=600, is_certain=False, num_requests=1):
    engine = fake_engine(make_policy("fcfs"), 4, LONG, max_seq_len=4096)
    requests = [drafting_request(range(9 * i, 9 * i + 9), num_new, kind) for i in range(num_requests)]
    for request in requests:
        for drafter in getattr(request.state.drafts, "drafters", ()):
            if isinstance(drafter, Guesser):
                drafter.is_certain = is_certain
    run_to_end(engine, requests)
    for i, request in enumerate(requests):
        assert request.tokens == fake_answer(range(9 * i, 9 * i + 9), num_new)
    return engine.core.profiler.stats()


@pytest.mark.parametrize("num_requests", [1, 3])
def test_hopeless_drafts_cost_at_most_three_percent(num_requests):
    plain, drafted = (seconds_of(kind, num_requests=num_requests) for kind in ("none", "wrong"))
    assert drafted.drafted_tokens > 0, "it was tried"
    assert drafted.device_seconds <= 1.03 * plain.device_seconds


@pytest.mark.parametrize("num_requests", [1, 3])
def test_right_drafts_pay(num_requests):
    plain, drafted = (seconds_of(kind, num_requests=num_requests) for kind in ("none", "right"))
    assert drafted.accepted_tokens == drafted.drafted_tokens > 0
    least = {1: 2.5, 3: 1.3}[num_requests]
    assert plain.device_seconds >= least * drafted.device_seconds


def test_a_text_that_becomes_predictable_is_found():
    """The first 300 drafts are wrong, the others right: probes are rare, but they find the change."""
    engine = fake_engine(make_policy("fcfs"), 4, LONG, max_seq_len=4096)
    request = drafting_request(range(9), 900, "right")
    (guesser,) = request.state.drafts.drafters
    guesser.is_certain, guesser.is_right = False, lambda place: place > 309
    run_to_end(engine, [request])
    stats = engine.core.profiler.stats()
    assert stats.num_steps < 1 + 900 * 0.75
    assert request.tokens == fake_answer(range(9), 900)


# -- records and plain values


def test_tokens_and_traces_count_drafts(tmp_path):
    engine = fake_engine(make_policy("fcfs"))
    request = drafting_request(range(10), 20, "mixed")
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [request])
    drafts = [draft for step in trace.steps for draft in step.drafts]
    assert drafts
    assert all(number == request.id and accepted <= count for number, count, accepted in drafts)
    outputs = [output for output in outputs_of(request) if isinstance(output, TokenOutput)]
    assert sum(output.num_drafted for output in outputs) == sum(count for _, count, _ in drafts)
    assert sum(output.num_accepted for output in outputs) == sum(accepted for _, _, accepted in drafts) > 0
    assert all(step.padding_rows >= 0 for step in trace.steps)
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert [step.drafts for step in again.steps] == [step.drafts for step in trace.steps]
    assert [step.variant for step in again.steps] == [step.variant for step in trace.steps]


def test_a_request_with_drafts_survives_json():
    request = EngineRequest((1, 2), drafts=DraftParams(3, 5, True, 0.25))
    again = EngineRequest.from_dict(request.to_dict())
    assert again.drafts == request.drafts
    assert replace(EngineRequest((1,)), id=7).drafts is None
