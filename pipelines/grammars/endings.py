"""Finds short endings of an answer, so that it can end within its tokens.

llguidance says which texts a grammar allows, not how far an answer is from its end. So endings are put together from short texts
of the grammar's parts (``short_texts``) and from the ending that was known before, and llguidance checks them. It does so on
bytes, with a vocabulary of its own, because the tokens of an ending do not matter to the grammar.
"""

from __future__ import annotations

import copy
import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ..generation.grammar import Grammar
from .short_texts import STYLES, ShortTexts, Symbols
from .translation import has_free_text, lark_of, tree_of
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_BYTES = 256
MAX_PIECES = 1500
"""The most texts that a search tries after each other one."""
MAX_PIECE = 512
"""The most symbols of such a text."""
MAX_NODES = 48
"""The most texts after which a search tries all others."""
CHECKS_PER_COPY = 40
"""What following a text with a copy of a matcher counts."""
MAX_ALIKE = 6
"""The most of them after which the same bytes may follow."""
MAX_CHECKS = 6_000
FEW_CHECKS = 2_500
"""The most checks of a search, and of one for an ending of few tokens. A check takes about a microsecond."""
VALID_PER_CHECK, GIVEN_PER_CHECK = 8, 64
"""The symbols of a text that count like one more check: those that llguidance follows, and those that it is only given."""
SHORT, NEAR, SHARE = 64, 8, 8
"""Of a known ending of more than ``SHORT`` symbols, its first ``NEAR`` places are tried, and of those near its end as many as
take one ``SHARE``-th of the checks that are left."""
FEW_BYTES = 16
"""If at most this many bytes may follow, each is tried."""
LEAST_GROWTH = 16
OPENED = 4
"""The most parts of the longest kind that one token is expected to begin."""
SHARED = 2
"""The tokens by which a text and a rest together may have fewer than by themselves, as far as is tried."""
RETRY = 8
"""The tokens after which an ending that was not found is searched again."""
LONGEST_TOKEN = 48
"""The most bytes of a token that ends an answer."""
BREAKS = tuple((byte,) for byte in b'"]})>,:01a \n;.')
CONTINUATIONS = ((0x80,), (0x80, 0x80), (0x80, 0x80, 0x80), (0xA0, 0x80), (0x90, 0x80, 0x80))
"""The rests of characters of several bytes."""
ESCAPES = (*(tuple(b"0000"[start:]) for start in range(4)), (ord("n"),))
_TOKEN_BY_NUMBER = re.compile(r"<\[")


