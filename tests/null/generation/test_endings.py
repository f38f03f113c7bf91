"""Tests that answers with a grammar end within their tokens, and that the rule acts no earlier than it must."""

from __future__ import annotations

import json
import re
import zipfile

import numpy as np
import pytest
from support.engine.grammars import CLOSERS, END, OTHER_SPECIAL, compiler_of, small_vocabulary

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.grammar_mask import GrammarLimitError, GrammarMask
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler
from staticllm.pipelines.grammars.compiler import GrammarCompiler
from staticllm.pipelines.grammars.endings import GrammarEndings
from staticllm.pipelines.grammars.vocabulary import Vocabulary

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
VOCAB = OTHER_SPECIAL + 1
COMPILER = compiler_of()
DRAWN = SamplingParams(do_sample=True)


def object_of(properties, *required, **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


PERSON = object_of(
    {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 128},
        "city": {"enum": ["Dublin", "Dubai", "Munich"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 5},
        "address": object_of({"street": {"type": "string"}, "number": {"type": "integer"}}, "street", "number"),
    },
    "name", "age",
)  # fmt: skip
LEAF = {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": object_of(
            {"value": {"type": "number"}, "left": LEAF, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "value"
        )
    },
}  # fmt: skip
TAGGED = [
    object_of({"kind": {"const": "a"}, "x": {"type": "integer"}}, "kind", "x"),
    object_of({"kind": {"const": "bb"}, "y": {"type": "string", "format": "date"}}, "kind", "y"),
]
SCHEMAS = {
    "person": PERSON, "tree": TREE, "options": {"anyOf": TAGGED}, "integer": {"type": "integer"}, "anything": {},
    "object": {"type": "object"}, "long text": {"type": "string", "minLength": 5},
    "text": {"type": "string", "pattern": "^[a-z]{3}-[0-9]{4}$"}, "values": {"enum": ["yes", "no", 12]},
    "matrix": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 2},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "all": {"allOf": [object_of({"a": {"type": "number", "minimum": 10}}, "a"), object_of({"b": {"type": "boolean"}}, "b")]},
}  # fmt: skip
REGEXES = (
    "[a-c]{2,600}", r"\d{2}-\d{2}", "(yes|no|maybe)(, (yes|no)){0,200}", '{"(name|age)":[0-9]{1,30}}', "日本é*", "(?s:.)*x",
    r"[a-zA-Z0-9._%+-]{1,64}@[a-z]{1,64}\.[a-z]{2,10}", r"(a[0-9]{5}|b[0-9]{2})+x", "[^<]{3,}</f>",
)  # fmt: skip
ARITHMETIC = 'root ::= expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" expr ")"\n'
BRACKETS = 'root ::= "(" root ")" | "[" root "]" | "x"'
PAIRS = {")": "(", "]": "["}


def is_bracketed(text):
    """Return whether a text is of the grammar ``BRACKETS``."""
    middle = text.find("x")
    opened, closed = text[:middle], text[middle + 1 :]
    return middle >= 0 and [PAIRS[char] for char in reversed(closed)] == list(opened)


def is_sum(text):
    """Return whether a text is of the grammar ``ARITHMETIC``: numbers and sums in brackets, without signs before numbers."""
    while (shorter := re.sub(r"\((\d+([+-]\d+)*)\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(r"\d+([+-]\d+)*", text) is not None


def tag(content, begin="<f>", end="</f>"):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALL = tag({"type": "json_schema", "json_schema": PERSON})
REQUIRED = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [CALL],
    "at_least_one": True,
    "stop_after_first": True,
}
FREE = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}


def is_of_schema(schema):
    def check(text):
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


def is_call(text):
    return is_of_schema(PERSON)(text.removeprefix("<f>").removesuffix("</f>"))


def grammar_of(kind, value):
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value))


