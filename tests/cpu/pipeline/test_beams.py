"""Tests beam search of the pipeline: texts, stop strings, chats, other requests at the same time, and what is refused."""

import numpy as np
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.errors import GenerationConfigError
from tests.support.helpers import EXACT

QUESTION = "What is an NPU?"


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(demo_model_path(), "CPU", **EXACT) as pipe:
        yield pipe


def test_texts_come_best_first(pipe):
    results = pipe.generate([QUESTION], num_beams=4, num_return_sequences=3, max_new_tokens=20)
    assert len(results.texts) == len(set(results.texts)) == 3
    assert results.scores == sorted(results.scores, reverse=True)


def test_a_search_beside_other_requests_finds_the_same(pipe):
    options = {"num_beams": 4, "max_new_tokens": 24}
    alone = pipe.generate(QUESTION, **options)
    others = [pipe.submit(text, max_new_tokens=40) for text in ("Tell me a story.", "What is a fox?", "Hello")]
    searches = [pipe.submit(QUESTION, **options) for _ in range(3)]
    assert [handle.result() for handle in searches] == [alone] * 3
    assert all(handle.result() for handle in others)


def test_a_stop_string_ends_beams(pipe):
    whole = pipe.generate(QUESTION, num_beams=3, max_new_tokens=24)
    word = whole.split()[3]
    results = pipe.generate([QUESTION], num_beams=3, num_return_sequences=3, max_new_tokens=24, stop_strings={word})
    assert all(word not in text for text in results.texts)
    assert "stop" in [str(reason) for reason in results.finish_reasons]
    kept = pipe.generate(QUESTION, num_beams=3, max_new_tokens=24, stop_strings={word}, include_stop_str_in_output=True)
    assert kept.endswith(word) or word not in kept


@pytest.mark.parametrize("include", [False, True])
def test_a_beam_that_a_stop_string_cuts_to_nothing_is_an_answer(pipe, include):
    """A stop string in the first tokens leaves texts without tokens: an answer for each place, with its score."""
    options = {"num_beams": 4, "num_return_sequences": 4, "include_stop_str_in_output": include}
    num_empty = 0
    for letters in ("e", "o", "a", " ", "aeiou", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        for count in (1, 2, 5):
            results = pipe.generate([QUESTION], max_new_tokens=count, stop_strings=set(letters), **options)
            lengths = {len(getattr(results, name)) for name in ("texts", "tokens", "scores", "finish_reasons")}
            assert lengths == {4}
            assert results.scores == sorted(results.scores, reverse=True)
            num_empty += results.texts.count("")
    assert include or num_empty > 8


def test_turns_of_a_chat(pipe):
    pipe.start_chat()
    first = pipe.generate(QUESTION, num_beams=3, max_new_tokens=20)
    second = pipe.generate("And a GPU?", num_beams=3, max_new_tokens=20)
    pipe.finish_chat()
    assert first
    assert second


def test_a_cancelled_search_gives_what_it_has(pipe):
    handle = pipe.submit(np.array([[5, 6, 7]]), num_beams=8, max_new_tokens=1000, ignore_eos=True)
    handle.cancel()
    assert str(handle.output().finish_reason) == "cancelled"
    assert pipe.generate(QUESTION, num_beams=2, max_new_tokens=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 3, "do_sample": True}, "do_sample=True with num_beams=3"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3 is more than num_beams=2"),
        (
            {"num_beams": 3, "num_beam_groups": 2, "diversity_penalty": 1.0},
            "3 cannot be divided into num_beam_groups=2",
        ),
        ({"num_beams": 4, "num_beam_groups": 2}, "diversity_penalty=0 with num_beam_groups=2: set a penalty"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "diversity_penalty=1 with num_beam_groups=1"),
        ({"num_beams": 2, "repetition_penalty": 1.1}, "repetition_penalty=1.1 with num_beams=2"),
        ({"num_beams": 2, "frequency_penalty": 0.1}, "frequency_penalty=0.1 with num_beams=2"),
        ({"num_beams": 2, "no_repeat_ngram_size": 0}, "no_repeat_ngram_size=0"),
        ({"num_beams": 2, "stop_criteria": "soon"}, "stop_criteria='soon': must be EARLY, HEURISTIC or NEVER"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty=nan"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_beams": 65}, "num_beams=65"),
        ({"num_beams": 2, "overflow": "shift"}, "overflow='shift' with num_beams"),
        ({"num_beams": 2, "streamer": print}, "a streamer for num_beams=2"),
    ],
)
def test_contradictions_get_one_line(pipe, options, message):
    with pytest.raises(GenerationConfigError) as caught:
        pipe.generate(QUESTION, max_new_tokens=4, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert pipe.generate(QUESTION, max_new_tokens=2)