class TokenCosts:
    """The fewest tokens of texts. ``special`` holds the ids of special tokens, which texts have as ``NUM_BYTES`` and more."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        known = enumerate(vocabulary.tokens[:vocab_size])
        texts = [(text, id) for id, text in known if text and id not in vocabulary.special]
        self._ids = {text: id for text, id in reversed(texts) if len(text) <= LONGEST_TOKEN}
        lengths = defaultdict[bytes, set[int]](set)
        for text in self._ids:
            lengths[text[:2]].add(len(text))
        self._lengths = {begin: sorted(found) for begin, found in lengths.items()}  # of the tokens that begin so
        self._tokens = vocabulary.tokens[:vocab_size]
        self.special = [id for id in sorted(vocabulary.special) if id < vocab_size and vocabulary.tokens[id]]
        self._symbol_of_special = {id: NUM_BYTES + index for index, id in enumerate(self.special)}

    def symbols_of(self, token: int) -> Symbols:
        special = self._symbol_of_special.get(token)
        return tuple(self._tokens[token]) if special is None else (special,)

    def ending(self, text: Symbols) -> Ending:
        """Return a text as tokens, as few as possible, also of its ends."""
        size = len(text)
        costs = [math.inf] * size + [0.0]
        firsts = [-1] * size
        data = bytes(symbol if symbol < NUM_BYTES else 0 for symbol in text)
        stop = size
        for start in reversed(range(size)):
            if text[start] >= NUM_BYTES:
                stop = start
                costs[start] = 1 + costs[start + 1]
                firsts[start] = self.special[text[start] - NUM_BYTES]
                continue
            lengths = self._lengths.get(data[start : start + 2], ()) if start + 2 <= stop else ()
            for length in (1, *lengths):
                end = min(start + length, stop)
                if costs[end] + 1 < costs[start] and (id := self._ids.get(data[start:end])) is not None:
                    costs[start] = costs[end] + 1
                    firsts[start] = id
        return Ending(text, tuple(costs), tuple(firsts))


@dataclass(frozen=True)
class Ending:
    """A text that ends an answer.

    ``costs[i]`` is the number of tokens of its rest from symbol ``i`` on (infinite if the vocabulary has none), ``firsts[i]`` the
    first of them.
    """

    text: Symbols
    costs: tuple[float, ...]
    firsts: tuple[int, ...]

    @property
    def num_tokens(self) -> float:
        return self.costs[0]

    @property
    def token(self) -> int | None:
        """The first of its tokens; None without any."""
        return self.firsts[0] if self.firsts else None

    def rest(self, start: int) -> Ending:
        """Return what follows the first ``start`` symbols."""
        return Ending(self.text[start:], self.costs[start:], self.firsts[start:])


class GrammarEndings:
    """What is known of the endings of one grammar, before any answer; any number of answers share it.

    ``first`` is the ending of an empty answer, None if none was found. ``growth`` is the number of tokens by which one token may
    move the end further away.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, costs: TokenCosts) -> None:
        self.costs = costs
        self.has_free_text = grammar.kind == "structural_tag" and has_free_text(grammar.text)
        special = {
            vocabulary.tokens[id].decode(errors="replace"): NUM_BYTES + index for index, id in enumerate(costs.special)
        }
        tree = tree_of(grammar, special)
        written = [] if tree is None else [ShortTexts(tree, style) for style in STYLES]
        found = sorted({piece for texts in written for piece in texts.pieces if len(piece) <= MAX_PIECE}, key=len)
        rests = (piece[start:] for piece in found for start in range(len(piece)))
        longest = costs.ending(found[-1]).num_tokens if found else LONGEST_TOKEN
        self.growth = max(LEAST_GROWTH, OPENED * int(longest) if math.isfinite(longest) else MAX_PIECE)
        kept = dict.fromkeys((*BREAKS, *CONTINUATIONS, *ESCAPES))
        for rest in rests:
            if len(kept) >= MAX_PIECES:
                break
            kept[rest] = None
        self.pieces = {piece: costs.ending(piece).num_tokens for piece in sorted(kept, key=len)}
        self.end = NUM_BYTES + len(costs.special)
        self.matcher = self._matcher(lark_of(grammar, special), [vocabulary.tokens[id] for id in costs.special])
        self.is_known = not self.matcher.is_error() and not (tree is None and _TOKEN_BY_NUMBER.search(grammar.text))
        self.first = self._first([texts.whole for texts in written]) if self.is_known else None

    def _matcher(self, lark: str, special: Sequence[bytes]) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(_byte_tokenizer(special), lark, log_level=0)

    def _first(self, texts: Sequence[Symbols | None]) -> Ending | None:
        matching = [text for text in texts if text is not None and self.is_whole(self.matcher, text)]
        found = [self.costs.ending(text) for text in matching]
        best = min(found, key=lambda each: each.num_tokens, default=None)
        if best is not None and math.isfinite(best.num_tokens):
            return best
        return EndingSearch(self, self.matcher, (), None).best()

    def cost_of(self, text: Symbols) -> float:
        """Return the number of tokens of a text."""
        found = self.pieces.get(text)
        return self.costs.ending(text).num_tokens if found is None else found

    def is_whole(self, matcher: LLMatcher, text: Symbols) -> bool:
        """Return whether a text ends the answer that ``matcher`` has followed."""
        return int(matcher.validate_tokens([*text, self.end])) > len(text)

    def needs_end(self, matcher: LLMatcher, text: Symbols) -> bool:
        """Return whether more could follow after a text that ends the answer, so that its end must be said by a token."""
        if self.has_free_text:
            return False
        after = matcher.deep_copy()
        return not (after.consume_tokens(list(text)) and after.is_stopped() and not after.is_error())


def _byte_tokenizer(special: Sequence[bytes]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(special), slices=[])  # type: ignore[arg-type]  # it takes any object of this form


