"""Decodes tokens without a call of the tokenizer, where the text of several tokens is the texts of each, joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
DecodeRows = Callable[[list[list[int]]], Sequence[str]]
INCOMPLETE = "\ufffd"


class JoinedDecoder:
    """Decodes like ``decode``, and keeps the text of each token that it has met. Any thread may call.

    A call of the tokenizer takes as long as a decode step of a small model. It is for tokenizers that join the bytes of tokens
    and do nothing to the text (``model_dir.joins_tokens``). A token with a part of a character has no text of its own, so with
    such a token among them tokens are decoded by ``decode``. ``decode_rows`` decodes several rows in one call.
    """

    def __init__(self, decode: Decode, decode_rows: DecodeRows) -> None:
        self._decode, self._decode_rows = decode, decode_rows
        self._texts: dict[int, str | None] = {}  # None: not a text of whole characters

    def __call__(self, tokens: list[int]) -> str:
        """Return the text of these token ids."""
        texts = self._texts
        try:
            return "".join([texts[token] for token in tokens])  # type: ignore[misc]
        except KeyError:
            self._learn(tokens)
        except TypeError:
            return self._decode(tokens)
        found = [texts[token] for token in tokens]
        return self._decode(tokens) if None in found else "".join(found)  # type: ignore[arg-type]

    def _learn(self, tokens: list[int]) -> None:
        unknown = [token for token in dict.fromkeys(tokens) if token not in self._texts]
        found = self._decode_rows([[token] for token in unknown])
        self._texts |= {token: None if INCOMPLETE in text else text for token, text in zip(unknown, found, strict=True)}
