"""What is kept of grammars is bounded by counts, whatever the requests ask for: each has another schema."""

import json
import random

import pytest
from support.engine.grammars import OTHER_SPECIAL, compiler_of

pytest.importorskip("llguidance")

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.grammars import vocabulary as vocabularies
from staticllm.pipelines.grammars.compiler import MAX_KEPT, MAX_KEPT_CHARS
from staticllm.pipelines.grammars.vocabulary import TokenEncoder

SIZE = OTHER_SPECIAL + 1


def random_grammar(seed):
    """Return a schema, a regular expression or a choice that no other seed has; some have reasoning before them."""
    drawn = random.Random(seed)
    text = {
        "json_schema": json.dumps({"type": "object", "properties": {f"a{seed}": {"type": "boolean"}}}),
        "regex": f"a{seed}[bc]",
        "choice": json.dumps([f"a{seed}", "b"]),
    }
    kind = drawn.choice([*text])
    return Grammar(kind, text[kind], reasoning_end=drawn.choice(["", f"</think{seed}>\n"]))


def sizes_of(compiler):
    return len(compiler.kept), len(compiler.endings), len(compiler.fewest)


def test_each_request_with_another_grammar_leaves_no_more_than_the_last():
    compiler = compiler_of()
    for seed in range(4 * MAX_KEPT):
        for vocab_size in (SIZE, SIZE + 8)[: 1 + seed % 2]:
            compiler.matcher(random_grammar(seed), vocab_size, 60, finishes=bool(seed % 3))
        assert max(sizes_of(compiler)) <= MAX_KEPT
    known = {grammar for grammar, _ in compiler.kept}
    assert len(compiler.kept) == MAX_KEPT
    assert set(compiler.endings) <= set(compiler.kept)
    assert set(compiler.fewest) <= known


def test_grammars_that_are_refused_leave_nothing():
    compiler = compiler_of()
    for seed in range(3 * MAX_KEPT):
        broken = [
            Grammar("regex", f"a{seed}("),
            Grammar("regex", f"a{seed}" * 9),
            Grammar("json_schema", f'{{"type": "a{seed}"}}'),
        ]
        for grammar in broken:
            with pytest.raises(GenerationConfigError):
                compiler.matcher(grammar, SIZE, 2, finishes=True)
        assert max(sizes_of(compiler)) <= MAX_KEPT


def test_long_grammars_are_fewer():
    compiler = compiler_of()
    length = MAX_KEPT_CHARS // 8
    for seed in range(24):
        schema = {"type": "string", "enum": [f"a{seed}"], "description": "b" * length}
        compiler.matcher(Grammar("json_schema", json.dumps(schema)), SIZE, 60, finishes=True)
        num_chars = sum(len(grammar.text) for grammar, _ in compiler.kept)
        assert num_chars <= MAX_KEPT_CHARS
    assert len(compiler.kept) == 7
    assert max(sizes_of(compiler)[1:]) <= 7


def test_a_grammar_that_is_used_is_kept():
    compiler = compiler_of()
    used = random_grammar(-1)
    for seed in range(3 * MAX_KEPT):
        compiler.matcher(used, SIZE, 60)
        found = compiler.kept[used.proper, SIZE]
        compiler.matcher(random_grammar(seed), SIZE, 60)
        assert compiler.kept[used.proper, SIZE] is found


def test_ids_are_kept_of_short_texts(monkeypatch):
    monkeypatch.setattr(vocabularies, "MAX_KEPT", 16)
    encoder = TokenEncoder(None, [b"a", b"b"], frozenset())
    monkeypatch.setattr(encoder, "_exact", lambda text: [0] * len(text))
    for seed in range(100):
        for text in (f"a{seed}", "b" * (vocabularies.MAX_KEPT_CHARS + seed + 1)):
            assert len(encoder(text)) == len(text)
        assert len(encoder.kept) <= 16
    assert max(map(len, encoder.kept)) < 10
