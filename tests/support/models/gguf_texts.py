"""Random vocabularies of GGUF files, and their tokens by the plain algorithms: letters first, then pairs, one after another."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import gguf
import numpy as np

from staticllm.compiler_passes.conversion.gguf_merges import pairs_by_score
from staticllm.model_files.gguf_header import read_gguf_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACES = " \t-\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
SPECIAL = {
    "<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<|x|>": CONTROL, "<|x|>y": CONTROL, "  ": USER_DEFINED,
    "a b": USER_DEFINED, "\n\n": USER_DEFINED, "é¡": USER_DEFINED, "==": USER_DEFINED,
}  # fmt: skip
LETTERS = [*"aabbccxyzABC  012389\n\t'.,!=-<|>[]é¡日本🎉ǅ٣\u2003\r", "'s", "'LL", "  ", "\n\n", "==", *SPECIAL]


@dataclass
class Vocabulary:
    """What a file says about texts."""

    kind: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    pre: str | None = None

    def place(self, token):
        """Return the id of a token: the last of those with its text."""
        return len(self.tokens) - 1 - self.tokens[::-1].index(token)

    @property
    def added(self):
        return {each: place for place, each in enumerate(self.tokens) if self.types[place] in (2, 3, 4) and each}

    @property
    def words(self):
        return {each: place for place, each in enumerate(self.tokens) if self.types[place] not in (2, 3, 4) and each}

    def write(self, path, **more):
        """Write a file without tensors, and return its header."""
        writer = gguf.GGUFWriter(path, more.pop("architecture", "llama"))
        writer.add_tokenizer_model(self.kind)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_merges(self.merges) if self.merges else None
        writer.add_token_scores(self.scores) if self.scores else None
        writer.add_bos_token_id(self.place("<s>"))
        writer.add_eos_token_id(self.place("</s>"))
        for key, (value, kind) in more.items():
            writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return read_gguf_header(path)


@cache
def byte_letters():
    """Return the letter of each byte, as GPT-2 has them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [each for each in range(256) if each not in kept]
    return {**{each: chr(each) for each in kept}, **{each: chr(256 + place) for place, each in enumerate(others)}}


def as_letters(text):
    return "".join(byte_letters()[each] for each in text.encode())


def random_texts(seed, count):
    source = random.Random(seed)
    for _ in range(count):
        yield "".join(source.choice(LETTERS) for _ in range(source.randint(0, 24)))


def byte_pairs(seed, pre):
    """Return a random vocabulary with tokens that no pair builds, and pairs of such tokens."""
    source = random.Random(seed)
    letters = list(byte_letters().values())
    common = [*map(as_letters, "aabbccxyz  0123\n'.=<|>"), *as_letters("é日🎉")]
    tokens, merges = list(letters), []
    for _ in range(source.randint(20, 120)):
        if source.random() < 0.2:
            tokens.append("".join(source.choice(common) for _ in range(source.randint(2, 5))))  # no pair builds it
            continue
        pair = f"{source.choice(tokens[-40:] + common)} {source.choice(tokens[-40:] + common)}"
        if pair not in merges and len(pair) < 12:
            merges.append(pair)
            tokens.append(pair.replace(" ", ""))
    tokens = list(dict.fromkeys(tokens))
    types = [NORMAL] * len(tokens)
    for word in ("[PAD1]", "ab", as_letters(" abc"), "hello"):
        if word not in tokens:
            tokens.append(word)
            types.append(source.choice((UNUSED, NORMAL)))
    return _shuffled(source, Vocabulary("gpt2", tokens, types, merges, pre=pre))


def scored_pairs(seed, has_bytes=True):
    """Return a random vocabulary with scores; some tokens are of no two others."""
    source = random.Random(seed)
    letters = sorted({*"▁abcxyz012.=<|>é日\n", *source.sample("ABC389'!-[]¡本🎉", 6)})
    tokens = list(letters)
    for _ in range(source.randint(20, 120)):
        count = source.randint(2, 5) if source.random() < 0.3 else 2
        pool = letters if count > 2 else tokens[-30:] + letters
        tokens.append("".join(source.choice(pool) for _ in range(count))[:8])
    tokens = list(dict.fromkeys(tokens))
    types = [source.choice((NORMAL, NORMAL, NORMAL, UNUSED)) if len(each) > 1 else NORMAL for each in tokens]
    codes = [f"<0x{each:02X}>" for each in range(256)] if has_bytes else []
    found = _shuffled(source, Vocabulary("llama", tokens + codes, types + [BYTE] * len(codes)))
    found.scores = [-float(each) for each in source.sample(range(len(found.tokens)), len(found.tokens))]
    return found


def _shuffled(source, found):
    special = {text: kind for text, kind in SPECIAL.items() if text not in found.tokens}
    pairs = [*zip(found.tokens, found.types, strict=True), *special.items()]
    source.shuffle(pairs)
    found.tokens, found.types = ([pair[which] for pair in pairs] for which in (0, 1))
    return found