CASES = {
    **{name: (grammar_of("json_schema", schema), is_of_schema(schema)) for name, schema in SCHEMAS.items()},
    **{regex: (Grammar("regex", regex), re.compile(regex).fullmatch) for regex in REGEXES},
    "choice": (grammar_of("choice", ["yes", "no", "maybe"]), {"yes", "no", "maybe"}.__contains__),
    "sums": (Grammar("ebnf", ARITHMETIC), is_sum),
    "brackets": (Grammar("ebnf", BRACKETS), is_bracketed),
    "lark": (Grammar("lark", 'start: a\na: "<" a ">" | /[0-9]+/ "."'), re.compile(r"<*[0-9]+\.>*").fullmatch),
    "call": (grammar_of("structural_tag", REQUIRED), is_call),
}


def mask_for(grammar, longest, compiler=COMPILER, finishes=True, vocab_size=VOCAB):
    matcher = compiler.matcher(grammar, vocab_size, longest, finishes)
    special = compiler.vocabulary.special
    return GrammarMask(matcher, (END,), special, vocab_size, compiler.times, longest if finishes else None)


def answer_of(grammar, seed, longest, finishes=True, compiler=COMPILER, closes=0.0):
    """Return the tokens of an answer with random logits, with its end token if it wrote one, and whether it is whole.

    Half of the answers ask for forced tokens first, as drafts do. ``closes`` is added to the logits of what closes something.
    """
    mask = mask_for(grammar, longest, compiler, finishes)
    rng = np.random.default_rng([seed, 7])
    sampler = Sampler(DRAWN, [mask], np.random.default_rng(seed))
    tokens = []
    while len(tokens) < longest and (not tokens or tokens[-1] != END):
        logits = rng.normal(0, 2, VOCAB).astype(np.float32)
        logits[list(CLOSERS)] += closes
        if seed % 2:
            mask.forced_tokens(8)
        tokens.append(sampler.sample(logits).token)
    return tokens, tokens[-1] == END or mask.is_whole


def text_of(tokens, compiler=COMPILER):
    return b"".join(compiler.vocabulary.tokens[token] for token in tokens if token != END).decode()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("longest", [26, 40])
def test_every_answer_is_whole_within_its_tokens(name, longest):
    grammar, is_right = CASES[name]
    for seed in range(4):
        tokens, is_whole = answer_of(grammar, seed, longest)
        assert is_whole
        assert is_right(text_of(tokens)), text_of(tokens)


@pytest.mark.slow
def test_a_thousand_answers_of_16_to_64_tokens():
    num_answers = 0
    for name, (grammar, is_right) in CASES.items():
        for seed in range(40):
            longest = 16 + (seed * 7) % 49
            try:
                tokens, is_whole = answer_of(grammar, seed + 1000, longest)
            except GenerationConfigError as error:
                assert "leaves no room" in str(error)
                assert (name, longest < 26) in (("call", True), ("all", True))
                continue
            assert is_whole, (name, seed)
            assert is_right(text_of(tokens)), (name, seed, text_of(tokens))
            num_answers += 1
    assert num_answers >= 1000, num_answers


def test_without_the_rule_answers_are_cut_off():
    """The grammars are such that random answers often do not end in time."""
    found = [answer_of(grammar, seed, 40, finishes=False)[1] for grammar, _ in CASES.values() for seed in range(4)]
    assert sum(found) < 0.75 * len(found)


def test_answers_that_end_anyway_are_the_same_tokens():
    """Their last tokens are refused only where a shorter way to the end is not known to be one: never with a token to spare."""
    num_answers = 0
    num_changed = 0
    for name, (grammar, _) in CASES.items():
        for seed in range(12):
            tokens, _ = answer_of(grammar, seed, 300, finishes=False, closes=3.0)
            if tokens[-1] != END or len(tokens) < 4:
                continue
            for spare in (0, 1, 40):
                try:
                    found, _ = answer_of(grammar, seed, len(tokens) + spare, closes=3.0)
                except GenerationConfigError as error:  # the tokens of the shortest known answer are more
                    assert name in ("text", r"\d{2}-\d{2}"), str(error)
                    assert spare < 40
                    continue
                if spare:
                    assert found == tokens, (name, seed, spare)
                num_changed += found != tokens
                num_answers += not spare
    assert num_answers > 150
    assert num_changed <= 0.04 * num_answers, (num_changed, num_answers)


