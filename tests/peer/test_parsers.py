"""Compares what GenAI's parsers and parsing streamers make of answers in GenAI's pipeline and in ours."""

from __future__ import annotations

import pickle
import types

import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.testing import fake_pipeline

pytestmark = pytest.mark.usefixtures("shared_programs")
LENGTHS = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64}
PROMPTS = ["What is an NPU?", "Tell me a story about a fox."]
OPTIONS = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def ours():
    return StaticLLMPipeline(demo_model_path(), "CPU", **LENGTHS, **EXACT)


@pytest.fixture(scope="module")
def theirs():
    return genai.LLMPipeline(demo_model_path(), "CPU", ATTENTION_BACKEND="SDPA", **EXACT)


class Words(genai.Parser):
    """A user's parser: adds the number of words, and what the parser before it found."""

    def parse(self, message):
        message["num_words"] = len(message["content"].split())
        message["seen"] = sorted(message)


class Capitals(genai.IncrementalParser):
    """A user's incremental parser: moves words that begin with a capital letter."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def parse(self, delta_message, delta_text, delta_tokens=None):
        self.count += 1
        if delta_text.strip()[:1].isupper():
            delta_message["capitals"] = delta_text
        return delta_text

    def reset(self):
        self.count = 0


class StopAfter(Capitals):
    """Ends the answer as a tool call would, after three pieces."""

    def parse(self, delta_message, delta_text, delta_tokens=None):
        self.count += 1
        if self.count == 3:
            self.set_status(genai.StreamingStatus.TOOL_CALL_STOP)
        return delta_text

    def reset(self):
        self.count = 0
        self.set_status(genai.StreamingStatus.RUNNING)


class Streamer(genai.TextParserStreamer):
    """Collects the messages that it is given."""

    def __init__(self, tokenizer, parsers):
        super().__init__(tokenizer, parsers)
        self.messages = []

    def write(self, message):
        self.messages.append(dict(message))
        return genai.StreamingStatus.RUNNING


def test_parsers_run_on_every_text(ours, theirs):
    reasoning = [genai.ReasoningParser(expect_open_tag=False, keep_original_content=False, close_tag=" "), Words()]
    config = genai.GenerationConfig(**OPTIONS)
    config.parsers = reasoning
    single = [theirs.generate([prompt], config) for prompt in PROMPTS]  # a batch there pads, and says something else
    expected = [result.parsed[0] for result in single]
    result = ours.generate(PROMPTS, config)
    assert result.texts == [result.texts[0] for result in single]
    assert result.parsed == expected
    assert expected[0]["reasoning_content"]
    assert expected[0]["num_words"]
    assert ours.generate(PROMPTS, parsers=reasoning, **OPTIONS).parsed == expected
    assert ours.submit(PROMPTS[0], parsers=reasoning, **OPTIONS).result().parsed == expected[:1]
    assert ours.generate(PROMPTS[0], parsers=reasoning, **OPTIONS).parsed == expected[:1]
    assert pickle.loads(pickle.dumps(result)).parsed == expected


@pytest.mark.parametrize("make", [Capitals, StopAfter, genai.DeepSeekR1ReasoningIncrementalParser])
def test_a_parsing_streamer_gets_the_same_messages(ours, theirs, make):
    results = []
    for pipe in (theirs, ours):
        streamer = Streamer(pipe.get_tokenizer(), [make()])
        for _ in range(2):  # it is reset before each answer
            streamer.messages.clear()
            result = pipe.generate(PROMPTS[:1], streamer=streamer, **OPTIONS)
        results.append(
            (result.texts, result.parsed, str(result.finish_reasons[0]).split(".")[-1].lower(), streamer.messages)
        )
    assert results[0] == results[1]
    assert results[0][3]


def test_a_parsing_streamer_and_parsers_together(ours, theirs):
    expected, result = (
        pipe.generate(
            PROMPTS[:1], streamer=Streamer(pipe.get_tokenizer(), [Capitals()]), parsers=[Words()], **OPTIONS
        ).parsed
        for pipe in (theirs, ours)
    )
    assert result == expected
    assert result[0]["num_words"]


LLAMA = 'I call: {"type": "function", "function": {"name": "get_weather", "parameters": {"location": "New York, NY"}}}'
CASES = [
    (genai.Llama3JsonToolParser, LLAMA),
    (genai.Llama3JsonToolParser, "no call"),
    (genai.Llama3PythonicToolParser, '[get_weather(location="New York, NY", unit="celsius")]'),
    (genai.Phi4ReasoningParser, "<think>So.</think>Yes."),
    (genai.DeepSeekR1ReasoningParser, "So.</think>Yes."),
    (lambda: genai.VLLMParserWrapper(types.SimpleNamespace(extract_reasoning=lambda text, _: (text[:2], text[2:]))), "abcd"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text"), CASES)
def test_genais_parsers_find_what_they_find_without_a_pipeline(make, text):
    expected = {"content": text}
    make().parse(expected)
    with fake_pipeline(text, MAX_PROMPT_LEN=128, MIN_RESPONSE_LEN=128) as pipe:
        result = pipe.generate("Hello", parsers=[make()])
    assert result == text
    assert result.parsed == [expected]
    assert result.tool_calls == result.messages == []


def test_an_exception_in_a_parser_reaches_the_caller(ours):
    class Failing(genai.Parser):
        def parse(self, message):
            raise LookupError("nothing here")

    with pytest.raises(LookupError, match="nothing here"):
        ours.generate(PROMPTS[0], parsers=[Failing()], **OPTIONS)
    assert ours.generate(PROMPTS[0], **OPTIONS).parsed == []