def ids_of(vocabulary, text, splits=(), is_whole=False, composes=False, stripping=()):
    """Return the tokens of a text, without those that begin and end it. Spaces behind tokens of ``stripping`` are no text."""
    added = sorted(vocabulary.added, reverse=True)
    pattern = "|".join(re.escape(each) + rf"[{SPACES}]*" * (each in stripping) for each in added)
    found = []
    for place, part in enumerate(re.split(f"({pattern})", text)):
        if place % 2:
            found.append(vocabulary.added[next(each for each in added if part.startswith(each))])
        elif part and vocabulary.kind == "gpt2":
            normal = unicodedata.normalize("NFC", part) if composes else part
            found += _of_byte_pairs(vocabulary, pieces(normal, splits), is_whole)
        elif part:
            found += _of_scored_pairs(vocabulary, "▁" + part.replace(" ", "▁"))
    return found


def pieces(text, splits):
    """Return the parts of a text: one expression after another splits what those before have left."""
    parts = [text]
    for split in splits:
        parts = [each for part in parts for each in re.split(f"({python_pattern(split)})", part)]
    return [each for each in parts if each]


@cache
def python_pattern(pattern):
    """Return an expression with classes of letters that Python's ``re`` knows, and no groups."""
    found, in_class, place = "", False, 0
    pattern = re.sub(r"(?<!\\)\((?!\?)", "(?:", pattern)
    while place < len(pattern):
        step = re.match(r"\\p\{(\w)\}|\\[sS]|\\.|.", pattern[place:], re.DOTALL)
        text = step[0]
        place += len(text)
        in_class = (text == "[" and not in_class) or (in_class and text != "]")
        if step[1] or text == r"\s":
            inner = letters_of(step[1]) if step[1] else SPACES
            text = inner if in_class else f"[{inner}]"
        elif text == r"\S":
            text = f"[^{SPACES}]"
        found += text
    return found


@cache
def letters_of(category):
    """Return the characters of a category of Unicode, as what a class of ``re`` has."""
    numbers = {each for each in range(sys.maxunicode + 1) if unicodedata.category(chr(each))[0] == category}
    begins = (each for each in sorted(numbers) if each - 1 not in numbers)
    ends = (each for each in sorted(numbers) if each + 1 not in numbers)
    return "".join(rf"\U{begin:08x}-\U{end:08x}" for begin, end in zip(begins, ends, strict=True))


def _of_byte_pairs(vocabulary, parts, is_whole):
    words = vocabulary.words
    ranks = {}
    for rank, merge in enumerate(vocabulary.merges):
        ranks.setdefault(tuple(merge.split(" ")), rank)
    for part in parts:
        symbols = list(as_letters(part))
        if is_whole and "".join(symbols) in words:
            symbols = ["".join(symbols)]
        while pairs := [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]:
            place = min(pairs)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        yield from (words[symbol] for symbol in symbols)


def _of_scored_pairs(vocabulary, text):
    words = {each: place for each, place in vocabulary.words.items() if vocabulary.types[place] != BYTE}
    symbols = list(text)
    while pairs := [
        (-vocabulary.scores[words[left + right]], words[left + right], place)
        for place, (left, right) in enumerate(pairwise(symbols))
        if left + right in words
    ]:
        place = min(pairs)[-1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    is_known = True
    for symbol in symbols:
        if symbol in words:
            yield words[symbol]
        elif BYTE in vocabulary.types:
            yield from (vocabulary.place(f"<0x{each:02X}>") for each in symbol.encode())
        elif is_known:
            yield vocabulary.place("<unk>")
        is_known = symbol in words


def peer_of(tokenizers, vocabulary, splits=(), is_whole=False, composes=False, stripping=()):
    """Return the tokenizer of the library ``tokenizers`` for a vocabulary."""
    parts, normalizers = tokenizers.pre_tokenizers, tokenizers.normalizers
    places = {token: place for place, token in enumerate(vocabulary.tokens)}
    if vocabulary.kind == "gpt2":
        merges = [tuple(each.split(" ")) for each in vocabulary.merges]
        found = tokenizers.Tokenizer(tokenizers.models.BPE(places, merges, ignore_merges=is_whole))
        regexes = [parts.Split(tokenizers.Regex(each), "isolated") for each in splits]
        found.pre_tokenizer = parts.Sequence([*regexes, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
        if composes:
            found.normalizer = normalizers.NFC()
    else:
        words = {each for each, place in vocabulary.words.items() if vocabulary.types[place] != BYTE}
        merges = pairs_by_score(
            [each if each in words else "" for each in vocabulary.tokens], np.array(vocabulary.scores)
        )
        has_bytes = BYTE in vocabulary.types
        model = tokenizers.models.BPE(places, merges, byte_fallback=has_bytes, fuse_unk=True, unk_token="<unk>")
        found = tokenizers.Tokenizer(model)
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.add_special_tokens(
        [tokenizers.AddedToken(each, normalized=False, rstrip=each in stripping) for each in vocabulary.added]
    )
    return found
