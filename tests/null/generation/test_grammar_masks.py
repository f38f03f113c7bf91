"""Tests the masks of grammars: every answer with random logits matches its grammar, and nothing else is forbidden."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.grammars import END, OTHER_SPECIAL, compiler_of, mask_of, random_answer, text_of
from support.quick import examples

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.grammar_mask import ForcedTokens
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler

pytest.importorskip("llguidance")
VOCAB = OTHER_SPECIAL + 1
COMPILER = compiler_of()


def allowed_tokens(mask):
    logits = np.zeros(VOCAB, np.float32)
    mask.process(logits)
    return set(np.flatnonzero(np.isfinite(logits)).tolist())


REGEXES = [
    r"^\{\"city\":\"(Dublin|Dubai|Munich)\"\}$",
    r"^[a-zA-Z0-9._%+-]{1,20}@[a-z]{1,20}\.[a-z]{1,10}$",
    r"a*",
    r"(ab|abc|abcd)*x",
    r"\d{4}-\d{2}-\d{2}",
    r"[^abc\s]{3,9}",
    r"é?(日本|the )+",
    r"(0|[1-9]\d*)(\.\d+)?",
    r"x{2,3}y{,2}|^z$",
    r"[a-z]*b[a-z]*",
    r"a/b//c",
    r"\"[^\"\\]*\"",
    r"(?:yes|no|maybe)(, (?:yes|no|maybe)){0,2}",
    r"[\[\]{}]{2}\\",
    r".{5}",
]


@pytest.mark.parametrize("pattern", REGEXES)
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_matches_its_regex(pattern, seed):
    tokens = random_answer(COMPILER, Grammar("regex", pattern), seed, prepares=True)
    assert tokens is not None, "the answer did not end"
    assert re.fullmatch(pattern, text_of(COMPILER, tokens), re.ASCII)


pieces = st.recursive(
    st.sampled_from(["a", "b", "[a-c]", "\\d", "the", "日", "[^a]"]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=examples(300))
@given(pattern=pieces, seed=st.integers(0, 1000))
def test_answers_match_any_regex(pattern, seed):
    tokens = random_answer(COMPILER, Grammar("regex", pattern), seed, max_tokens=4000, prepares=True)
    if tokens is not None:  # a repetition may go on for long
        assert re.fullmatch(pattern, text_of(COMPILER, tokens), re.ASCII)


@settings(deadline=None, max_examples=examples(100))
@given(
    choices=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_an_answer_is_one_of_the_choices(choices, seed):
    tokens = random_answer(COMPILER, Grammar("choice", json.dumps(choices)), seed)
    assert text_of(COMPILER, tokens) in choices


def test_every_choice_can_be_reached():
    choices = ["yes", "no", "maybe", "yes, maybe", "nothing"]
    found = {
        text_of(COMPILER, random_answer(COMPILER, Grammar("choice", json.dumps(choices)), seed)) for seed in range(80)
    }
    assert found == set(choices)


ARITHMETIC = """
root ::= expr
expr ::= term (("+" | "-") term)*
term ::= number | "(" expr ")"
number ::= "0" | [1-9] [0-9]{0,3}
"""
JSON = r"""
root ::= value
value ::= object | array | string | "true" | "false" | "null" | number
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array ::= "[" (value ("," value)*)? "]"
string ::= "\"" chars "\""
chars ::= "" | [^"\\\x00-\x1f] chars | "\\" ["\\/bfnrt] chars
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
"""
DATE = """
        root ::= date
        date ::= year "-" month "-" day
        year ::= digit digit digit digit
        month ::= digit digit
        day ::= digit digit
        digit ::= "0" | "1" | "2" | "3" | "4" | "5" | "6" | "7" | "8" | "9"
