"""Compiles grammars for one vocabulary, and keeps the last ones."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from staticllm.errors import GenerationConfigError, StaticLLMError, last_line

from ..generation.grammar import Grammar
from ..generation.grammar_mask import AnswerMatcher, MaskTimes
from .endings import GrammarEndings, TokenCosts
from .fewest_tokens import TokenBounds
from .lead import lead_of
from .matcher import LeadMatcher, Matcher, error_ahead
from .reasons import reason_of
from .translation import lark_of, tree_of
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LATE = 3
"""The most tokens by which reasoning ends late: the rest of a character."""
MAX_KEPT = 64
"""The most grammars that are kept compiled."""
MAX_KEPT_CHARS = 4 << 20
"""The most characters of their texts together. The last one is kept in any case."""


class GrammarCompiler:
    """Compiles grammars. Any thread may call; the vocabulary is read by the first one.

    ``read`` returns the vocabulary. ``times`` is written by the engine's thread.
    """

    def __init__(self, read: Callable[[], Vocabulary]) -> None:
        self.times = MaskTimes()
        self.init_seconds = 0.0  # the time to read the vocabulary, and to prepare llguidance for it
        self._read = read
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._bounds: TokenBounds | None = None
        self._tokenizers: dict[int, LLTokenizer] = {}  # by the model's number of token ids
        self.kept: OrderedDict[tuple[Grammar, int], Matcher] = OrderedDict()
        self.fewest: dict[Grammar, float] = {}
        self._costs: dict[int, TokenCosts] = {}  # by the model's number of token ids
        self.endings: dict[tuple[Grammar, int], GrammarEndings | None] = {}

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            return self._known_vocabulary()

    @property
    def special(self) -> frozenset[int]:
        """The ids of special tokens, which are no text."""
        return self.vocabulary.special

    def matcher(
        self, grammar: Grammar, vocab_size: int, max_new_tokens: int | None = None, finishes: bool = False
    ) -> AnswerMatcher:
        """Return a matcher at the beginning of an answer, for logits ``[vocab_size]``.

        Reasoning before the answer proper has at most half of the tokens that the shortest answer leaves.

        Args:
            finishes: Whether the matcher says which tokens leave room for the end of the answer, if it has
                ``max_new_tokens``.

        Raises:
            GenerationConfigError: llguidance is not installed, the grammar cannot be compiled, or its shortest answer is longer
                than ``max_new_tokens``.
        """
        try:
            with self._lock:
                try:
                    return self._new(grammar, vocab_size, max_new_tokens, finishes)
                finally:
                    self._forget()
        except RecursionError:
            raise GenerationConfigError(
                f"the grammar ({grammar.kind}) is nested too deeply, or its rules are: use at most 100 levels"
            ) from None

    def _new(self, grammar: Grammar, vocab_size: int, max_new_tokens: int | None, finishes: bool) -> AnswerMatcher:
        """Return a matcher as ``matcher`` does. The lock is held."""
        proper = grammar.proper
        lead = lead_of(grammar)
        found = self._matcher(proper, vocab_size)
        endings = self._endings_of(proper, vocab_size) if finishes and max_new_tokens is not None else None
        if lead is None:
            self._check_room(proper, max_new_tokens, endings)
            return found.clone() if endings is None else found.with_ending(endings)
        opening, reasoning, closing = (
            None if each is None else self._matcher(each, vocab_size)
            for each in (lead.opening, lead.reasoning, lead.closing)
        )
        num_fixed = sum(len(each.clone().forced()) for each in (opening, closing) if each is not None)
        room = self._check_room(proper, max_new_tokens, endings, num_fixed)
        found = found if endings is None else found.with_ending(endings)
        stages = [each.clone() for each in (opening, reasoning, found) if each is not None]
        longest = sys.maxsize if room is None else room // 2 if endings is None else min(room // 2, room - LATE)
        return LeadMatcher(stages, closing, longest)

    def _matcher(self, grammar: Grammar, vocab_size: int) -> Matcher:
        """Return the matcher of a grammar that is kept, or a new one, which is kept.

        Copies of a matcher share llguidance's limits, so that one whose limits an answer has used up is compiled again.
        """
        found = self.kept.get((grammar, vocab_size))
        if found is None or found.is_used_up:
            grammar.check()
            found = self._compiled(grammar, vocab_size)
            self.kept[grammar, vocab_size] = found
        self.kept.move_to_end((grammar, vocab_size))
        return found

    def _forget(self) -> None:
        """Drop the oldest grammars that are too many, with all that is known of them."""
        num_chars = sum(len(grammar.text) for grammar, _ in self.kept)
        while len(self.kept) > 1 and (len(self.kept) > MAX_KEPT or num_chars > MAX_KEPT_CHARS):
            (dropped, _), _ = self.kept.popitem(last=False)
            num_chars -= len(dropped.text)
        self.endings = {key: found for key, found in self.endings.items() if key in self.kept}
        known = {grammar for grammar, _ in self.kept}
        self.fewest = {grammar: found for grammar, found in self.fewest.items() if grammar in known}

    def _compiled(self, grammar: Grammar, vocab_size: int) -> Matcher:
        tokenizer = self._tokenizer(vocab_size)
        lark = lark_of(grammar, self._known_vocabulary().special_by_text)
        from llguidance import LLMatcher

        inner = LLMatcher(tokenizer, lark, log_level=0)
        if not inner.is_error():
            inner.compute_bitmask()  # the first one is slow, and may find the grammar too complex
        if message := inner.get_error() or error_ahead(inner):
            reason = reason_of(message, grammar, tree_of(grammar))
            raise GenerationConfigError(f"the grammar ({grammar.kind}) cannot be compiled: {reason}")
        return Matcher(inner, vocab_size, tokenizer.eos_token)

    def _endings_of(self, grammar: Grammar, vocab_size: int) -> GrammarEndings | None:
        """Return what is known of the endings of a grammar that is kept; None if nothing is."""
        if vocab_size not in self._costs:
            self._costs[vocab_size] = TokenCosts(self._known_vocabulary(), vocab_size)
        if (grammar, vocab_size) not in self.endings:
            costs = self._costs[vocab_size]
            found = GrammarEndings(grammar, self._known_vocabulary(), costs)
            self.endings[grammar, vocab_size] = None if found.first is None else found
        return self.endings[grammar, vocab_size]

    def _tokenizer(self, vocab_size: int) -> LLTokenizer:
        """Return llguidance's tokenizer for a model with logits ``[vocab_size]``, which may be more or fewer than the tokens."""
        if vocab_size not in self._tokenizers:
            begin = time.perf_counter()
            self._tokenizers[vocab_size] = self._new_tokenizer(vocab_size)
            self.init_seconds += time.perf_counter() - begin
        return self._tokenizers[vocab_size]

    def _new_tokenizer(self, vocab_size: int) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:  # also of its metadata, which it reads for its version
            raise GenerationConfigError(
                f"grammars need the package llguidance, which cannot be imported ({last_line(error)}): pip install llguidance; a "
                "frozen program must collect it with its metadata (docs/desktop.md)"
            ) from error
        except (OSError, ImportError) as error:
            raise StaticLLMError(
                f"the package llguidance, which grammars need, cannot be read now: {last_line(error)}: close files or raise the "
                "limits of this process (ulimit), and try again"
            ) from error
        vocabulary = self._known_vocabulary()
        tokens = [*vocabulary.tokens[:vocab_size], *[b""] * (vocab_size - len(vocabulary.tokens))]
        wrapped = _WrappedTokenizer(vocabulary, tokens)
        return LLTokenizer(wrapped)  # type: ignore[arg-type]  # it takes any object of this form

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        return self._vocabulary

    def _check_room(
        self, grammar: Grammar, max_new_tokens: int | None, endings: GrammarEndings | None, num_before: int = 0
    ) -> int | None:
        """Return how many tokens the shortest answer leaves after ``num_before`` others.

        Raises:
            GenerationConfigError: none.
        """
        if max_new_tokens is None:
            return None
        if grammar not in self.fewest:
            self._bounds = self._bounds or TokenBounds(self._known_vocabulary())
            self.fewest[grammar] = self._bounds.fewest_tokens(grammar)
        fewest = self.fewest[grammar] + num_before
        if math.isinf(fewest):
            raise GenerationConfigError(
                f"no answer of this grammar ({grammar.kind}) ends: give each recursion a way out that this model has tokens for"
            )
        if fewest > max_new_tokens:
            raise GenerationConfigError(
                f"max_new_tokens={max_new_tokens} leaves no room for an answer of this grammar ({grammar.kind}), whose shortest "
                f"one has at least {fewest:.0f} tokens: raise it, or MIN_RESPONSE_LEN if that limits it"
            )
        if endings is None:
            return max_new_tokens - int(fewest)
        return max_new_tokens - _checked_fewest(grammar, endings, max_new_tokens, num_before)


def _checked_fewest(grammar: Grammar, endings: GrammarEndings, max_new_tokens: int, num_before: int) -> int:
    """Return the tokens of the shortest known answer and ``num_before`` others.

    Raises:
        GenerationConfigError: too many.
    """
    assert endings.first is not None, "no answer is known"
    fewest = num_before + int(endings.first.num_tokens) + endings.needs_end(endings.matcher, endings.first.text)
    if fewest > max_new_tokens:
        raise GenerationConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for an answer of this grammar ({grammar.kind}), whose shortest "
            f"known one has {fewest} tokens with its end: raise it, or MIN_RESPONSE_LEN if that limits it, or set "
            "finish_grammar=0, with which an answer may be cut off"
        )
    return fewest


class _WrappedTokenizer:
    """A vocabulary in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._encode = vocabulary.encode
        self._num_tokens = len(tokens)
        self.special_token_ids = [id for id in vocabulary.special if id < len(tokens)]
        is_known = vocabulary.end is not None and vocabulary.end < len(tokens)
        self.eos_token_id = vocabulary.end if is_known else None  # then llguidance adds one, beyond the logits

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="ignore")
        return [id for id in self._encode(text) if id < self._num_tokens]
