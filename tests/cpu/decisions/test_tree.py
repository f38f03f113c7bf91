"""Trees of a state, questions and labels: each probability is that of the original model, whatever runs beside it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.helpers import EXACT

from staticllm import StaticLLMPipeline
from staticllm.errors import ClosedError, DeviceError, StaticLLMError
from staticllm.pipelines.decisions.prompts import Shown
from staticllm.pipelines.decisions.tree import DecisionCancelledError, TreeRun

pytestmark = pytest.mark.usefixtures("shared_programs")
SLOW = pytest.mark.slow
NAMES = (
    "llama",
    "qwen3",
    "bloom",
    "gemma2",
    "lfm2",
    "phi3",
    "gpt_oss",
    "qwen2_moe",
    "falcon",
    "opt",
    "cohere",
    "smollm3",
)
QUICK = ("llama", "bloom")
MODES = ("auto", "shared", "blocks")
LENGTHS = {"MAX_PROMPT_LEN": 200, "MIN_RESPONSE_LEN": 56}


def pipeline(path, mode="auto", **properties):
    return StaticLLMPipeline(path, "CPU", PROGRAMS=mode, **{**EXACT, **LENGTHS, **properties})


def random_tree(seed, num_questions=4):
    """Return the tokens of a state, and questions some of whose labels begin with others."""
    rng = np.random.default_rng(seed)

    def some(least, most):
        return tuple(int(token) for token in rng.integers(8, 1000, rng.integers(least, most)))

    def labels():
        found = [some(1, 4) for _ in range(rng.integers(2, 5))]
        found.append((*found[0], *some(1, 3)))  # "no refund" after "no"
        found.append((*found[0][:-1], *some(1, 2)))
        ends = [(*label, 3) for label in dict.fromkeys(found)]
        return tuple(ends)

    questions = [
        Shown(some(2, 30), found, tuple(range(len(found)))) for found in (labels() for _ in range(num_questions))
    ]
    return list(some(1, 60)), questions


def expected(original, state, question):
    """Return the log-probability of each label of a question, each run alone."""
    found = []
    for label in question.labels:
        original.reset()
        logits = original.logits([*state, *question.tokens, *label[:-1]])[-len(label) :].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        found.append(sum(rows[place, token] for place, token in enumerate(label)))
    return np.array(found)


def scores(pipe, state, questions):
    return TreeRun(pipe.engine, 0, None).run(state, questions)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if name in QUICK and mode == "auto" else SLOW)
        for name in NAMES
        for mode in MODES
    ],
)
def test_each_label_has_the_probability_of_the_original(name, mode, model_path, original, in_full):
    reference = original(model_path(name))
    with pipeline(model_path(name), mode) as pipe:
        for seed in range(6 if in_full else 2):
            state, questions = random_tree(seed)
            found = scores(pipe, state, questions)
            for labels, question in zip(found.labels, questions, strict=True):
                wanted = expected(reference, state, question)
                np.testing.assert_allclose(np.exp(labels), np.exp(wanted), atol=1e-5)
                np.testing.assert_allclose(labels, wanted, atol=2e-3)


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=SLOW), pytest.param("gemma2", marks=SLOW)])
def test_company_and_order_change_no_bit(name, model_path):
    """Over pages on a CPU in f32: alone, with others before and after it, with a new state and with a cached one."""
    with pipeline(model_path(name)) as pipe:
        state, questions = random_tree(7, 20)
        alone = [scores(pipe, state, [question]).labels[0] for question in questions]
        for order in (range(20), range(19, -1, -1), range(3), [5, 5], [2, 17]):
            found = scores(pipe, state, [questions[place] for place in order]).labels
            for place, labels in zip(order, found, strict=True):
                np.testing.assert_array_equal(labels, alone[place])
    with pipeline(model_path(name)) as pipe:
        np.testing.assert_array_equal(scores(pipe, state, questions).labels[11], alone[11])


def test_chats_beside_it_change_no_bit_and_get_their_tokens(model_path, prompt_of, original):
    reference = original(model_path("llama"))
    prompts = [prompt_of(20 + length, length) for length in range(4)]
    wanted = [reference.greedy(prompt, 24) for prompt in prompts]
    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(3, 8)
        alone = scores(pipe, state, questions).labels
        handles = [pipe.submit(np.array([prompt]), max_new_tokens=24, ignore_eos=True) for prompt in prompts]
        found = [scores(pipe, state, questions).labels for _ in range(3)]
        assert [list(handle.output().tokens) for handle in handles] == wanted
        for labels in found:
            for mine, other in zip(labels, alone, strict=True):
                np.testing.assert_array_equal(mine, other)


def test_a_state_runs_once_and_only_it_stays(model_path):
    from support.helpers import assert_nothing_held_soon

    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(1)
        state = [*state, *range(100, 140)]
        first = scores(pipe, state, questions)
        again = scores(pipe, state, questions)
        assert (first.num_cached, again.num_cached) == (0, len(state))
        assert first.num_fed - again.num_fed == len(state)
        longer = scores(pipe, [*state, 9, 9], questions)
        assert longer.num_cached == len(state)
        assert pipe.engine.run_between_steps(lambda: pipe.engine.runner.cache.slots.num_active) == 0
        assert_nothing_held_soon(pipe)


def test_a_run_that_is_cancelled_ends_and_leaves_nothing(model_path):
    from support.helpers import assert_nothing_held_soon

    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(2, 40)
        run = TreeRun(pipe.engine, 0, None)
        threading.Timer(0.01, run.cancel).start()
        with pytest.raises(DecisionCancelledError):
            while True:  # until the timer
                TreeRun.run(run, state, questions)
        late = TreeRun(pipe.engine, 0, deadline=0.0)
        with pytest.raises(DecisionCancelledError, match="deadline"):
            late.run(state, questions)
        alone = scores(pipe, state, questions[:2])
        assert np.isfinite(alone.labels[0]).all()
        assert_nothing_held_soon(pipe)


def test_a_run_of_a_closed_engine_fails(model_path):
    pipe = pipeline(model_path("llama"))
    engine = pipe.engine
    pipe.close()
    with pytest.raises(ClosedError):
        TreeRun(engine, 0, None).run(*random_tree(0))


def test_a_run_without_room_ends_with_an_error(model_path, monkeypatch):
    """No feed of a decision has one row, so one of two rows cannot be made shorter."""
    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(4)
        manager = pipe.engine.core.device.kv_manager
        with monkeypatch.context() as patch:
            patch.setattr(manager, "make_room", lambda *arguments: False)
            with pytest.raises(DeviceError):
                scores(pipe, state, questions)
        assert np.isfinite(scores(pipe, state, questions).labels[0]).all()


def test_a_state_that_cannot_be_opened_ends_its_run(model_path, monkeypatch):
    def full(*arguments):
        raise MemoryError("no room")

    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(4)
        manager = pipe.engine.core.device.kv_manager
        with monkeypatch.context() as patch:
            patch.setattr(manager.prefix, "attach", full)
            with pytest.raises(StaticLLMError, match="no room"):
                scores(pipe, state, questions)
        assert np.isfinite(scores(pipe, state, questions).labels[0]).all()
        assert pipe.engine.run_between_steps(lambda: len(manager.idle)) == 0


def test_a_new_priority_holds_for_the_state_and_for_later_questions(model_path, monkeypatch):
    seen = []
    with pipeline(model_path("llama")) as pipe:
        state, questions = random_tree(6, 120)
        run = TreeRun(pipe.engine, 0, None)
        feed = pipe.engine.feed

        def watched(feeds):
            seen.extend(each.sequence.priority for each in feeds)
            run.set_priority(-7)
            feed(feeds)

        monkeypatch.setattr(pipe.engine, "feed", watched)
        run.run(state, questions)
    assert seen[0] == 0 and seen.count(-7) > 100 and seen[-1] == -7
