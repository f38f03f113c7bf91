"""Decodes tokens so that some special tokens, the markers of calls and reasoning, are part of the text."""

from __future__ import annotations

from collections.abc import Callable, Collection

import openvino_genai as genai

from staticllm.pipelines.text.joined_decoder import JoinedDecoder


class SpecialTokens:
    """Knows which tokens of a tokenizer are special, that is, left out of decoded text. Any thread may call the methods.

    ``joins_tokens``: whether the text of several tokens is known to be the texts of each, joined.
    """

    def __init__(self, tokenizer: genai.Tokenizer, joins_tokens: bool = False) -> None:
        self._tokenizer, self._joins_tokens = tokenizer, joins_tokens
        self._decoders: dict[frozenset[int], Callable[[list[int]], str]] = {}  # by the tokens that are shown
        self._is_special: dict[int, bool] = {}
        self._vocabulary: dict[bytes | str, int] = {}  # GenAI gives the texts as bytes

    def decoder(self, shown: Collection[str], decode: Callable[[list[int]], str]) -> Callable[[list[int]], str]:
        """Return ``decode`` if none of the texts ``shown`` is a special token, else a function that shows these.

        All other special tokens are left out.
        """
        if not self._vocabulary:
            self._vocabulary = self._tokenizer.get_vocab()
        found = (self._vocabulary.get(text.encode(), self._vocabulary.get(text)) for text in shown)
        markers = frozenset(token for token in found if token is not None)
        if not any(map(self.is_special, markers)):
            return decode
        if markers not in self._decoders:
            self._decoders[markers] = self._decoder_with(markers)
        return self._decoders[markers]

    def _decoder_with(self, markers: frozenset[int]) -> Callable[[list[int]], str]:
        def decode_with_markers(tokens: list[int]) -> str:
            kept = [token for token in tokens if token in markers or not self.is_special(token)]
            return str(self._tokenizer.decode(kept, skip_special_tokens=False)) if kept else ""

        def decode_rows(rows: list[list[int]]) -> list[str]:
            return [decode_with_markers(row) for row in rows]

        return JoinedDecoder(decode_with_markers, decode_rows) if self._joins_tokens else decode_with_markers

    def is_special(self, token: int) -> bool:
        """Return whether a token is left out of decoded text."""
        known = self._is_special.get(token)
        if known is None:
            hidden = self._tokenizer.decode([token], skip_special_tokens=True)
            known = not hidden and bool(self._tokenizer.decode([token], skip_special_tokens=False))
            self._is_special[token] = known
        return known