def distance_of(text):
    """Return the fewest tokens after a beginning of a text of ``BRACKETS`` up to its end; each bracket is a token."""
    opened = len(re.findall(r"[(\[]", text))
    closed = len(re.findall(r"[)\]]", text))
    return opened - closed + ("x" not in text)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("longest", [1, 2, 7, 16, 33])
def test_exactly_the_tokens_that_leave_no_room_are_refused(seed, longest):
    """The vocabulary has ``[]``, which the grammar never allows, and no other token of two brackets."""
    grammar = CASES["brackets"][0]
    mask = mask_for(grammar, longest)
    rng = np.random.default_rng(seed)
    text = ""
    for num_left in range(longest - 1, -1, -1):
        allowed = np.zeros(VOCAB, np.float32)
        mask.process(allowed)
        tokens = np.flatnonzero(np.isfinite(allowed)).tolist()
        if tokens == [END]:
            break
        after = {token: distance_of(text + COMPILER.vocabulary.tokens[token].decode()) for token in tokens}
        refused = {token for token in tokens if mask.refuses(token)}
        assert refused == {token for token, distance in after.items() if distance > num_left}
        token = int(rng.choice(sorted(set(tokens) - refused)))
        mask.accept(token)
        text += COMPILER.vocabulary.tokens[token].decode()
    assert mask.is_whole
    assert is_bracketed(text)


def test_a_schema_of_the_official_suite_is_kept_within_its_tokens(root):
    num_answers = 0
    with zipfile.ZipFile(root / "tests" / "_json_schema_suite" / "draft2020-12.zip") as archive:
        groups = [
            group for name in archive.namelist() if name.endswith(".json") for group in json.loads(archive.read(name))
        ]
    for number, group in enumerate(groups):
        grammar = grammar_of("json_schema", group["schema"])
        try:
            COMPILER.matcher(grammar, VOCAB)
        except GenerationConfigError:  # a keyword that is not supported
            continue
        tokens, is_whole = answer_of(grammar, number, 24 + number % 41)
        assert is_whole, group["description"]
        value = json.loads(text_of(tokens))
        if "$dynamic" not in json.dumps(group["schema"]):
            jsonschema.validate(value, group["schema"])
        num_answers += 1
    assert num_answers >= 190


def num_calls_of(text):
    """Return the number of calls in a text, after a check that each is whole and right."""
    num_calls = 0
    while (start := text.find("<f")) >= 0:
        assert text.startswith("<f>", start)
        value, end = json.JSONDecoder().raw_decode(text, start + 3)
        jsonschema.validate(value, PERSON)
        assert text.startswith("</f>", end)
        text = text[end + 4 :]
        num_calls += 1
    return num_calls


@pytest.mark.parametrize("longest", [16, 30, 45, 64])
def test_a_tag_in_free_text_is_begun_only_if_it_can_be_closed(longest):
    """Free text itself may be cut off."""
    num_calls = 0
    for seed in range(30):
        mask = mask_for(grammar_of("structural_tag", FREE), longest)
        rng = np.random.default_rng(seed)
        sampler = Sampler(DRAWN, [mask], np.random.default_rng(seed))
        tokens = []
        while len(tokens) < longest and (not tokens or tokens[-1] != END):
            logits = rng.normal(0, 2, VOCAB).astype(np.float32)
            logits[256 + 27] += 6 * (rng.random() < 0.2)  # "<f"
            logits[ord(">")] += 6
            tokens.append(sampler.sample(logits).token)
        data = b"".join(COMPILER.vocabulary.tokens[token] for token in tokens if token != END)
        num_calls += num_calls_of(data.decode(errors="replace"))
    assert num_calls > 3


@pytest.mark.parametrize(("longest", "finishes"), [(24, True), (40, True), (90, True), (24, False)])
def test_reasoning_before_an_answer_leaves_room_for_it(longest, finishes):
    grammar = Grammar("json_schema", json.dumps(TREE), "ab", "</the")
    found = []
    for seed in range(12):
        tokens, is_whole = answer_of(grammar, seed, longest, finishes)
        found.append(is_whole)
        if is_whole:
            lead, _, text = text_of(tokens).partition("</the")
            assert lead.startswith("ab")
            assert is_of_schema(TREE)(text)
    assert all(found) == finishes