"""


def is_balanced(text):
    depth = 0
    for char in text:
        depth += {"(": 1, ")": -1}[char]
        if depth < 0:
            return False
    return depth == 0


@pytest.mark.parametrize(
    ("grammar", "is_right"),
    [
        (DATE, lambda text: re.fullmatch(r"\d{4}-\d{2}-\d{2}", text)),
        (ARITHMETIC, lambda text: re.fullmatch(r"[0-9+()-]+", text) and isinstance(eval(text), int)),
        (JSON, lambda text: json.loads(text) is not ...),
        ('root ::= word "b"\nword ::= [a-z]*', lambda text: re.fullmatch("[a-z]*b", text)),
        ('root ::= "(" root ")" root | ""', is_balanced),
        ("root ::= root [ab] | [c]", lambda text: re.fullmatch("c[ab]*", text)),
        ('root ::= ("yes" | "no"){2,3} "."', lambda text: re.fullmatch(r"(yes|no){2,3}\.", text)),
        (
            'start: greeting NAME\ngreeting: "hi " | "yo "\nNAME: /[A-Z][a-z]{1,4}/',
            lambda text: re.fullmatch("(hi|yo) [A-Z][a-z]{1,4}", text),
        ),
    ],
    ids=["date", "arithmetic", "json", "greedy", "balanced", "left", "counted", "lark"],
)
@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_a_sentence_of_its_grammar(grammar, is_right, seed):
    kind = "lark" if grammar.startswith("start:") else "ebnf"
    tokens = random_answer(COMPILER, Grammar(kind, grammar), seed, num_free=30, prepares=True)
    assert tokens is not None, "the answer did not end"
    assert is_right(text_of(COMPILER, tokens))


@pytest.mark.parametrize("prefix", ["", "y", "ye", "yes", "n", "no", "noth"])
def test_masks_forbid_nothing_that_may_follow(prefix):
    choices = ["yes", "yesterday", "no", "nothing", "日本"]
    mask = mask_of(COMPILER, Grammar("choice", json.dumps(choices)))
    for token in prefix.encode():
        mask.accept(token)
    data = prefix.encode()
    rests = {choice.encode()[len(data) :] for choice in choices if choice.encode().startswith(data)}
    expected = {
        id for id, text in enumerate(COMPILER.vocabulary.tokens) if id < END and any(r.startswith(text) for r in rests)
    }
    expected |= {END} if b"" in rests else set()
    forced = mask.forced_tokens(1)
    assert allowed_tokens(mask) == (set(forced) if forced else expected)
    if len(rests) > 1 and not prefix:
        assert not forced


def test_forced_tokens_are_proposed_and_the_only_allowed_ones():
    schema = {
        "type": "object",
        "properties": {"name": {"const": "the city"}, "age": {"type": "null"}},
        "required": ["name", "age"],
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    mask = mask_of(COMPILER, grammar)
    drafter = ForcedTokens(mask, list)
    num_forced, tokens = 0, []
    while tokens[-1:] != [END]:
        draft = drafter.propose(tokens, 8)
        for token in draft:
            assert allowed_tokens(mask) == {token}
            mask.accept(token)
            tokens.append(token)
        num_forced += len(draft)
        if not draft:
            token = min(allowed_tokens(mask), key=lambda id: (id in range(9, 33), id))  # no spaces
            mask.accept(token)
            tokens.append(token)
    assert json.loads(text_of(COMPILER, tokens[:-1])) == {"name": "the city", "age": None}
    assert num_forced >= 4
    assert drafter.propose(tokens, 0) == []


def test_a_clone_goes_on_by_itself():
    mask = mask_of(COMPILER, Grammar("choice", '["yes", "no", "name"]'))
    mask.accept(ord("n"))
    copy = mask.clone()
    mask.accept(ord("o"))
    assert allowed_tokens(mask) == {END}
    assert ord("a") in allowed_tokens(copy)
    copy.accept(ord("a"))
    assert END not in allowed_tokens(copy)
    assert allowed_tokens(mask) == {END}


def test_only_special_stop_tokens_wait_for_the_end():
    """The answer may be cut at a stop token that is text wherever the grammar allows this text."""
    mask = mask_of(COMPILER, Grammar("regex", "ab*c"), stop_token_ids=(ord("b"), END, OTHER_SPECIAL))
    assert ord("a") in allowed_tokens(mask)
    assert not {END, OTHER_SPECIAL} & allowed_tokens(mask)
    mask.accept(ord("a"))
    assert ord("b") in allowed_tokens(mask)
    mask.accept(ord("c"))
    assert allowed_tokens(mask) == {END, OTHER_SPECIAL}
    with pytest.raises(GenerationConfigError, match="without a token that ends the answer"):
        mask_of(COMPILER, Grammar("regex", "a"), stop_token_ids=(ord("b"),))


def test_ids_beyond_the_tokenizer_are_forbidden():
    compiler = compiler_of()
    mask = mask_of(compiler, Grammar("regex", "(?s:.*)"), vocab_size=VOCAB + 50)
    logits = np.zeros(VOCAB + 50, np.float32)
    mask.process(logits)
    assert np.isneginf(logits[VOCAB:]).all()
    assert np.isfinite(logits[ord("a")])
    fewer = mask_of(compiler, Grammar("regex", "(?s:.*)"), vocab_size=VOCAB - 1)
    fewer.process(np.zeros(VOCAB - 1, np.float32))


def test_with_penalties_minimum_and_log_probabilities():
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5, wants_logprobs=True)
    from staticllm.pipelines.generation.logits_processors import processors_for

    mask = mask_of(COMPILER, Grammar("regex", "(yes|no)+"))
    processors = processors_for(params, [1, 2], VOCAB, min_new_tokens=4, late_token_ids=[END])
    sampler, rng, text = Sampler(params, [*processors, mask], np.random.default_rng(0)), np.random.default_rng(1), b""
    for _ in range(40):
        logits = rng.normal(0, 1, VOCAB).astype(np.float32)
        logits[END] = 9.0
        choice = sampler.sample(logits)
        expected = logits[choice.token] - np.log(np.exp(logits.astype(np.float64)).sum())
        assert choice.logprob == pytest.approx(expected, abs=1e-4)
        if choice.token == END:
            break
        text += COMPILER.vocabulary.tokens[choice.token]
    assert len(text) >= 4
    assert re.fullmatch(b"(yes|no)+", text)


def test_no_token_left_is_an_error_of_one_line():
    mask = mask_of(COMPILER, Grammar("choice", '["yes"]'))
    from staticllm.pipelines.generation.logits_processors import processors_for

    processors = processors_for(SamplingParams(), [1], VOCAB, min_new_tokens=50, late_token_ids=[END])
    sampler = Sampler(SamplingParams(), [*processors, mask], np.random.default_rng(0))
    with pytest.raises(GenerationConfigError, match=r"no token can be chosen.*lower min_new_tokens"):
        for _ in range(9):
            sampler.sample(np.zeros(VOCAB, np.float32))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("lark", "start: x"), "cannot be compiled"),
        (Grammar("json_schema", '{"type": "spam"}'), "cannot be compiled"),
        (Grammar("json_schema", '{"type": "string", "pattern": "(?=a)b"}'), "cannot be compiled"),
        (Grammar("json_schema", "false"), "which nothing satisfies"),
        (Grammar("regex", "(?<=a)b"), "cannot be compiled"),
        (Grammar("ebnf", "root"), "malformed"),
        (Grammar("choice", "[1]"), "must be a list of str"),
        (Grammar("spam", "x"), "kind 'spam'"),
    ],
)
def test_grammars_that_cannot_be_compiled_are_one_line_errors(grammar, message):
    with pytest.raises(GenerationConfigError, match=message) as error:
        COMPILER.matcher(grammar, VOCAB)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_an_answer_that_cannot_end_in_time_is_refused():
    grammar = Grammar("choice", '["the the the the", "日本日本日本"]')
    COMPILER.matcher(grammar, VOCAB, 3)
    with pytest.raises(GenerationConfigError, match=r"max_new_tokens=2 leaves no room .* at least 3 tokens"):
        COMPILER.matcher(grammar, VOCAB, 2)
    with pytest.raises(GenerationConfigError, match="no answer of this grammar"):
        COMPILER.matcher(Grammar("ebnf", 'root ::= "a" root "b"'), VOCAB, 100)


def test_masks_that_were_prepared_are_the_same():
    grammar = Grammar("regex", REGEXES[1])
    for seed in range(5):
        plain = random_answer(COMPILER, grammar, seed)
        mask = mask_of(COMPILER, grammar)
        for token in plain:
            mask.prepare()
            mask.prepare()
            assert token in allowed_tokens(mask)
            mask.accept(token)


def test_without_the_library_the_error_names_the_command(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        GenerationConfigError, match=r"cannot be imported \(.*llguidance.*\): pip install llguidance; a frozen"
    ) as error:
        compiler_of().matcher(Grammar("regex", "a"), VOCAB)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


TAG = {"type": "tag", "begin": "<f>", "content": {"type": "const_string", "value": "A"}, "end": "</f>"}
SOURCES = {
    "ebnf": 'root ::= "a" | [0-9]+ other\nother ::= ("x"){2,3}',
    "regex": "[a-z]{1,3}(foo|bar)*",
    "json_schema": '{"type":"object","properties":{"a":{"type":"string"}}}',
    "structural_tag": json.dumps({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}),
    "lark": 'start: A B\nA: /x/\nB: "y"',
    "choice": '["a","b"]',
}
damages = st.tuples(st.integers(0, 99), st.integers(0, 1), st.sampled_from('(){}[]|*+?\\"^$.a1:=-<>/\n{},é\x00'))


@settings(deadline=None, max_examples=examples(800))
@given(
    kind=st.sampled_from(sorted(SOURCES)), changes=st.lists(damages, min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_a_damaged_grammar_works_or_is_an_error_of_one_line(kind, changes, seed):
    text = SOURCES[kind]
    for drawn, num_removed, char in changes:
        place = drawn % (len(text) + 1)
        text = text[:place] + char + text[place + num_removed :]
    rng = np.random.default_rng(seed)
    try:
        mask = mask_of(COMPILER, Grammar(kind, text), max_new_tokens=50)
        for _ in range(4):
            logits = rng.normal(size=VOCAB).astype(np.float32)
            mask.process(logits)
            token = int(logits.argmax())
            assert np.isfinite(logits[token])
            mask.accept(token)
            if token == END:
                break
    except GenerationConfigError as error:
        assert "\n" not in str(error)
