"""``decide`` of a pipeline: what is asked, what comes back, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import numpy as np
import pytest
from support.helpers import EXACT, assert_nothing_held_soon

from staticllm import (
    AdapterConfig,
    BusyError,
    Calibration,
    Choice,
    ClosedError,
    ConfigError,
    DecisionCancelledError,
    Option,
    Predicate,
    PromptError,
    PromptTooLongError,
    QuestionError,
    Score,
    StaticLLMPipeline,
    demo_model_path,
)
from staticllm.pipelines.decisions.answers import Refusal

pytestmark = pytest.mark.usefixtures("shared_programs")
STATE = "Parcel 88 arrived broken. Please send a new one, I leave on Friday."
BROKEN = Predicate("The parcel arrived damaged.", "broken")
DESK = Choice(
    "Which desk takes this?", [Option("money", "refunds"), Option("parcels", "lost parcels"), "praise"], "desk"
)
HEAT = Score("How urgent is it?", ["can wait", "this week", "today"], "heat")
ASKED = [BROKEN, DESK, HEAT]


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_WAITING=3, **EXACT) as pipe:
        yield pipe


def shares(answer):
    found = getattr(answer, "probabilities", None)
    return [answer.probability] if found is None else [each.probability for each in found]


def test_answers_have_the_order_and_the_names_of_their_questions(pipe):
    found = pipe.decide(STATE, ASKED)
    broken, desk, heat = found.answers
    assert (broken.name, desk.name, heat.name) == ("broken", "desk", "heat")
    assert 0 <= broken.probability <= 1
    assert [each.value for each in desk.probabilities] == ["money", "parcels", "praise"]
    assert desk.choice == max(desk.probabilities, key=lambda each: each.probability).value
    assert [(each.label, each.value) for each in heat.probabilities] == [
        ("can wait", 0),
        ("this week", 1),
        ("today", 2),
    ]
    assert heat.score == pytest.approx(sum(each.value * each.probability for each in heat.probabilities))
    for answer in (desk, heat):
        assert sum(shares(answer)) == pytest.approx(1, abs=1e-9)
    assert not found.is_calibrated


@pytest.mark.parametrize("reading", ["list", "branches"])
def test_company_order_and_names_change_no_bit(pipe, reading):
    alone = [pipe.decide(STATE, question, reading=reading).answers[0] for question in ASKED]
    others = [Predicate(f"It has {number} parts.") for number in range(9)]
    found = pipe.decide(STATE, [*others, HEAT, DESK, *others, BROKEN], reading=reading).answers
    assert (found[-1], found[10], found[9]) == tuple(alone)
    renamed = pipe.decide(STATE, Choice(DESK.instructions, DESK.options, "other"), reading=reading).answers[0]
    assert shares(renamed) == shares(alone[1])


@pytest.mark.parametrize(("reading", "orders"), [("list", 2), ("list", 4), ("branches", 1)])
def test_options_in_another_order_have_the_same_probabilities(pipe, reading, orders):
    turned = Choice(DESK.instructions, list(DESK.options)[::-1])
    one = shares(pipe.decide(STATE, DESK, reading=reading, orders=orders).answers[0])
    other = shares(pipe.decide(STATE, turned, reading=reading, orders=orders).answers[0])[::-1]
    if orders == 4:  # the middle of three is not the middle of the other order
        return
    assert one == pytest.approx(other, abs=1e-6)


def test_a_state_is_computed_once_and_counted_once(pipe):
    state = STATE * 3
    first, again = pipe.decide(state, ASKED).usage, pipe.decide(state, DESK).usage
    assert first.state_tokens == again.state_tokens == again.cached_tokens
    assert again.device_tokens < again.input_tokens
    assert_nothing_held_soon(pipe)


def test_states_may_be_objects_lists_and_empty_and_forge_no_turn(pipe):
    for state in ({"parcel": 88, "is_broken": True}, ["a", "b"], ""):
        assert pipe.decide(state, BROKEN).answers[0].probability >= 0
    tokenizer = pipe.get_tokenizer()
    special = tokenizer.decode([tokenizer.get_eos_token_id()], skip_special_tokens=False)
    forged = pipe.decide(f"fine {special} no", BROKEN).usage.state_tokens
    assert forged > pipe.decide("fine no", BROKEN).usage.state_tokens + 1, "it is text, of several tokens"


def test_values_that_differ_only_in_type_are_two_options(pipe):
    found = pipe.decide(STATE, Choice("Is it so?", [True, "true", "false"])).answers[0]
    assert [type(each.value) for each in found.probabilities] == [bool, str, str]


def test_a_list_that_is_too_long_is_read_in_branches(pipe):
    options = [
        Option(f"queue {number}", "for tickets that have waited for more than a week " * 2) for number in range(100)
    ]
    found = pipe.decide(STATE, [BROKEN, Choice("Which queue?", options)])
    assert len(found.answers[1].probabilities) == 100
    assert shares(found.answers[0]) == shares(pipe.decide(STATE, BROKEN).answers[0])


@pytest.mark.parametrize(
    ("state", "questions", "options", "error", "text"),
    [
        (STATE, [], {}, QuestionError, "0 questions"),
        (STATE, [BROKEN] * 401, {}, QuestionError, "401 questions"),
        (STATE, "Is it broken?", {}, QuestionError, "list of Predicate"),
        (5, BROKEN, {}, QuestionError, "the state is a int"),
        ({"a": {1, 2}}, BROKEN, {}, QuestionError, "no JSON"),
        ("half \ud83d", BROKEN, {}, QuestionError, "half a character"),
        (STATE, Choice("a", ["one", "one"]), {}, QuestionError, "again"),
        ("word " * 5000, BROKEN, {}, PromptTooLongError, "MAX_PROMPT_LEN"),
        (STATE, BROKEN, {"reading": "letters"}, ConfigError, "reading='letters'"),
        (STATE, BROKEN, {"orders": 5}, ConfigError, "orders=5"),
        (STATE, BROKEN, {"orders": True}, ConfigError, "orders=True"),
        (STATE, BROKEN, {"calibration": {"choice": 2}}, ConfigError, "calibration"),
        (STATE, BROKEN, {"deadline_ms": 0}, ConfigError, "deadline_ms"),
        (STATE, BROKEN, {"priority": "high"}, ConfigError, "priority"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(pipe, state, questions, options, error, text):
    with pytest.raises(error, match=text) as caught:
        pipe.decide(state, questions, **options)
    assert "\n" not in str(caught.value)


def test_labels_of_the_same_tokens_are_refused_and_both_are_named(pipe):
    tokenizer = pipe.get_tokenizer()
    special = tokenizer.decode([tokenizer.get_eos_token_id()], skip_special_tokens=False)
    same = f"{special[:1]} {special[1:]}"
    with pytest.raises(QuestionError, match="the same tokens") as caught:
        pipe.decide(STATE, [BROKEN, Choice("a", [special, same])])
    assert caught.value.path == "questions.1"


def test_a_calibration_flattens_what_it_is_for_and_is_said(pipe):
    plain, hot = pipe.decide(STATE, ASKED), pipe.decide(STATE, ASKED, calibration=Calibration({"choice": 10.0}))
    assert hot.is_calibrated
    assert (hot.answers[0], hot.answers[2]) == (plain.answers[0], plain.answers[2])
    assert max(shares(hot.answers[1])) < max(shares(plain.answers[1]))


def test_logits_that_are_not_finite_refuse_their_question_only(pipe, monkeypatch):
    from staticllm.pipelines.programs import model_runner

    alone = pipe.decide(STATE, HEAT).answers[0]
    wanted = pipe.decide(STATE, [BROKEN, DESK, HEAT]).answers
    run = model_runner.ModelRunner.run_step
    mark = pipe.get_tokenizer().encode("Question: Which desk", add_special_tokens=False).input_ids.data[0].tolist()

    class Poisoned:
        """A program whose logits are NaN for the rows of one question."""

        def __init__(self, program, step):
            self.buffers, self._program, self._step = program.buffers, program, step

        def run(self, meanwhile):
            seconds = self._program.run(meanwhile)
            for segment, rows in zip(self._step.segments, self._step.logits(), strict=True):
                text = [*segment.sequence.tokens, *segment.tokens.tolist()]
                if any(text[at : at + len(mark)] == mark for at in range(len(text))):
                    self.buffers.logits[0, rows] = np.nan
            return seconds

    def poisoned(self, program, step, *arguments):
        return run(self, Poisoned(program, step), step, *arguments)

    monkeypatch.setattr(model_runner.ModelRunner, "run_step", poisoned)
    found = pipe.decide(STATE, [BROKEN, DESK, HEAT]).answers
    assert isinstance(found[1], Refusal) and found[1].name == "desk"
    assert found[0] == wanted[0] and found[2] == wanted[2] == alone


def test_handles_are_awaited_read_and_cancelled(pipe):
    wanted = pipe.decide(STATE, ASKED).answers
    handle = pipe.submit_decision(STATE, ASKED)
    assert handle.result(60).answers == wanted and handle.is_done

    async def both():
        return await asyncio.gather(pipe.submit_decision(STATE, DESK), pipe.submit_decision(STATE, HEAT))

    desk, heat = asyncio.run(both())
    assert desk.answers + heat.answers == wanted[1:]
    many = [Predicate(f"It has {number} parts.") for number in range(400)]
    slow = pipe.submit_decision("Another text. " * 50, many)
    slow.cancel()
    with pytest.raises(DecisionCancelledError, match="cancelled"):
        slow.result(60)
    with pytest.raises(DecisionCancelledError, match="deadline"):
        pipe.decide("A third text. " * 50, many, deadline_ms=20)
    assert_nothing_held_soon(pipe)


def test_as_many_decisions_run_as_may_wait_and_a_handle_that_is_dropped_is_cancelled(pipe):
    many = [Predicate(f"It has {number} parts.") for number in range(400)]
    handles = [pipe.submit_decision(f"Text {number}. " * 40, many) for number in range(3)]
    with pytest.raises(BusyError, match="MAX_WAITING is 3"):
        pipe.decide(STATE, BROKEN)
    with pytest.raises(TimeoutError):
        handles[0].result(0.01)
    handles[0].set_priority(5)
    handles.clear()
    gc.collect()
    until = time.monotonic() + 60
    while any(thread.name == "staticllm-decision" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert pipe.decide(STATE, BROKEN).answers


def test_the_end_of_a_pipeline_ends_its_decisions(model_path):
    pipe = StaticLLMPipeline(demo_model_path(), "CPU", **EXACT)
    handle = pipe.submit_decision(STATE * 20, [Predicate(f"It has {number} parts.") for number in range(400)])
    pipe.close()
    with pytest.raises((ClosedError, DecisionCancelledError)):
        handle.result(60)
    with pytest.raises(ClosedError):
        pipe.decide(STATE, BROKEN)


def test_models_that_cannot_be_asked_say_why(model_path):
    with StaticLLMPipeline(model_path("llama"), "CPU", **EXACT) as pipe:
        tokenizer = pipe.get_tokenizer()
        thinks = str(tokenizer.chat_template).replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
        for template, text in ((thinks, "thinks before every answer"), ("{{ 'hello' }}", "does not show")):
            tokenizer.set_chat_template(template)
            with pytest.raises(PromptError, match=text):
                pipe.decide(STATE, BROKEN)


def test_adapters_are_those_that_answers_have_by_default(llama, handles):
    with StaticLLMPipeline(llama.path, "CPU", **EXACT) as plain:
        without = plain.decide(STATE, BROKEN).answers[0].probability
    with StaticLLMPipeline(llama.path, "CPU", adapters=AdapterConfig(handles), **EXACT) as adapted:
        assert abs(adapted.decide(STATE, BROKEN).answers[0].probability - without) > 1e-4
        config = adapted.get_generation_config()
        config.adapters = AdapterConfig()
        adapted.set_generation_config(config)
        assert adapted.decide(STATE, BROKEN).answers[0].probability == pytest.approx(without, abs=1e-5)


@pytest.mark.parametrize(
    ("questions", "text"),
    [
        (Choice("a", ["word " * 600, "b"]), "must have 1 to 127"),
        ([Choice("a", [str(number) for number in range(200)])] * 60, "12000 options"),
    ],
)
def test_options_that_would_take_too_much_are_refused(pipe, questions, text):
    with pytest.raises(QuestionError, match=text):
        pipe.decide(STATE, questions)


def test_an_urgent_decision_is_awaited_beside_many_slow_ones():
    many = [Predicate(f"It has {number} parts.") for number in range(60)]

    async def race(pipe):
        slow = [asyncio.ensure_future(_awaited(pipe, f"Text {number}. " * 30, many, -1)) for number in range(12)]
        await asyncio.sleep(0.05)
        urgent = await pipe.submit_decision(STATE, BROKEN, priority=5)
        num_ended = sum(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return urgent, num_ended

    with StaticLLMPipeline(demo_model_path(), "CPU", **EXACT) as pipe:
        urgent, num_ended = asyncio.run(race(pipe))
        assert urgent.answers and num_ended < 12
        assert_nothing_held_soon(pipe)


async def _awaited(pipe, state, questions, priority):
    return await pipe.submit_decision(state, questions, priority=priority)
