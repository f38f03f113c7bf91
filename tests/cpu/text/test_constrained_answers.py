"""Tests that what a grammar wrote is the content of an answer, byte for byte, in every format and however it is split."""

import json
import random
from dataclasses import replace

import openvino_genai as genai
import pytest
from support.calls import LEARNT
from support.engine.grammars import END, compiler_of, mask_of, text_of

from staticllm.errors import GenerationConfigError
from staticllm.events import message_of
from staticllm.pipelines.conversation.formats import BLOCK, REASONING_TAGS, TAGS, MessageFormat
from staticllm.pipelines.conversation.headed_messages import ARROWS, TAGGED
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.conversation.required_calls import answer_grammar, is_content
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.options.resolve import resolve
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler

np = pytest.importorskip("numpy")
CALL_FORMATS = [
    MessageFormat(), MessageFormat("tagged", TAGS[0]), *LEARNT.values(),
    MessageFormat("fenced", BLOCK), MessageFormat("python", BLOCK), MessageFormat("python"), MessageFormat("bare_json"),
    MessageFormat("tagged", ("[TOOL_CALLS]", ""), is_list=True), MessageFormat("bare_json", ("<|python_tag|>", "")),
    MessageFormat("harmony"), MessageFormat("recipients", ARROWS), MessageFormat("recipients", ARROWS, is_call_open=True),
    MessageFormat("recipients", TAGGED),
]  # fmt: skip
FORMATS = [
    replace(each, reasoning=reasoning, is_reasoning_open=is_open)
    for each in CALL_FORMATS
    for reasoning, is_open in (
        (("", ""), False),
        *((tags, True) for tags in REASONING_TAGS),
        (REASONING_TAGS[0], False),
    )
    if each.syntax not in ("harmony", "recipients") or not reasoning[0]
]
TOOLS = [{"type": "function", "function": {"name": "Ada", "parameters": {"type": "object"}}}]
LEAK = '{"name": "Ada", "parameters": {"born": 1815}}'
TEXTS = [
    "", " ", "\n", " a ", LEAK, f" {LEAK}\n", "Ada(born=1815)", "[Ada(born=1815)]", "a <think>b</think> c", "<think>b</think>",
    "<think>\n", "</think>\n\n", *(f"x {begin}b{end} y" for begin, end in REASONING_TAGS),
    *(f"{begin}{LEAK}{end}" for begin, end in (*TAGS, ("[TOOL_CALLS]", ""), BLOCK)),
    f"<｜tool▁calls▁begin｜>{LEAK}<｜tool▁calls▁end｜>", f"[TOOL_CALLS][{LEAK}]",
    "<function=Ada><parameter=born>1815</parameter></function>", "Ada<arg_key>born</arg_key>", "\n>>>Ada\n{}", "all\n",
    ">>>all\n", "<|channel|>final<|message|>x", "<|start|>assistant<|channel|>analysis<|message|>x<|end|>",
    "<|from|>assistant\n<|recipient|>Ada",
]  # fmt: skip


def parsed(format, text, tools, seed):
    """Return the message of a constrained answer that arrives in random pieces."""
    parser, rng, events = MessageParser(format, tools, is_content=True), random.Random(seed), []
    while text:
        count = rng.randint(1, 5)
        events += parser.push(text[:count])
        text = text[count:]
    return message_of([*events, *parser.finish()])


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: f"{each.syntax or 'plain'} {each.reasoning[0]}")
def test_the_text_of_a_grammar_is_the_content(format):
    lead = format.opening + ("Let me see." + format.reasoning_end if format.reasoning_end else "")
    for seed, text in enumerate(TEXTS):
        for tools in ([], TOOLS):
            message = parsed(format, lead + text, tools, seed)
            assert message.content == text
            assert message.reasoning_content == ("Let me see." if format.reasoning_end else "")
            assert not message.tool_calls


@pytest.mark.parametrize("format", FORMATS, ids=lambda each: f"{each.syntax or 'plain'} {each.reasoning[0]}")
def test_an_answer_that_is_cut_off_before_the_grammar_begins_has_no_content(format):
    lead = format.opening + ("Let me see." + format.reasoning_end if format.reasoning_end else "")
    for length in range(len(lead)):
        message = parsed(format, lead[:length], TOOLS, length)
        assert not message.content
        assert "Let me see.".startswith(message.reasoning_content)


def options(**given):
    config = genai.GenerationConfig()
    config.max_new_tokens = 50
    return resolve(config, given)


THINKING = MessageFormat("tagged", TAGS[0], ("<think>", "</think>"), is_reasoning_open=True)


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"const": 1}},
        {"regex": "a"},
        {"choice": ["a"]},
        {"grammar": 'root ::= "a"'},
        {"grammar": 'start: "a"'},
    ],
)
def test_every_kind_of_grammar_comes_after_the_reasoning_that_the_prompt_began(given):
    found = answer_grammar(THINKING, options(**given))
    assert (found.opening, found.reasoning_end) == ("", "</think>\n\n")
    assert found.proper == options(**given).grammar
    assert answer_grammar(None, options(**given)) == found.proper  # an answer that is not parsed is all the grammar's