def vocabulary_of(texts, longest=64):
    """Return a vocabulary of these texts, in the ids of the small one; all other ids mean nothing.

    Its tokenizer takes the longest token at each place, of at most ``longest`` characters.
    """
    pattern = re.compile(
        "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if len(text) <= longest)
    )
    small = small_vocabulary()
    tokens = [b""] * END
    tokens[: len(texts)] = [text.encode() for text in texts]
    tokens += [b"<end>", b"<other>"]
    return Vocabulary(tuple(tokens), small.special, END, lambda text: list(map(texts.index, pattern.findall(text))))


def test_texts_for_which_the_vocabulary_has_no_tokens_are_no_ending():
    """A string can be closed only together with its object, and the shortest number has no token."""
    compiler = GrammarCompiler(lambda: vocabulary_of(['{"a":"', "b", "c", '"}', '{"n":', "1", "2", "}"]))
    text = Grammar("regex", r'\{"a":"[^"]*"\}')
    number = Grammar("regex", r'\{"n":[0-9]+\}')
    for seed in range(8):
        tokens, is_whole = answer_of(text, seed, 6, compiler=compiler)
        assert is_whole
        assert isinstance(json.loads(text_of(tokens, compiler))["a"], str)
        tokens, is_whole = answer_of(number, seed, 6, compiler=compiler)
        assert is_whole
        assert json.loads(text_of(tokens, compiler))["n"] > 0


def test_forced_tokens_do_not_take_the_room_of_shorter_ones():
    """The tokenizer writes each character as a token, and the vocabulary has one token for all of them."""
    texts = [*"abcdefghij", "bcdefgh"]
    compiler = GrammarCompiler(lambda: vocabulary_of(texts, 1))
    for longest, expected in ((3, ["a", "bcdefgh", "i"]), (4, None), (9, list("abcdefghi"))):
        mask = mask_for(Grammar("choice", '["abcdefghi"]'), longest, compiler)
        tokens = []
        while not mask.is_whole:
            forced = mask.forced_tokens(9)
            logits = np.zeros(VOCAB, np.float32)
            mask.process(logits)
            (token,) = forced[:1] or [next(t for t in np.argsort(-logits).tolist() if not mask.refuses(t))]
            mask.accept(token)
            tokens.append(token)
        assert len(tokens) <= longest
        assert "".join(texts[token] for token in tokens) == "abcdefghi"
        assert expected is None or [texts[token] for token in tokens] == expected


@pytest.mark.parametrize(
    ("grammar", "fewest"),
    [
        (grammar_of("choice", ["yes"]), 1), (Grammar("regex", "[0-9]{3}x"), 4), (Grammar("regex", "yes[0-9]*"), 2),
        (grammar_of("json_schema", {"type": "array", "items": {"type": "null"}, "minItems": 3}), 7),
        (Grammar("lark", 'start: "(" start ")" | "yes"'), 1),
    ],
)  # fmt: skip
def test_what_does_not_fit_at_all_is_refused_at_once(grammar, fewest):
    """The end of an answer counts where more could follow."""
    for seed in range(4):
        tokens, is_whole = answer_of(grammar, seed, fewest)
        assert is_whole
        assert len(tokens) <= fewest
    if fewest > 1:
        with pytest.raises(GenerationConfigError, match=f"max_new_tokens={fewest - 1} leaves no room") as error:
            mask_for(grammar, fewest - 1)
        assert "\n" not in str(error.value)


def test_the_largest_logit_of_the_fitting_tokens_is_chosen_greedily():
    mask = mask_for(Grammar("regex", "[a-c]*x"), 4)
    sampler = Sampler(SamplingParams(), [mask], np.random.default_rng(0))
    logits = np.zeros(VOCAB, np.float32)
    logits[[ord("b"), ord("a"), 256 + 16]] = (3, 2, 5)  # "abc" is the best
    found = [sampler.sample(logits).token for _ in range(4)]
    assert found == [256 + 16, 256 + 16, ord("x"), END] or found == [256 + 16, 256 + 16, 256 + 16, ord("x")]


