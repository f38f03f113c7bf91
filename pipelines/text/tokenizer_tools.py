"""A tokenizer, and what is made of it once: functions that decode, and the tokens of words and markers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import openvino_genai as genai

from staticllm.errors import ModelError, last_line, pipeline_closed
from staticllm.pipelines.text.joined_decoder import JoinedDecoder
from staticllm.pipelines.text.special_tokens import SpecialTokens
from staticllm.pipelines.text.word_tokens import WordTokens


class TokenizerTools:
    """The tokenizer of a pipeline until ``close``. Any thread may call.

    A tokenizer has compiled models, with memory, threads and files, so nothing else of a pipeline holds it. What was taken
    before ``close`` goes on: the reader of an answer decodes it to its end.

    Args:
        tokenizer: The model's, or that which the user gave.
        joins_tokens: Whether the text of several tokens is known to be the texts of each, joined.
        tool_template: The chat template for conversations with tools, if the model has one beside the tokenizer's own.
    """

    def __init__(self, tokenizer: genai.Tokenizer, joins_tokens: bool = False, tool_template: str = "") -> None:
        self._tools: _Tools | None = _Tools(
            tokenizer,
            decoder_of(tokenizer, joins_tokens),
            WordTokens(tokenizer),
            SpecialTokens(tokenizer, joins_tokens),
            str(tokenizer.chat_template),
            tool_template,
        )

    def close(self) -> None:
        """Let go of the tokenizer."""
        self._tools = None

    def check_open(self) -> None:
        """Check that ``close`` was not called.

        Raises:
            ClosedError: it was. Each of the properties raises it, too.
        """
        _ = self._open

    @property
    def tokenizer(self) -> genai.Tokenizer:
        """The tokenizer."""
        return self._open.tokenizer

    @property
    def decode(self) -> Callable[[list[int]], str]:
        """A function that makes text of token ids, as ``decoder_of`` returns it."""
        return self._open.decode

    @property
    def word_tokens(self) -> WordTokens:
        """The tokens of texts that options name."""
        return self._open.word_tokens

    @property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that are left out of decoded text."""
        return self._open.special_tokens

    @property
    def tool_template(self) -> str:
        """The chat template for conversations with tools; "" for that of the tokenizer, also if the user has set another."""
        tools = self._open
        return tools.tool_template if str(tools.tokenizer.chat_template) == tools.own_template else ""

    @property
    def _open(self) -> _Tools:
        if (found := self._tools) is None:
            raise pipeline_closed()
        return found


@dataclass(frozen=True)
class _Tools:
    tokenizer: genai.Tokenizer
    decode: Callable[[list[int]], str]
    word_tokens: WordTokens
    special_tokens: SpecialTokens
    own_template: str
    tool_template: str


def decoder_of(tokenizer: genai.Tokenizer, joins_tokens: bool) -> Callable[[list[int]], str]:
    """Return a function that makes text of token ids. ``joins_tokens`` as for ``TokenizerTools``.

    It raises a ``ModelError`` if the tokenizer cannot decode them; its files may be damaged.
    """
    decode = partial(_decode, tokenizer)
    return JoinedDecoder(decode, decode) if joins_tokens else decode


def _decode(tokenizer: genai.Tokenizer, tokens: list[Any]) -> Any:
    try:
        return tokenizer.decode(tokens)
    except (RuntimeError, UnicodeError) as error:
        raise ModelError(f"the tokenizer cannot decode {len(tokens)} tokens: {last_line(error)}") from error