def test_a_structural_tag_governs_the_format_itself():
    tag = {
        "type": "tag",
        "begin": "<tool_call>",
        "content": {"type": "json_schema", "json_schema": {}},
        "end": "</tool_call>",
    }
    fixed = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    free = Grammar("structural_tag", json.dumps({"type": "triggered_tags", "triggers": ["<tool"], "tags": [tag]}))
    assert is_content(options(grammar=fixed))
    assert not is_content(options(grammar=fixed, tools=TOOLS))
    assert not is_content(options(grammar=free))
    assert is_content(options(json_schema={}, tools=TOOLS))
    assert not is_content(options(tools=TOOLS))


LEADS = [("", ""), ("", "</f>\n\n"), ("", "<other>"), ("ab<other>", "</f><other>the"), ("name\n", ""),
         ("<|channel|>analysis<|message|>", "<|end|>")]  # fmt: skip


@pytest.mark.parametrize(("opening", "end"), LEADS)
@pytest.mark.parametrize("kind", ["choice", "json_schema", "regex", "lark"])
def test_reasoning_leaves_room_for_the_answer(opening, end, kind):
    text = {
        "choice": '["yes, or no"]',
        "json_schema": '{"const": "a <think> b"}',
        "regex": "[ab]{7}",
        "lark": 'start: "maybe 12"',
    }[kind]
    compiler = compiler_of()
    grammar = Grammar(kind, text, opening, end)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        limit = int(rng.integers(30, 60)) + len(opening)
        mask = mask_of(compiler, grammar, max_new_tokens=limit)
        sampler, tokens = Sampler(SamplingParams(do_sample=True), [mask], np.random.default_rng(seed)), []
        while len(tokens) < limit:
            forced = mask.forced_tokens(3) if rng.random() < 0.5 else []
            logits = rng.normal(0, 2, END + 2).astype(np.float32)
            logits[END] += 9  # the model would rather stop
            token = sampler.sample(logits, int(logits.argmax())).token
            assert not forced or token == forced[0]
            if token == END:
                break
            tokens.append(token)
        answer = text_of(compiler, tokens)
        assert answer.startswith(opening)
        reasoning, found, proper = answer[len(opening) :].rpartition(end) if end else ("", "", answer[len(opening) :])
        assert found == end
        assert len(tokens) < limit, "it ended before the limit"
        assert end.rstrip() not in reasoning or not end
        expected = {"choice": "yes, or no", "json_schema": '"a <think> b"', "lark": "maybe 12"}
        assert proper == expected[kind] if kind in expected else len(proper) == 7


def test_a_copy_of_an_answer_within_its_reasoning_goes_on_by_itself():
    compiler = compiler_of()
    mask = mask_of(compiler, Grammar("choice", '["yes"]', "", "</f>"), max_new_tokens=20)
    first, second = mask, mask.clone()
    rest = compiler.vocabulary.encode("a</f>yes")
    for token in rest:
        first.forced_tokens(1)
        first.accept(token)
    logits = np.zeros(END + 2, np.float32)
    first.process(logits)
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [END]
    logits = np.zeros(END + 2, np.float32)
    second.process(logits)
    assert np.isfinite(logits[compiler.vocabulary.encode("b")[0]])
    assert not np.isfinite(logits[END])


@pytest.mark.parametrize(
    "text", ["Use <think> here.", "a <think>b</think> c", "x\n<think>\nb</think>", "1 < 2 <think>"]
)
def test_markers_of_reasoning_count_only_before_all_else(text):
    parser = MessageParser(MessageFormat("tagged", TAGS[0], ("<think>", "</think>")), TOOLS)
    message = message_of([*parser.push(text), *parser.finish()])
    assert (message.content, message.reasoning_content) == (text, "")


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_before_all_else_is_found(is_open):
    format = MessageFormat("tagged", TAGS[0], ("<think>", "</think>"), is_reasoning_open=is_open)
    for begin in ("<think>", "\n <think>\n", *(("", "\n") if is_open else ())):
        parser = MessageParser(format, TOOLS)
        message = message_of([*parser.push(f"{begin}a <b> c</think>\n\nUse <think> here."), *parser.finish()])
        assert (message.content, message.reasoning_content) == ("Use <think> here.", "a <b> c")


def test_no_limit_loses_the_opening_or_the_answer():
    compiler = compiler_of()
    grammar = Grammar("choice", '["yes"]', "<|channel|>a<|message|>", "<|end|><|start|>")
    for limit in range(1, 90):
        try:
            mask = mask_of(compiler, grammar, max_new_tokens=limit)
        except GenerationConfigError as error:
            assert limit < 45
            assert "leaves no room" in str(error)
            continue
        sampler, tokens = Sampler(SamplingParams(do_sample=True), [mask], np.random.default_rng(limit)), []
        rng = np.random.default_rng(limit)
        while len(tokens) < limit:
            mask.forced_tokens(2)
            logits = rng.normal(0, 2, END + 2).astype(np.float32)
            token = sampler.sample(logits, int(logits.argmax())).token
            if token == END:
                break
            tokens.append(token)
        answer = text_of(compiler, tokens)
        assert answer.startswith(grammar.opening)
        assert answer.endswith("<|end|><|start|>yes")