class _Bytes:
    """A vocabulary of bytes and special tokens in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, special: Sequence[bytes]) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(NUM_BYTES)), *special, b"<end of the answer>"]
        self.eos_token_id = len(self.tokens) - 1
        self.special_token_ids = list(range(NUM_BYTES, len(self.tokens)))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class EndingSearch:
    """A search for an ending after ``begin``, which follows what ``matcher`` knows. ``known`` ended the answer before it."""

    def __init__(self, endings: GrammarEndings, matcher: LLMatcher, begin: Symbols, known: Ending | None) -> None:
        self._endings = endings
        self._matcher = matcher
        self._begin = begin
        self._known = known
        self._num_left = MAX_CHECKS

    def best(self, limit: float = math.inf) -> Ending | None:
        """Return the first ending found of at most ``limit`` tokens, its end token included; None without one."""
        self._num_left = MAX_CHECKS if math.isinf(limit) else FEW_CHECKS
        return next((each for each in self._found(limit) if self.is_in_time(each, limit)), None)

    def is_in_time(self, ending: Ending, limit: float) -> bool:
        """Return whether an ending, with the end token that it may need, has at most ``limit`` tokens."""
        if ending.num_tokens >= limit + 1:
            return False
        text = (*self._begin, *ending.text)
        return ending.num_tokens < limit or not self._endings.needs_end(self._matcher, text)

    def _found(self, limit: float) -> Iterator[Ending]:
        """Yield endings, mostly short ones first, from texts that may have at most ``limit`` tokens."""
        yield from self._after((), limit)
        waiting: list[tuple[float, int, Symbols, int]] = [(0.0, 0, (), 0)]
        seen: set[Symbols] = {()}
        num_alike: dict[bytes, int] = {}
        num_nodes = 0
        while waiting and num_nodes < MAX_NODES and self._num_left > 0:
            cost, _, text, num_parts = heapq.heappop(waiting)
            after = self._matcher.deep_copy()
            self._num_left -= CHECKS_PER_COPY
            if not after.consume_tokens([*self._begin, *text]) or after.is_stopped():
                continue
            allowed = after.compute_bitmask()
            num_alike[allowed] = num_alike.get(allowed, 0) + 1
            if num_alike[allowed] > MAX_ALIKE:
                continue
            num_nodes += 1
            for more in self._following(after, allowed):
                longer = text + more
                longer_cost = cost + self._endings.cost_of(more)
                if longer in seen or longer_cost - num_parts > limit:  # two parts may share a token
                    continue
                if self._num_left <= 0:
                    return
                seen.add(longer)
                yield from self._after(longer, limit - (longer_cost - num_parts))
                heapq.heappush(waiting, (longer_cost, len(longer), longer, num_parts + 1))

    def _after(self, text: Symbols, limit: float) -> Iterator[Ending]:
        """Yield the ending that is ``text`` and the shortest rest of the known one, of about ``limit`` tokens at most."""
        start = [*self._begin, *text]
        rests = self._known.text if self._known is not None else ()
        costs = self._known.costs if self._known is not None else (0.0,)
        for place in self._places(costs, limit + SHARED, not text):
            whole = [*start, *rests[place:], self._endings.end]
            if self._is_valid(self._matcher, whole):
                if not text and self._known is not None:
                    yield self._known.rest(place)
                else:
                    self._num_left -= len(whole)
                    yield self._endings.costs.ending((*text, *rests[place:]))
                return

    def _places(self, costs: Sequence[float], limit: float, is_first: bool) -> Iterator[int]:
        """Yield the places of a known ending at which it may go on, with at most ``limit`` tokens: those near its end first.

        Of a long one not all are tried: the first places, before the others if any ending within the limit will do, and some near
        its end, more of them where nothing is between the answer and it (``is_first``).
        """
        size = len(costs) - 1
        is_long = size > SHORT
        first = range(NEAR if is_first else NEAR // 2) if is_long else ()
        if math.isfinite(limit):
            yield from (place for place in first if costs[place] <= limit)
        least = self._num_left - (self._num_left // SHARE if is_first else SHORT)
        for place in range(size, -1, -1):
            if costs[place] > limit or (is_long and self._num_left <= least):
                break
            yield place
        if math.isinf(limit):
            yield from first

    def _following(self, after: LLMatcher, allowed: bytes) -> list[Symbols]:
        """Return texts that may follow where ``after`` is."""
        if forced := after.compute_ff_bytes():
            return [tuple(forced)]
        symbols = np.flatnonzero(np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")).tolist()
        firsts = {symbol for symbol in symbols if symbol < NUM_BYTES + len(self._endings.costs.special)}
        found = [piece for piece in self._endings.pieces if piece[0] in firsts and self._may_follow(after, piece)]
        if len(firsts) <= FEW_BYTES:
            found += [(symbol,) for symbol in sorted(firsts)]
        return list(dict.fromkeys(found)) or [(min(firsts),)] if firsts else []

    def _may_follow(self, after: LLMatcher, piece: Symbols) -> bool:
        return self._num_left > 0 and self._is_valid(after, list(piece))

    def _is_valid(self, matcher: LLMatcher, symbols: list[int]) -> bool:
        """Return whether symbols may follow, and count what it took to know."""
        num_valid = int(matcher.validate_tokens(symbols))
        self._num_left -= 1 + num_valid // VALID_PER_CHECK + len(symbols) // GIVEN_PER_CHECK
        return num_valid == len(symbols)


class ShortestEnding:
    """The shortest known ending of one answer. It is found again only where the answer may be near its limit.

    ``accept`` takes the tokens of the answer, and ``fits`` says whether it can end in time with one more.
    """

    def __init__(self, endings: GrammarEndings) -> None:
        self._endings = endings
        self._matcher = endings.matcher.deep_copy()
        self._known = endings.first
        self._is_shortest = True  # whether a search has found the known one
        self._pending: list[int] = []  # symbols that the matcher does not know yet
        self._num_pending = 0  # tokens after which the ending was not found again
        self._checked: dict[
            int, tuple[Ending, bool]
        ] = {}  # the endings after tokens that fit, and if they are the shortest

    def clone(self) -> ShortestEnding:
        """Return an ending at the same place, which goes on by itself."""
        cloned = copy.copy(self)
        cloned._matcher = self._matcher.deep_copy()
        cloned._pending = list(self._pending)
        cloned._checked = {}
        return cloned

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens."""
        for token in tokens:
            checked = self._checked.get(token)
            symbols = self._endings.costs.symbols_of(token)
            self._pending += symbols
            self._checked = {}
            if checked is not None:
                self._known, self._is_shortest = checked
                self._num_pending = 0
            elif self._known is not None and not self._num_pending and self._known.text[: len(symbols)] == symbols:
                self._known = self._known.rest(len(symbols))
            else:
                self._num_pending += 1

    def fits(self, tokens: Sequence[int], num_left: int) -> bool:
        """Return whether the answer can end with at most ``num_left`` tokens after ``tokens``. True if no ending is known."""
        if self.is_far(num_left):
            return True
        symbols = tuple(chain.from_iterable(map(self._endings.costs.symbols_of, tokens)))
        found = self._going_on(symbols, num_left)
        is_shortest = False
        if found is None:
            self.find()
            if self._known is None or self.is_far(num_left):
                return True
            found = self._after(symbols, num_left)
            is_shortest = True
        if found is None:
            return False
        if len(tokens) == 1:
            self._checked[tokens[0]] = (found, is_shortest)
        return True

    def is_far(self, num_left: int) -> bool:
        """Return whether any token fits, however far it moves the end away."""
        longest = self._known.num_tokens if self._known is not None else self._endings.growth
        return longest + 1 + (self._num_pending + 1) * self._endings.growth <= num_left

    def find(self) -> Ending | None:
        """Return the shortest ending that is found; None if none is."""
        self._catch_up()
        is_old = self._num_pending >= (1 if self._known is not None else RETRY)
        if is_old or not self._is_shortest:
            self._known = EndingSearch(self._endings, self._matcher, (), self._known or self._endings.first).best()
            self._num_pending = 0
            self._is_shortest = True
        return self._known

    def _catch_up(self) -> None:
        """Tell the matcher the tokens that it does not know yet."""
        if self._pending:
            self._matcher.consume_tokens(self._pending)
            self._pending = []

    def _going_on(self, symbols: Symbols, num_left: int) -> Ending | None:
        """Return what is left of a known long ending, if that ends the answer after ``symbols``; else it takes a search to know.

        So only few answers need one after each token.
        """
        known = self._known
        if known is None or len(known.text) <= SHORT:
            return None
        self._catch_up()
        for place in range(NEAR):
            rest = known.rest(place)
            if rest.num_tokens < num_left and self._endings.is_whole(self._matcher, (*symbols, *rest.text)):
                return rest
        return None

    def _after(self, symbols: Symbols, num_left: int) -> Ending | None:
        """Return an ending of at most ``num_left`` tokens after ``symbols``, its end token included; None without one."""
        known = self._known
        assert known is not None, "there is nothing to go on with"
        search = EndingSearch(self._endings, self._matcher, symbols, known)
        if known.text[: len(symbols)] == symbols and search.is_in_time(rest := known.rest(len(symbols)), num_left):
            return rest
        if known.num_tokens < num_left and self._endings.is_whole(self._matcher, (*symbols, *known.text)):
            return known
        return search.best(num_left)
