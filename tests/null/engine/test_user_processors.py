"""Tests logits processors that a user made, on the engine: forms, state, order, faults, and other requests."""

import json
import logging
import time

import numpy as np
import pytest
from support.engine.output_queues import outputs_of

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.generation import logits_processors
from staticllm.pipelines.generation.logits_processors import copies_for
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import VOCAB_SIZE, assert_empty, fake_answer, fake_engine, fake_request, run_to_end


class Upwards:
    """Allows only the 100 tokens above the last one, which is its state."""

    def __init__(self):
        self.last = 0

    def process(self, logits):
        logits[: self.last + 1] = logits[self.last + 101 :] = -np.inf

    def accept(self, token):
        self.last = token


def request_with(given, prompt=(5, 6, 7), num_new=6, **options):
    request = EngineRequest(tuple(prompt), max_new_tokens=num_new, **options)
    return RequestState(request, VOCAB_SIZE, user_processors=copies_for(given, prompt, request.num_sequences))


def answers(state):
    found = [[] for _ in range(state.request.num_sequences)]
    for output in outputs_of(state):
        if isinstance(output, TokenOutput):
            found[output.index].append(output.id)
    return found


def test_an_object_keeps_its_state_per_answer_and_is_not_changed_itself():
    engine, processor = fake_engine(make_policy("dynamic")), Upwards()
    sampling = SamplingParams(do_sample=True, temperature=5.0)
    state, other = request_with([processor], sampling=sampling, num_sequences=3, seed=4), fake_request([8, 9], 9)
    run_to_end(engine, [state, other])
    for tokens in (found := answers(state)):
        assert len(tokens) == 6
        assert tokens == sorted(set(tokens))
    assert len({tuple(tokens) for tokens in found}) > 1
    assert processor.last == 0
    assert other.tokens == fake_answer([8, 9], 9), "others are not touched"
    assert_empty(engine)


def test_a_function_sees_prompt_and_answer_and_may_return_or_change_the_scores():
    seen = []

    def returning(input_ids, scores):
        assert input_ids.dtype == np.int64
        assert scores.dtype == np.float32
        assert scores.shape == (VOCAB_SIZE,)
        seen.append(input_ids.tolist())
        changed = np.full_like(scores, -np.inf)
        changed[len(input_ids)] = 0.0
        return changed

    def in_place(input_ids, scores):
        scores[:] = -np.inf
        scores[len(input_ids) * 2] = 1

    engine = fake_engine(make_policy("fcfs"))
    first, second = request_with([returning]), request_with([in_place])
    run_to_end(engine, [first, second])
    assert answers(first) == [[3, 4, 5, 6, 7, 8]]
    assert seen[-1] == [5, 6, 7, 3, 4, 5, 6, 7]
    assert answers(second) == [[6, 8, 10, 12, 14, 16]]


def test_processors_come_after_the_others_in_their_order():
    def record(input_ids, scores):
        assert scores[11] == -np.inf, "bad_words come before"
        scores[11] = 50.0

    def record_later(input_ids, scores):
        assert scores[11] == 50.0

    engine = fake_engine(make_policy("fcfs"))
    state = request_with([record, record_later], sampling=SamplingParams(bad_words=((11,),)), num_new=2)
    run_to_end(engine, [state])
    assert answers(state) == [[11, 11]]


def raising(input_ids, scores):
    raise LookupError("first line\nno such table")


def wrong_shape(input_ids, scores):
    return scores[:5]


def not_a_number(input_ids, scores):
    scores[3] = np.nan


def forbidding(input_ids, scores):
    scores[:] = -np.inf


def leaving(input_ids, scores):
    raise SystemExit(3)


def interrupting(input_ids, scores):
    raise KeyboardInterrupt


class NamelessError(Exception):
    def __str__(self):
        raise ValueError("no text")


def nameless(input_ids, scores):
    raise NamelessError


class BadRemedy(Upwards):
    def process(self, logits):
        logits[:] = -np.inf

    @property
    def remedy(self):
        raise ValueError("no remedy")


class BadAccept(Upwards):
    def accept(self, token):
        raise KeyError(token)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (raising, "the logits_processor raising failed: LookupError: no such table"),
        (wrong_shape, r"wrong_shape failed: ValueError: it returned an array of shape \[5\], not \[997\]"),
        (not_a_number, "not_a_number made logits that are NaN or inf"),
        (forbidding, "no token can be chosen: .* let the logits_processor forbidding allow more tokens"),
        (BadAccept(), "the logits_processor BadAccept failed: KeyError"),
        (leaving, "the logits_processor leaving failed: SystemExit: 3"),
        (interrupting, "the logits_processor interrupting failed: KeyboardInterrupt"),
        (nameless, "the logits_processor nameless failed: NamelessError: NamelessError"),
        (BadRemedy(), "the logits_processor BadRemedy failed: ValueError: no remedy"),
    ],
)
def test_a_fault_ends_its_own_request_with_one_line(given, said):
    engine = fake_engine(make_policy("dynamic"))
    faulty, other = request_with([given]), fake_request(range(40, 60), 8)
    run_to_end(engine, [faulty, other])
    *_, end = outputs_of(faulty)
    assert isinstance(end.error, GenerationConfigError)
    assert "\n" not in str(end.error)
    with pytest.raises(GenerationConfigError, match=said):
        raise end.error
    assert other.tokens == fake_answer(range(40, 60), 8)
    assert_empty(engine)


def test_a_slow_processor_is_reported_once(caplog, monkeypatch):
    monkeypatch.setattr(logits_processors, "SLOW_MS", 1.0)
    monkeypatch.setattr(logits_processors, "_reported", set())

    def slow(input_ids, scores):
        time.sleep(0.003)

    engine = fake_engine(make_policy("fcfs"))
    with caplog.at_level(logging.WARNING, "staticllm"):
        run_to_end(engine, [request_with([slow]), request_with([slow])])
    assert len(caplog.records) == 1
    assert "slow took" in caplog.text


def test_an_object_that_cannot_be_copied_is_refused():
    class Uncopied(Upwards):
        def __deepcopy__(self, memo):
            raise TypeError("holds a lock")

    with pytest.raises(GenerationConfigError, match=r"Uncopied cannot be copied for each answer \(holds a lock\)"):
        copies_for([Uncopied()], [1], 1)


def test_parameters_survive_json():
    params = SamplingParams(
        do_sample=True, typical_p=0.5, xtc_probability=0.1, mirostat=2, dry_multiplier=0.8, no_repeat_ngram_size=3,
        dry_breakers=((1,), (2, 3)), logit_bias=((4, -1.5),), bad_words=((5, 6), (7,)),
    )  # fmt: skip
    request = EngineRequest((1, 2), params)
    again = EngineRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert again.sampling == params
