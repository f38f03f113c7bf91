"""Turns texts, or pairs of a query and a text, into token ids that fit into the programs of an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.devices import read_first_tensor
from staticllm.errors import ModelError, PromptError, encoding, pipeline_closed

from .packing.tokenized_text import TokenizedText

read_first_tensor()

Overflow = Literal["truncate", "refuse"]
"""What happens to a text of more than ``max_length`` tokens."""
TEXTS_PER_CALL = 64
"""The tokenizer pads all texts of a call to the longest, so that one long text must not meet too many others."""


class TextTokenizer:
    """Encodes texts with a model's tokenizer. ``max_length`` is the maximum number of tokens of a text, with special tokens."""

    def __init__(
        self, tokenizer: genai.Tokenizer, max_length: int, vocab_size: int | None, overflow: Overflow = "truncate"
    ) -> None:
        self.max_length = max_length
        self.overflow = overflow
        self._tokenizer: genai.Tokenizer | None = tokenizer
        self._vocab_size = vocab_size
        self._num_before, self._num_last = self._count_special()

    def close(self) -> None:
        """Release the tokenizer, whose compiled models use memory and threads. Later calls raise a ``ClosedError``."""
        self._tokenizer = None

    def count_prompt(self, prompt: str) -> int:
        """Return the tokens of a prompt before a text, with the special ones before it, as sentence-transformers counts them.

        Raises:
            PromptError, ModelError: as for ``encode``.
        """
        check_text(prompt, "the prompt")
        return len(next(self._encoded([prompt]))) - self._num_last if prompt else 0

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text with its special ones, before it is truncated.

        Raises:
            PromptError, ModelError: as for ``encode``.
        """
        for index, text in enumerate(texts):
            check_text(text, f"text {index}")
        return [len(ids) for ids in self._encoded(texts)]

    def encode(self, texts: Sequence[str], num_prompt: int = 0) -> list[TokenizedText]:
        """Return the ids of each text, of which the first ``num_prompt`` do not count in its vector.

        Raises:
            PromptError: a text is not a str, not valid text, or has more than ``max_length`` tokens and those are refused.
            ModelError: the tokenizer cannot encode a text.
        """
        for index, text in enumerate(texts):
            check_text(text, f"text {index}")
        found: list[TokenizedText] = []
        for ids in self._encoded(texts):
            found.append(TokenizedText(self._fitting(ids, len(found)), num_prompt=num_prompt))
        return found

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[TokenizedText]:
        """Return the ids of the query with each text, and their types: 0 for the query, 1 for the text.

        Of a pair that is too long, the longer of the two loses tokens first, as in GenAI.

        Raises:
            PromptError, ModelError: as for ``encode``, or ``max_length`` leaves no token beside the special ones.
        """
        check_text(query, "the query")
        for index, text in enumerate(texts):
            check_text(text, f"text {index}")
        before, middle, after = self._pair_template()
        num_special = len(before) + len(middle) + len(after)
        if self.max_length < num_special + 2:
            raise PromptError(
                f"max_length={self.max_length}: a query and a text need {num_special} special tokens and 2 of their own; raise it"
            )
        first = self._plain(next(self._encoded([query])))
        found: list[TokenizedText] = []
        for second in map(self._plain, self._encoded(texts)):
            kept = first, second
            if self.overflow == "truncate":
                kept = longest_first(first, second, self.max_length - num_special)
            ids = self._fitting(np.concatenate((before, kept[0], middle, kept[1], after)), len(found))
            types = np.zeros(len(ids), np.int64)
            types[len(before) + len(kept[0]) + min(self._num_last, len(middle)) :] = 1
            found.append(TokenizedText(ids, types))
        return found

    def _pair_template(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the special tokens before, between and after the texts of a pair.

        Only two letters are encoded as a pair: openvino-tokenizers 2026.4 overwrites memory when it truncates long pairs.

        Raises:
            ModelError: the tokenizer changes the texts of a pair.
        """
        (plain,) = self._call_without_special("a")
        (pair,) = self._call(["a"], "a")
        size = len(plain)
        places = [at for at in range(len(pair) - size + 1) if np.array_equal(pair[at : at + size], plain)]
        if len(places) < 2 or places[0] + size > places[-1]:
            raise ModelError(
                "the tokenizer does not put a query and a text one after the other: it cannot encode pairs"
            )
        start = places[0]
        end = places[-1]
        return pair[:start], pair[start + size : end], pair[end + size :]

    def _plain(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of a text alone without special ones."""
        return ids[self._num_before : len(ids) - self._num_last]

    def _encoded(self, texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(texts), TEXTS_PER_CALL):
            yield from self._call(list(texts[start : start + TEXTS_PER_CALL]))

    def _call(self, texts: list[str], query: str | None = None) -> Iterator[NDArray[np.int64]]:
        encode = self._open.encode
        with encoding(f"{len(texts)} texts"):
            found = encode(texts) if query is None else encode([query], texts)
        for ids, mask in zip(found.input_ids.data, found.attention_mask.data, strict=True):
            yield np.asarray(ids[mask.astype(bool)], np.int64)

    @property
    def _open(self) -> genai.Tokenizer:
        if (tokenizer := self._tokenizer) is None:
            raise pipeline_closed()
        return tokenizer

    def _fitting(self, ids: NDArray[np.int64], index: int) -> NDArray[np.int64]:
        """Return at most ``max_length`` ids; the special tokens at the end are kept."""
        if not len(ids):
            raise PromptError(f"text {index} has no tokens: give at least one character")
        if self._vocab_size is not None and int(ids.max()) >= self._vocab_size:
            raise ModelError(
                f"text {index}: the tokenizer gives the id {int(ids.max())}, the model has {self._vocab_size} tokens"
            )
        if len(ids) <= self.max_length:
            return ids
        if self.overflow == "refuse":
            raise PromptError(
                f"text {index} has {len(ids)} tokens, the limit is {self.max_length}: shorten it, or let it be truncated"
            )
        last = min(self._num_last, self.max_length - 1)
        return np.concatenate((ids[: self.max_length - last], ids[len(ids) - last :]))

    def _count_special(self) -> tuple[int, int]:
        """Return the numbers of special tokens before and after a text."""
        (plain,) = self._call_without_special("a")
        (whole,) = list(self._call(["a"]))
        for start in range(len(whole) - len(plain), -1, -1):
            if np.array_equal(whole[start : start + len(plain)], plain):
                return start, len(whole) - start - len(plain)
        return 0, 0

    def _call_without_special(self, text: str) -> list[NDArray[np.int64]]:
        with encoding("1 text"):
            found = self._open.encode([text], add_special_tokens=False)
        return [np.asarray(ids, np.int64) for ids in found.input_ids.data]


def longest_first(
    first: NDArray[np.int64], second: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first ids of both, ``[n]`` each, at most ``room`` together: the longer loses ids until both are equally long."""
    if len(first) + len(second) <= room:
        return first, second
    shorter = min(len(first), len(second), room // 2)
    if len(first) <= len(second):
        return first[:shorter], second[: room - shorter]
    return first[: room - shorter], second[:shorter]


def check_text(text: object, name: str) -> None:
    """Check what a user gave as ``name``.

    Raises:
        PromptError: it is not a str, or not valid text.
    """
    if not isinstance(text, str):
        raise PromptError(f"{name} is a {type(text).__name__}: must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} is not valid text: {error.reason} at character {error.start}") from None


def lower_case(text: str) -> str:
    """Return the text with each character in lower case on its own, as the normalizer ``Lowercase`` of tokenizers does it."""
    return "".join(map(str.lower, text))
