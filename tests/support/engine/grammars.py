"""A small vocabulary, and answers with random logits, for tests of grammars without a tokenizer."""

from __future__ import annotations

import numpy as np

from staticllm.pipelines.engine.state import prepare_grammar
from staticllm.pipelines.generation.grammar_mask import GrammarMask
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Sampler
from staticllm.pipelines.grammars.compiler import GrammarCompiler
from staticllm.pipelines.grammars.vocabulary import Vocabulary

WORDS = (
    '{"', '":', '": ', '", "', '","', '"}', "},", "[]", "true", "false", "null", "name", "age", "city", "  ", "\n", "ab", "abc",
    "abcd", "the", " the", "é", "日本", "12", "123", "ing", "</", "<f", "function", "yes", "no", "maybe", "0.", "-1", "e+",
)  # fmt: skip
END = 256 + len(WORDS)
OTHER_SPECIAL = END + 1
CLOSERS = (*(ord(char) for char in '"]})>'), END)


def encode(text: str) -> list[int]:
    """Return the ids of the longest word at each place, else of a byte."""
    data, ids, start = text.encode(), [], 0
    ordered = sorted(((word.encode(), 256 + index) for index, word in enumerate(WORDS)), key=lambda each: -len(each[0]))
    while start < len(data):
        word, id = next(
            (each for each in ordered if data.startswith(each[0], start)), (data[start : start + 1], data[start])
        )
        ids.append(id)
        start += len(word)
    return ids


def small_vocabulary(num_unused: int = 0) -> Vocabulary:
    """Return a vocabulary with each byte, some words, an end token, another special token, and ids that mean nothing."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    tokens += [b"<end>", b"<other>", *[b""] * num_unused]
    return Vocabulary(tuple(tokens), frozenset([END, OTHER_SPECIAL]), END, encode)


def compiler_of(num_unused: int = 0) -> GrammarCompiler:
    vocabulary = small_vocabulary(num_unused)
    return GrammarCompiler(lambda: vocabulary)


def mask_of(compiler, grammar, stop_token_ids=(END,), vocab_size=OTHER_SPECIAL + 1, max_new_tokens=None):
    matcher = compiler.matcher(grammar, vocab_size, max_new_tokens)
    return GrammarMask(matcher, stop_token_ids, compiler.vocabulary.special, vocab_size, compiler.times)


def mask_for(request, vocab_size, compiler):
    """Return the processor of a request's grammar at the beginning of an answer; None without a grammar."""
    prepared = prepare_grammar(request, vocab_size, compiler)
    return None if prepared is None else prepared.mask


def random_answer(compiler, grammar, seed, max_tokens=1500, num_free=60, prepares=False, **options):
    """Return the tokens of an answer without its end, chosen with random logits; None if it has not ended.

    After ``num_free`` tokens, what closes something is more likely, so that answers end.
    """
    vocab_size = OTHER_SPECIAL + 1
    mask = mask_of(compiler, grammar)
    rng = np.random.default_rng(seed)
    params = SamplingParams(do_sample=True, **options)
    sampler = Sampler(params, [mask], np.random.default_rng(seed + 1))
    tokens = []
    for count in range(max_tokens):
        logits = rng.normal(0, 2, vocab_size).astype(np.float32)
        if count > num_free:
            logits[list(CLOSERS)] += 12
        if prepares and rng.random() < 0.5:
            sampler.prepare()
        token = sampler.sample(logits, int(logits.argmax())).token
        if token == END:
            return tokens
        tokens.append(token)
    return None


def text_of(compiler, tokens):
    """Return the text of tokens; it must be valid UTF-8."""
    return b"".join(compiler.vocabulary.tokens[token] for token in tokens).decode()
