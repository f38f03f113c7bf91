"""A tokenizer, and what is made of it once: functions that decode, and the tokens of words and markers."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import openvino_genai as genai

from staticllm.errors import ModelError, encoding, last_line, pipeline_closed

from ..generation.options.resolve import GenerationOptions
from ..generation.options.table import SamplingParams, TokenSequences
from .conversations import Conversations

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
        self._decode = decode
        self._decode_rows = decode_rows
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


class SpecialTokens:
    """Knows which tokens of a tokenizer are special, that is, left out of decoded text. Any thread may call the methods.

    ``joins_tokens``: whether the text of several tokens is known to be the texts of each, joined.
    """

    def __init__(self, tokenizer: genai.Tokenizer, joins_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._joins_tokens = joins_tokens
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


MAX_BREAKER_CHARS = 32
MAX_TEXTS = 256
MAX_SEQUENCES = 250_000
"""What is kept of a tokenizer's texts: a letter is in tens of thousands of tokens, and clients choose the texts."""


class KeptSequences:
    """The token sequences of the last texts: of at most ``MAX_TEXTS``, with ``MAX_SEQUENCES`` together, and of the last one.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, TokenSequences] = OrderedDict()
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, text: str, find: Callable[[str], TokenSequences]) -> TokenSequences:
        """Return the sequences of a text, which ``find`` finds if they are not kept."""
        with self._lock:
            if (found := self._kept.get(text)) is not None:
                self._kept.move_to_end(text)
                return found
        found = find(text)
        with self._lock:
            if text not in self._kept:
                self._kept[text] = found
                self.num_sequences += len(found)
            while len(self._kept) > 1 and (len(self._kept) > MAX_TEXTS or self.num_sequences > MAX_SEQUENCES):
                _, dropped = self._kept.popitem(last=False)
                self.num_sequences -= len(dropped)
        return found


class WordTokens:
    """The token sequences of texts, by tokenizer. Any thread may call; what was found last is kept."""

    def __init__(self, tokenizer: genai.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.words = KeptSequences()
        self.breakers = KeptSequences()
        self._texts: list[str] = []

    def complete(self, options: GenerationOptions) -> SamplingParams:
        """Return the sampling parameters of ``options`` with the tokens of their texts."""
        sampling = options.sampling
        extra = options.extra
        if extra.bad_words:
            found = (sequence for word in extra.bad_words for sequence in self.of_word(word))
            sampling = replace(sampling, bad_words=(*sampling.bad_words, *found))
        if sampling.uses_dry:
            breakers = {sequence for text in extra.dry_sequence_breakers for sequence in self.of_breaker(text)}
            sampling = replace(sampling, dry_breakers=tuple(sorted(breakers)))
        return sampling

    def of_word(self, word: str) -> TokenSequences:
        """Return the sequences that write ``word``, at the beginning of a text and after a space."""
        return self.words.of(word, self._found_words)

    def _found_words(self, word: str) -> TokenSequences:
        found = {self._encoded(word), self._encoded(" " + word.lstrip(" "))}
        return tuple(sorted(sequence for sequence in found if sequence))

    def of_breaker(self, text: str) -> TokenSequences:
        """Return the sequences that write a text which contains ``text``, as llamacpp finds them.

        These are all tokens whose text contains it, and all whose text ends with a part of it, followed by the tokens of the
        rest.
        """
        return self.breakers.of(text[:MAX_BREAKER_CHARS], self._found_breakers)

    def _found_breakers(self, text: str) -> TokenSequences:
        found: set[tuple[int, ...]] = set()
        by_ending: dict[int, list[int]] = defaultdict(list)  # tokens by how much of the text they end with
        for token, piece in enumerate(self._token_texts()):
            if text in piece:
                found.add((token,))
                continue
            for length in range(1, len(text)):
                if piece.endswith(text[:length]):
                    by_ending[length].append(token)
        for length, tokens in by_ending.items():
            rest = self._encoded(text[length:])
            found.update((token, *rest) for token in tokens)
        return tuple(sorted(found))

    def _token_texts(self) -> list[str]:
        """Return the text of every token."""
        if not self._texts:
            ids = [[token] for token in range(max(self._tokenizer.get_vocab().values(), default=-1) + 1)]
            self._texts = list(self._tokenizer.decode(ids, skip_special_tokens=False))
        return self._texts

    def _encoded(self, text: str) -> tuple[int, ...]:
        with encoding(f"{len(text)} characters"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return tuple(int(token) for token in ids.reshape(-1))


class TokenizerTools:
    """The tokenizer of a pipeline until ``close``. Any thread may call.

    A tokenizer has compiled models, with memory, threads and files, so nothing else of a pipeline holds it. What was taken
    before ``close`` goes on: the reader of an answer decodes it to its end.

    Args:
        tokenizer: The model's, or that which the user gave.
        joins_tokens: Whether the text of several tokens is known to be the texts of each, joined.
        tool_template: The chat template for conversations with tools, if the model has one beside the tokenizer's own.
        conversations: Renders conversations and reads their answers; None if there are none, as for speech.
    """

    def __init__(
        self,
        tokenizer: genai.Tokenizer,
        joins_tokens: bool = False,
        tool_template: str = "",
        conversations: Conversations | None = None,
    ) -> None:
        self._conversations = conversations
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
        """Check that ``close`` was not called. Each of the properties does, too.

        Raises:
            ClosedError: it was.
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
    def conversations(self) -> Conversations:
        """What renders conversations and reads their answers."""
        assert self._conversations is not None, "this pipeline takes no conversations"
        return self._conversations

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
