"""Compares chats in token ids, full conversations and streamers with GenAI's stateful pipeline and NPUW."""

from __future__ import annotations

import warnings

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.diagnostics.reference import EXACT

pytestmark = pytest.mark.usefixtures("shared_programs")

LENGTHS = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64}
NPUW = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE", "INFERENCE_PRECISION_HINT": "f32"}
PROMPTS = ("What is an NPU?", "Tell me a story about a fox.", "Hello!")


@pytest.fixture(scope="module")
def ours():
    return StaticLLMPipeline(demo_model_path(), "CPU", **LENGTHS, **EXACT)


@pytest.fixture(scope="module")
def npuw():
    return genai.LLMPipeline(demo_model_path(), "NPU", **LENGTHS, **NPUW)


@pytest.fixture(scope="module")
def stateful():
    return genai.LLMPipeline(demo_model_path(), "CPU", ATTENTION_BACKEND="SDPA", **EXACT)


@pytest.fixture(scope="module")
def default():
    return genai.LLMPipeline(demo_model_path(), "CPU", **EXACT)


@pytest.fixture(autouse=True)
def _deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def conversation(pipe, inputs, **options):
    pipe.start_chat("You are brief.")
    answers = [pipe.generate(each, **options).tokens for each in inputs]
    pipe.finish_chat()
    return answers


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 12, "ignore_eos": True}, pytest.param({"max_new_tokens": 40}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("other", ["npuw", "stateful"])
def test_a_chat_in_token_ids_continues(ours, other, options, request):
    theirs = request.getfixturevalue(other)
    encoded = [ours.get_tokenizer().encode(text) for text in PROMPTS]
    expected = conversation(theirs, encoded, **options)
    assert conversation(ours, encoded, **options) == expected
    assert conversation(ours, [ov.Tensor(np.array(each.input_ids.data)) for each in encoded], **options) == expected
    alone = [ours.generate(each, **options).tokens for each in encoded]
    assert alone[0] == expected[0]
    assert alone[1:] != expected[1:]


def test_a_cancelled_turn_of_token_ids_is_forgotten(ours, stateful):
    encoded = [ours.get_tokenizer().encode(text) for text in PROMPTS]

    def cancelled(pipe):
        pipe.start_chat()
        first = pipe.generate(encoded[0], max_new_tokens=8).tokens
        pipe.generate(encoded[1], max_new_tokens=8, streamer=lambda text: genai.StreamingStatus.CANCEL)
        last = pipe.generate(encoded[2], max_new_tokens=8).tokens
        pipe.finish_chat()
        return first, last

    assert cancelled(ours) == cancelled(stateful)


@pytest.mark.parametrize("length", [*(pytest.param(length, marks=pytest.mark.slow) for length in (3, 50)), 128])
def test_a_full_conversation_has_as_many_tokens_as_in_npuw(ours, npuw, length, prompt_of):
    ids = np.array([prompt_of(length)])
    options = {"max_new_tokens": 1000, "ignore_eos": True}
    mine, theirs = ours.generate(ids, **options), npuw.generate(ov.Tensor(ids), **options)
    assert mine.tokens == theirs.tokens
    assert len(mine.tokens[0]) == 192 - length
    assert mine.finish_reasons == ["length"]


def test_streamers_get_the_same_lists(ours, stateful):
    class Streamer(genai.StreamerBase):
        def __init__(self):
            super().__init__()
            self.written = []

        def write(self, token):
            self.written.append(token)
            return genai.StreamingStatus.RUNNING

        def end(self):
            self.written.append("end")

    streamers = Streamer(), Streamer()
    for pipe, streamer in zip((ours, stateful), streamers, strict=True):
        pipe.generate("Hello!", max_new_tokens=6, streamer=streamer)
    assert streamers[0].written == streamers[1].written


@pytest.mark.parametrize(
    "status",
    [True, genai.StreamingStatus.STOP, genai.StreamingStatus.TOOL_CALL_STOP],
    ids=["true", "stop", "tool_call"],
)
def test_a_streamer_that_stops_gives_the_same_reason(ours, stateful, status):
    results = [pipe.generate(["Hello!"], max_new_tokens=20, streamer=lambda text: status) for pipe in (ours, stateful)]
    assert results[0].finish_reasons == results[1].finish_reasons


SEVERAL = {
    "max_new_tokens": 8,
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 1.0,
    "num_return_sequences": 3,
}


@pytest.mark.parametrize("inputs", ["Hello!", ["Hello!"], ["Hello!", "Who are you?"]])
def test_several_answers_are_printed_as_genai_prints_them(ours, default, inputs):
    found, expected = ours.generate(inputs, **SEVERAL), default.generate(inputs, **SEVERAL)
    assert isinstance(expected, genai.DecodedResults) and isinstance(found, genai.DecodedResults)
    lines, theirs = str(found).splitlines(), str(expected).splitlines()
    for line, other in zip(lines, theirs, strict=True):
        (score, _, text), (their_score, _, their_text) = line.partition(": "), other.partition(": ")
        assert text == their_text and float(score) == pytest.approx(float(their_score), abs=1e-4)
        assert len(score.partition(".")[2]) == 6


@pytest.mark.parametrize("inputs", ["Hello!", ["Hello!"]])
def test_one_answer_is_printed_without_its_score(ours, stateful, inputs):
    assert str(ours.generate(inputs, max_new_tokens=8)) == str(stateful.generate(inputs, max_new_tokens=8))


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.5}, {"temperature": 3.0, "top_k": 3}, {"temperature": 3.0, "top_p": 0.9}]
)
def test_a_sampled_answer_has_the_score_of_its_draw(ours, default, fields):
    """The draws differ, so scores of the same token are compared."""

    def scores(pipe):
        results = [
            pipe.generate(["Tell me"], max_new_tokens=1, do_sample=True, rng_seed=seed, **fields)
            for seed in range(1, 25)
        ]
        return {result.texts[0]: result.scores[0] for result in results}

    found, expected = scores(ours), scores(default)
    common = set(found) & set(expected)
    assert len(common) >= 2 and len({round(found[text], 3) for text in common}) >= 2
    assert [found[text] for text in common] == pytest.approx([expected[text] for text in common], abs=1e-3)