@pytest.mark.parametrize("longest", [60, 301])
def test_an_answer_that_opens_whatever_it_can_is_closed(longest):
    """Far from the limit, the ending is looked for only sometimes; each bracket moves it further away."""
    mask = mask_for(CASES["brackets"][0], longest)
    sampler = Sampler(SamplingParams(), [mask], np.random.default_rng(0))
    logits = np.zeros(VOCAB, np.float32)
    logits[ord("(")] = 9
    tokens = []
    while not mask.is_whole:
        tokens.append(sampler.sample(logits).token)
        assert len(tokens) <= longest
    num_opened = (longest - 1) // 2
    assert text_of(tokens) == "(" * num_opened + "x" + ")" * num_opened


def test_a_forbidden_way_out_ends_nothing():
    """Where another processor forbids what would end the answer, it goes on, and is cut off."""

    class Forbids:
        is_active = True
        remedy = "ask for less"

        def process(self, logits):
            logits[ord("x")] = -np.inf

        def accept(self, token):
            pass

    mask = mask_for(Grammar("regex", "[a-c]*x"), 6)
    sampler = Sampler(DRAWN, [Forbids(), mask], np.random.default_rng(0))
    tokens = [sampler.sample(np.zeros(VOCAB, np.float32)).token for _ in range(6)]
    assert re.fullmatch("[a-c]+", text_of(tokens))
    assert not mask.is_whole


class CountingMatcher:
    """A matcher of llguidance that counts the symbols that it and its copies follow."""

    def __init__(self, inner, counts):
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def deep_copy(self):
        return CountingMatcher(self._inner.deep_copy(), self._counts)

    def validate_tokens(self, symbols):
        num_valid = self._inner.validate_tokens(symbols)
        self._counts[-1] += 1 + num_valid
        return num_valid


LONG_LISTS = {
    "numbers": ({"type": "array", "items": {"type": "integer"}, "minItems": 400}, 1200),
    "objects": ({"type": "array", "items": object_of({"a": {"type": "string"}}, "a"), "minItems": 80}, 1500),
    "text": (object_of({"t": {"type": "string", "minLength": 900}}, "t"), 1100),
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_no_token_takes_long_however_far_the_end_is(name, monkeypatch):
    """The engine's thread searches for endings, so that all requests wait for it. Following a symbol takes about 0.2 us."""
    counts = [0]
    own = GrammarEndings._matcher
    monkeypatch.setattr(GrammarEndings, "_matcher", lambda *given: CountingMatcher(own(*given), counts))
    schema, longest = LONG_LISTS[name]
    mask = mask_for(grammar_of("json_schema", schema), longest, compiler_of())
    sampler = Sampler(DRAWN, [mask], np.random.default_rng(1))
    rng = np.random.default_rng(2)
    tokens = []
    while len(tokens) < longest and not mask.is_whole and tokens[-1:] != [END]:
        counts.append(0)
        logits = rng.normal(0, 2, VOCAB).astype(np.float32)
        logits[list(CLOSERS)] -= 6
        tokens.append(sampler.sample(logits).token)
    assert is_of_schema(schema)(text_of(tokens))
    assert max(counts[1:]) < 150_000


EXPLODING = Grammar("lark", 'start: T0\nT0: "ab" (/(?s:.){1,1200}/ & ~/(?s:.*)<\\/f>(?s:.*)/) "</f>"')
"""After ``</f``, llguidance would explore more expressions than its limit: a complement beside a limit of the length."""


def test_an_answer_that_fails_spoils_no_later_one_of_its_grammar():
    """Copies of llguidance's matchers share its limits."""
    compiler = compiler_of()
    failing = compiler.matcher(EXPLODING, VOCAB)
    with pytest.raises(GrammarLimitError, match="too many expressions"):
        for token in b"ab</f>":
            failing.accept([token])
            failing.allowed()
    later = compiler.matcher(EXPLODING, VOCAB)
    for token in b"abccc":
        later.accept([token])
        assert later.allowed().any()


def test_a_token_that_does_not_match_is_no_limit():
    matcher = compiler_of().matcher(Grammar("regex", "ab"), VOCAB)
    with pytest.raises(GenerationConfigError, match="cannot go on") as caught:
        matcher.accept([ord("x")])
    assert not isinstance(caught.value, GrammarLimitError)
