"""Turns texts, or pairs of a query and a text, into token ids that fit into the programs of an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.errors import ModelError, PromptError, last_line
from staticllm.pipelines.embedding.encoder_runner import TokenizedText

Overflow = Literal["truncate", "refuse"]
"""What happens to a text of more than ``max_length`` tokens."""
TEXTS_PER_CALL = 64
"""The tokenizer pads all texts of a call to the longest, so that one long text must not meet too many others."""


class TextTokenizer:
    """Encodes texts with a model's tokenizer. ``max_length`` is the most tokens of a text, with its special tokens."""

    def __init__(
        self, tokenizer: genai.Tokenizer, max_length: int, vocab_size: int | None, overflow: Overflow = "truncate"
    ) -> None:
        self.max_length, self.overflow = max_length, overflow
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._num_last = self._count_last()

    def encode(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Return the ids of each text.

        Raises:
            PromptError: a text is not a str, not valid text, or has more than ``max_length`` tokens and those are refused.
            ModelError: the tokenizer cannot encode a text.
        """
        for index, text in enumerate(texts):
            _check(text, index)
        found: list[TokenizedText] = []
        for ids in self._encoded(texts):
            found.append(TokenizedText(self._fitting(ids, len(found))))
        return found

    def encode_pairs(self, query: str, texts: Sequence[str]) -> list[TokenizedText]:
        """Return the ids of the query with each text, and their types: 0 for the query, 1 for the text.

        A pair that is too long loses tokens of its text.

        Raises:
            PromptError, ModelError: as for ``encode``.
        """
        _check(query, 0)
        for index, text in enumerate(texts):
            _check(text, index)
        num_first = len(self._fitting(next(self._encoded([query])), 0))
        found: list[TokenizedText] = []
        for start in range(0, len(texts), TEXTS_PER_CALL):
            for ids in self._call(list(texts[start : start + TEXTS_PER_CALL]), query):
                kept = self._fitting(ids, len(found))
                types = np.zeros(len(kept), np.int64)
                types[min(num_first, len(kept)) :] = 1
                found.append(TokenizedText(kept, types))
        return found

    def _encoded(self, texts: Sequence[str]) -> Iterator[NDArray[np.int64]]:
        for start in range(0, len(texts), TEXTS_PER_CALL):
            yield from self._call(list(texts[start : start + TEXTS_PER_CALL]))

    def _call(self, texts: list[str], query: str | None = None) -> Iterator[NDArray[np.int64]]:
        encode = self._tokenizer.encode
        try:
            found = encode(texts) if query is None else encode([query], texts)
        except RuntimeError as error:
            raise ModelError(f"the tokenizer cannot encode {len(texts)} texts: {last_line(error)}") from error
        for ids, mask in zip(found.input_ids.data, found.attention_mask.data, strict=True):
            yield np.asarray(ids[mask.astype(bool)], np.int64)

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

    def _count_last(self) -> int:
        """Return the number of special tokens after a text."""
        (plain,) = self._call_without_special("a")
        (whole,) = list(self._call(["a"]))
        for start in range(len(whole) - len(plain), -1, -1):
            if np.array_equal(whole[start : start + len(plain)], plain):
                return len(whole) - start - len(plain)
        return 0

    def _call_without_special(self, text: str) -> list[NDArray[np.int64]]:
        found = self._tokenizer.encode([text], add_special_tokens=False)
        return [np.asarray(ids, np.int64) for ids in found.input_ids.data]


def _check(text: object, index: int) -> None:
    if not isinstance(text, str):
        raise PromptError(f"text {index} is a {type(text).__name__}: must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"text {index} is not valid text: {error.reason} at character {error.start}") from None