class Recorder(genai.StreamerBase):
    def __init__(self):
        super().__init__()
        self.tokens = []

    def write(self, tokens):
        self.tokens += tokens if isinstance(tokens, list) else [tokens]
        return genai.StreamingStatus.RUNNING

    def end(self):
        pass


class Unchanged(genai.IncrementalParser):
    def parse(self, message, delta, tokens=None):
        return delta

    def reset(self):
        pass


class Parsed(genai.TextParserStreamer):
    def write(self, message):
        return genai.StreamingStatus.RUNNING


@pytest.mark.parametrize("stop", ["fox", " fox", "little fox"])
@pytest.mark.parametrize("is_included", [False, True])
def test_streamers_get_nothing_of_a_stop_string(ours, stateful, stop, is_included):
    """Of the text before it, a token that the stop string shares is missing in both; ours has its part in the text."""
    options = {"max_new_tokens": 25, "stop_strings": {stop}, "include_stop_str_in_output": is_included}
    found = []
    for pipe in (ours, stateful):
        recorder, parsed = Recorder(), Parsed(pipe.get_tokenizer(), [Unchanged()])
        text = str(pipe.generate(PROMPTS[1], streamer=recorder, **options))
        pipe.generate(PROMPTS[1], streamer=parsed, **options)
        found.append((recorder.tokens, dict(parsed.get_parsed_message()), text.rstrip()))
    assert found[0] == found[1]
    assert found[0][2].endswith("fox") == is_included


def test_of_stop_strings_that_one_token_completes_the_same_one_cuts(ours, stateful):
    """One begins in the token before, one within the token; GenAI keeps the token that is cut, ours its part before the cut."""
    rng = np.random.default_rng(0)
    decode = ours.get_tokenizer().decode
    num_equal = 0
    for prompt in PROMPTS * 12:
        tokens = list(ours.generate([prompt], max_new_tokens=24).tokens[0])
        texts = [decode(tokens[:count]) for count in range(len(tokens) + 1)]
        count = int(rng.integers(3, len(tokens)))
        start, before, text = (len(texts[count - 2]), len(texts[count - 1]), texts[count])
        if not start < before < len(text):
            continue
        crossing = text[rng.integers(start, before) : rng.integers(before + 1, len(text) + 1)]
        within = text[(first := rng.integers(before, len(text))) : rng.integers(first + 1, len(text) + 1)]
        if crossing in texts[count - 1] or within in texts[count - 1]:
            continue
        include = bool(rng.integers(2))
        options = {"max_new_tokens": 24, "stop_strings": {crossing, within}, "include_stop_str_in_output": include}
        mine, other = (pipe.generate([prompt], **options).texts[0].rstrip() for pipe in (ours, stateful))
        assert next(whole for whole in texts if len(whole.rstrip()) >= len(mine)).rstrip() == other, options
        num_equal += 1
    assert num_equal > 15


def test_tokens_that_may_not_come_early_are_forbidden_although_they_end_nothing(ours, stateful):
    options = {"ignore_eos": True, "min_new_tokens": 60, "max_new_tokens": 60}
    found = [pipe.generate([PROMPTS[0]], **options).texts for pipe in (ours, stateful)]
    assert found[0] == found[1]
    assert ours.generate([PROMPTS[0]], **options | {"min_new_tokens": 0}).texts != found[0], "it made a difference"
