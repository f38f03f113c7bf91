"""Reads the exact bytes of every token from a tokenizer, so that a grammar can say which tokens may follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from staticllm.errors import encoding

_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
ANCHORS = ("\n", "\x02")
"""Texts that are put before a text whose tokens a tokenizer would begin with a space of its own."""

MAX_KEPT = 4096
MAX_KEPT_CHARS = 200
"""The most texts whose ids are kept, and the most characters of one: those of a grammar that are asked for again are short."""


class VocabularyTokenizer(Protocol):
    """What is used of ``openvino_genai.Tokenizer``."""

    def get_vocab(self) -> Mapping[bytes, int]:
        """Return the ids of tokens by their bytes."""
        ...

    def get_eos_token_id(self) -> int:
        """Return the id of the token that ends an answer; -1 without one."""
        ...

    def encode(self, prompts: str, *, add_special_tokens: bool) -> Any: ...

    def decode(self, tokens: Any, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    tokens: tuple[bytes, ...]
    """The bytes of every token, by id; empty for one that stands for no text."""
    special: frozenset[int]
    """The ids of tokens that are not text, such as the end of an answer; they never match a grammar."""
    end: int | None
    """The id of the tokenizer's own end token; None without one."""
    encode: Callable[[str], Sequence[int]] = field(compare=False)
    """Returns the ids of a text as the model would most likely write it."""

    @cached_property
    def special_by_text(self) -> Mapping[str, int]:
        """The ids of special tokens by their texts, such as ``<|im_end|>``."""
        return {self.tokens[id].decode(errors="replace"): id for id in self.special if self.tokens[id]}


def read_vocabulary(tokenizer: VocabularyTokenizer) -> Vocabulary:
    """Return the vocabulary of a tokenizer. For 150,000 tokens this takes about a second.

    GenAI gives the bytes of tokens as its detokenizer has them: final for byte-level vocabularies, but with ``▁`` for a space and
    ``<0x0A>`` for a byte in those of SentencePiece. So they are compared with what the detokenizer makes of each token.
    """
    known = {int(id): bytes(text) for text, id in tokenizer.get_vocab().items()}
    ids = np.arange(max(known) + 1, dtype=np.int64)
    shown = _decoded(tokenizer, ids[:, None], False)
    kept = _decoded(tokenizer, ids[:, None], True)
    special = frozenset(int(id) for id in ids if shown[id] and not kept[id])
    if any(_differs(known.get(id), text) for id, text in enumerate(shown) if id not in special):
        shown = _without_anchor(tokenizer, ids, shown)
    tokens = tuple(_bytes_of(known.get(id), text) for id, text in enumerate(shown))
    end = int(tokenizer.get_eos_token_id())
    return Vocabulary(tokens, special, None if end < 0 else end, TokenEncoder(tokenizer, tokens, special))


def _decoded(tokenizer: VocabularyTokenizer, rows: np.ndarray[Any, Any], skips_special: bool) -> list[str]:
    """Return the texts of ``rows [n, k]`` of ids."""
    import openvino as ov

    return list(tokenizer.decode(ov.Tensor(np.ascontiguousarray(rows)), skip_special_tokens=skips_special))


def _without_anchor(tokenizer: VocabularyTokenizer, ids: np.ndarray[Any, Any], shown: list[str]) -> list[str]:
    """Return the text of each token after another one; at the beginning of a text its space may be lost."""
    anchor = next((id for id, text in enumerate(shown) if len(text) == 1 and text.isascii() and text.isalnum()), None)
    if anchor is None:
        return shown
    rows = np.stack([np.full_like(ids, anchor), ids], axis=1)
    pairs = _decoded(tokenizer, rows, False)
    start = shown[anchor]
    return [pair[len(start) :] if pair.startswith(start) else text for pair, text in zip(pairs, shown, strict=True)]


def _differs(raw: bytes | None, text: str) -> bool:
    """Return whether a token's bytes are characters, but not those that the detokenizer shows."""
    try:
        return raw is not None and raw.decode() != text
    except UnicodeDecodeError:
        return False


def _bytes_of(raw: bytes | None, text: str) -> bytes:
    if raw is None:  # another token has the same bytes
        return text.encode() if "\ufffd" not in text else b""
    byte = _BYTE.fullmatch(raw)
    if byte and text.encode() != raw:
        return bytes([int(byte[1], 16)])
    return text.encode() if _differs(raw, text) and "\ufffd" not in text else raw


class TokenEncoder:
    """Encodes text without special tokens, such that the tokens' bytes are exactly those of the text."""

    def __init__(self, tokenizer: VocabularyTokenizer, tokens: Sequence[bytes], special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._special = special
        self._ids = {text: id for id, text in enumerate(tokens) if text and id not in special}
        self._longest = max(map(len, self._ids), default=1)
        self.kept: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text. A grammar asks for the same ones again and again, so the last texts are kept."""
        found = self.kept.get(text)
        if found is None:
            found = self._exact(text)
            if len(text) <= MAX_KEPT_CHARS:
                self.kept[text] = found
            if len(self.kept) > MAX_KEPT:
                self.kept.pop(next(iter(self.kept)), None)
        return found

    def _exact(self, text: str) -> list[int]:
        wanted = text.encode()
        ids = self._encoded(text)
        if self._joined(ids) == wanted:
            return ids
        for anchor in ANCHORS:
            ids = self._encoded(anchor + text)
            for start in range(1, len(ids)):
                if self._joined(ids[start:]) == wanted:
                    return ids[start:]
        return self._longest_first(wanted)

    def _encoded(self, text: str) -> list[int]:
        with encoding(f"{len(text)} characters"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return [int(id) for id in np.asarray(ids).ravel()]

    def _joined(self, ids: Sequence[int]) -> bytes | None:
        if not self._special.isdisjoint(ids):
            return None
        return b"".join(self._tokens[id] for id in ids)

    def _longest_first(self, text: bytes) -> list[int]:
        """Return the ids of the longest token at each place; bytes without a token are left out."""
        ids = list[int]()
        start = 0
        while start < len(text):
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            found = next((length for length in lengths if text[start : start + length] in self._ids), 0)
            if found:
                ids.append(self._ids[text[start : start + found]])
            start += found or 1
        return ids
