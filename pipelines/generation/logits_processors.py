"""Logits processors change the logits of a request before a token is chosen: penalties, tokens not allowed yet, users' own.

A request has a list of processors, and its sampler applies them in order. A new one needs a class with the members of
``LogitsProcessor`` and an entry in ``processors_for``. Those that a user made (``copies_for``) come after all others.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import GenerationConfigError, last_line

from .filters import IntArray, Logits
from .options.table import SamplingParams

MAX_EXPONENT = 88.0
"""The largest natural logarithm of a DRY penalty without its multiplier, so that float32 can hold it (as in llamacpp)."""
SLOW_MS = 20.0
"""A user's processor that takes longer for one token, ms, is reported once in the log ``staticllm``."""
log = logging.getLogger("staticllm")
_reported: set[str] = set()


class LogitsProcessor(Protocol):
    """One change of a request's logits (the term of HF and vLLM). It belongs to one request and may keep state.

    The sampler calls ``process`` once per token, if ``is_active``, and then ``accept`` with the token that was chosen.
    """

    @property
    def is_active(self) -> bool:
        """Whether ``process`` changes anything now; the sampler skips inactive processors, and copies no logits if all are."""
        ...

    @property
    def remedy(self) -> str:
        """The remedy that the error names if every token is forbidden; "" for a processor that forbids none."""
        ...

    def process(self, logits: Logits) -> None:
        """Change ``logits``, a copy float32 ``[vocab]``, in place; -inf forbids a token."""
        ...

    def accept(self, token: int) -> None:
        """Update the state with the chosen token."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """A processor that can find out before the logits are there what ``process`` will do."""

    def prepare(self) -> None:
        """Prepare the next ``process``; called on the engine's thread while the device runs. It must not raise."""
        ...


@runtime_checkable
class Refusing(Protocol):
    """A processor that decides of some tokens only when they are chosen, because it takes long to know it of all."""

    def refuses(self, token: int) -> bool:
        """Return whether a chosen token cannot follow; then another one is chosen."""
        ...

    def keep_ending(self, logits: Logits) -> None:
        """Forbid all tokens in ``logits [vocab]``, as processed, but one that it does not refuse, if there is one."""
        ...


class MinNewTokens:
    """Forbids stop tokens among the first ``min_new_tokens`` tokens of an answer."""

    remedy = "lower min_new_tokens or shorten stop_token_ids"

    def __init__(self, min_new_tokens: int, stop_token_ids: Collection[int], vocab_size: int) -> None:
        self._forbidden = np.array(sorted(token for token in stop_token_ids if token < vocab_size), np.intp)
        self._num_left = min_new_tokens

    @property
    def is_active(self) -> bool:
        return self._num_left > 0 and self._forbidden.size > 0

    def process(self, logits: Logits) -> None:
        logits[self._forbidden] = -np.inf

    def accept(self, token: int) -> None:
        self._num_left -= 1


class LogitBias:
    """Adds numbers to the logits of some tokens."""

    remedy = ""
    is_active = True

    def __init__(self, bias: Collection[tuple[int, float]], vocab_size: int) -> None:
        known = {token: number for token, number in bias if token < vocab_size}
        self._tokens = np.fromiter(known, np.intp, len(known))
        self._numbers = np.fromiter(known.values(), np.float32, len(known))

    def process(self, logits: Logits) -> None:
        logits[self._tokens] += self._numbers

    def accept(self, token: int) -> None:
        pass


class RepetitionPenalty:
    """Makes every token of prompt and answer less likely (CTRL, arXiv 1909.05858, section 4.1).

    Positive logits are divided by ``penalty``, the others are multiplied by it.
    """

    remedy = ""
    is_active = True

    def __init__(self, penalty: float, prompt: Sequence[int], vocab_size: int) -> None:
        self._penalty = np.float32(penalty)
        self._is_seen = np.zeros(vocab_size, bool)
        self._is_seen[list(prompt)] = True

    def process(self, logits: Logits) -> None:
        seen = np.flatnonzero(self._is_seen)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / self._penalty, values * self._penalty)

    def accept(self, token: int) -> None:
        self._is_seen[token] = True


class PresenceFrequencyPenalty:
    """Makes tokens of the answer less likely: once by ``presence``, and by ``frequency`` per time that they were generated.

    As in GenAI, a penalty moves positive and negative logits towards 0, and may move them past it.
    """

    remedy = ""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._counts: dict[int, int] = {}  # how often each token was generated

    @property
    def is_active(self) -> bool:
        return bool(self._counts)

    def process(self, logits: Logits) -> None:
        tokens = np.fromiter(self._counts, np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.int32, len(self._counts))
        for penalty in (self._presence, self._frequency * counts):
            values = logits[tokens]
            logits[tokens] = np.where(values >= 0, values - penalty, values + penalty)

    def accept(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1


class TokenHistory:
    """The tokens of prompt and answer as a numpy array that grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: IntArray = np.array([*tokens, *[0] * (64 + len(tokens) // 2)], np.intp)
        self._count = len(tokens)

    def add(self, token: int) -> None:
        if self._count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[self._count] = token
        self._count += 1

    def last(self, count: int, end: int | None = None) -> IntArray:
        """Return the last ``count`` tokens before index ``end``, or all if there are fewer; None for the end of the history."""
        end = self._count if end is None else end
        return self._tokens[max(0, end - count) : end]

    def __len__(self) -> int:
        return self._count


class BadWords:
    """Forbids token sequences: the last token of each, where the tokens before it are the last ones of prompt and answer."""

    remedy = "shorten bad_words or logit_bias"

    def __init__(self, sequences: Iterable[Sequence[int]], prompt: Sequence[int], vocab_size: int) -> None:
        known = [tuple(sequence) for sequence in sequences if max(sequence, default=vocab_size) < vocab_size]
        self._single = np.array(sorted({sequence[0] for sequence in known if len(sequence) == 1}), np.intp)
        self._long: dict[tuple[int, ...], list[int]] = defaultdict(list)  # the last tokens, by those before them
        for sequence in known:
            if len(sequence) > 1:
                self._long[sequence[:-1]].append(sequence[-1])
        self._lengths = sorted({len(head) for head in self._long})
        self._longest = max(self._lengths, default=0)
        self._last = list(prompt[max(0, len(prompt) - self._longest) :])
        self._forbidden = self._find()

    @property
    def is_active(self) -> bool:
        return self._forbidden.size > 0

    def process(self, logits: Logits) -> None:
        logits[self._forbidden] = -np.inf

    def accept(self, token: int) -> None:
        if self._longest:
            self._last = [*self._last, token][-self._longest :]
            self._forbidden = self._find()

    def _find(self) -> IntArray:
        heads = (tuple(self._last[-length:]) for length in self._lengths if length <= len(self._last))
        found = [token for head in heads for token in self._long.get(head, ())]
        return np.concatenate([self._single, np.array(found, np.intp)])


class NoRepeatNgrams:
    """Forbids every token that would make a sequence of ``size`` tokens occur a second time in prompt and answer."""

    remedy = "raise no_repeat_ngram_size"

    def __init__(self, size: int, prompt: Sequence[int]) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._last: tuple[int, ...] = ()
        for token in prompt:
            self.accept(token)

    @property
    def is_active(self) -> bool:
        return self._last in self._followers

    def process(self, logits: Logits) -> None:
        logits[self._followers[self._last]] = -np.inf

    def accept(self, token: int) -> None:
        if len(self._last) == self._size - 1:
            self._followers[self._last].append(token)
        self._last = (*self._last, token)[-self._size + 1 :] if self._size > 1 else ()


class DryPenalty:
    """Makes tokens less likely that would continue a sequence which occurred before (DRY: "don't repeat yourself").

    Take the last ``last_n`` tokens of prompt and answer (-1: all). If the ``n`` tokens at their end also occur earlier, the
    token after that earlier place loses ``multiplier * base ** (n - allowed_length)``, for the longest such ``n`` of at least
    ``allowed_length``. ``n`` never reaches back over a breaker, a token sequence such as that of a line break.
    """

    remedy = ""

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Iterable[Sequence[int]],
        prompt: Sequence[int],
    ) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = allowed_length
        self._last_n = 1 << 62 if last_n < 0 else last_n
        self._most = MAX_EXPONENT / float(np.log(base)) if base > 1.000001 else 0.0  # of n - allowed_length
        self._breakers: dict[int, set[tuple[int, ...]]] = defaultdict(set)  # by their last token
        for breaker in breakers:
            if breaker:
                self._breakers[breaker[-1]].add(tuple(breaker))
        self._history = TokenHistory(prompt)
        self._num_unbroken = self._count_unbroken()

    @property
    def is_active(self) -> bool:
        return min(self._num_unbroken, len(self._history) - 1, self._last_n - 1) >= self._allowed

    def process(self, logits: Logits) -> None:
        tokens = self._history.last(self._last_n)
        limit = min(self._num_unbroken, int(self._most) + self._allowed)
        lengths = repeated_lengths(tokens, limit)
        places = np.flatnonzero(lengths >= self._allowed)
        found, index = np.unique(tokens[places + 1], return_inverse=True)
        longest = np.zeros(len(found))
        np.maximum.at(longest, index, lengths[places])
        logits[found] -= (self._multiplier * self._base ** (longest - self._allowed)).astype(np.float32)

    def accept(self, token: int) -> None:
        self._history.add(token)
        self._num_unbroken = 0 if self._is_broken_at(len(self._history)) else self._num_unbroken + 1

    def _is_broken_at(self, end: int) -> bool:
        """Return whether a breaker ends with the token before index ``end``."""
        candidates = self._breakers.get(int(self._history.last(1, end)[0]), ())
        return any(tuple(self._history.last(len(each), end).tolist()) == each for each in candidates)

    def _count_unbroken(self) -> int:
        """Return the number of tokens after the last breaker."""
        for end in range(len(self._history), 0, -1):
            if self._is_broken_at(end):
                return len(self._history) - end
        return len(self._history)


def repeated_lengths(tokens: IntArray, limit: int) -> NDArray[np.intp]:
    """Return for each index of ``tokens [n]`` but the last how many tokens up to it equal those at the end, ``[n - 1]``.

    Lengths above ``limit`` are not told apart from it.
    """
    lengths = np.zeros(max(len(tokens) - 1, 0), np.intp)
    places = np.arange(len(lengths))
    for length in range(min(len(lengths), limit)):
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[len(tokens) - 1 - length]]
        if not len(places):
            break
        lengths[places] += 1
    return lengths


def processors_for(
    params: SamplingParams,
    prompt: Sequence[int],
    vocab_size: int,
    min_new_tokens: int = 0,
    late_token_ids: Collection[int] = (),
) -> list[LogitsProcessor]:
    """Return the processors that a request's options need, in the order in which they are applied.

    The order is that of GenAI, with ours where llamacpp has them: bias, forbidden tokens, penalties, DRY. ``prompt`` holds
    token ids below ``vocab_size``. None of ``late_token_ids`` is chosen among the first ``min_new_tokens`` tokens.
    """
    processors: list[LogitsProcessor] = []
    if params.logit_bias:
        processors.append(LogitBias(params.logit_bias, vocab_size))
    if min_new_tokens > 0 and late_token_ids:
        processors.append(MinNewTokens(min_new_tokens, late_token_ids, vocab_size))
    if params.bad_words:
        processors.append(BadWords(params.bad_words, prompt, vocab_size))
    if params.no_repeat_ngram_size:
        processors.append(NoRepeatNgrams(params.no_repeat_ngram_size, prompt))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(params.repetition_penalty, prompt, vocab_size))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        processors.append(PresenceFrequencyPenalty(params.presence_penalty, params.frequency_penalty))
    if params.uses_dry:
        dry = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_penalty_last_n)
        processors.append(DryPenalty(*dry, params.dry_breakers, prompt))
    return processors


def copies_for(given: Sequence[Any], prompt: Sequence[int], num_answers: int) -> list[list[LogitsProcessor]]:
    """Return the processors of each answer.

    A function is shared by all answers. An object with a method ``process`` may have a state, so each answer gets a deep copy.

    Raises:
        GenerationConfigError: an object cannot be copied.
    """
    return [[_guarded(each, prompt) for each in given] for _ in range(num_answers)] if given else []


def _guarded(given: Any, prompt: Sequence[int]) -> LogitsProcessor:
    if not callable(getattr(given, "process", None)):
        return _Guarded(_Function(given, prompt), _name_of(given))
    try:
        return _Guarded(copy.deepcopy(given), _name_of(given))
    except Exception as error:
        raise GenerationConfigError(
            f"the logits_processor {_name_of(given)} cannot be copied for each answer ({last_line(error)}): "
            "give it a method __deepcopy__"
        ) from error


def _name_of(given: Any) -> str:
    return str(getattr(given, "__qualname__", type(given).__qualname__))


class _Function:
    """A function of the tokens so far, int64 ``[n]``, and of the logits, float32 ``[vocab]``, which returns new logits.

    One that returns None has changed the logits in place.
    """

    def __init__(self, function: Callable[[Any, Any], Any], prompt: Sequence[int]) -> None:
        self._function = function
        self._history = TokenHistory(prompt)

    def process(self, logits: Logits) -> None:
        tokens = self._history.last(len(self._history)).astype(np.int64)
        changed = self._function(tokens, logits)
        if changed is None:
            return
        changed = np.asarray(changed, np.float32)
        if changed.shape != logits.shape:
            raise ValueError(f"it returned an array of shape {list(changed.shape)}, not {list(logits.shape)}")
        logits[:] = changed

    def accept(self, token: int) -> None:
        self._history.add(token)


class _Guarded:
    """Turns the exceptions of a user's processor into one of ours, checks its logits, and measures its time.

    Of the members of ``LogitsProcessor``, only ``process`` is needed.
    """

    def __init__(self, processor: Any, name: str) -> None:
        self._processor = processor
        self._name = name

    @property
    def remedy(self) -> str:
        usual = f"let the logits_processor {self._name} allow more tokens"
        return str(self._call(lambda: str(getattr(self._processor, "remedy", "")) or usual))

    @property
    def is_active(self) -> bool:
        return bool(self._call(lambda: getattr(self._processor, "is_active", True)))

    def process(self, logits: Logits) -> None:
        start = time.perf_counter()
        self._call(lambda: self._processor.process(logits))
        milliseconds = (time.perf_counter() - start) * 1e3
        if milliseconds > SLOW_MS and self._name not in _reported:
            _reported.add(self._name)
            log.warning(
                "the logits_processor %s took %.0f ms for one token: all requests wait meanwhile",
                self._name,
                milliseconds,
            )
        if np.isnan(logits).any() or np.isposinf(logits).any():
            raise GenerationConfigError(
                f"the logits_processor {self._name} made logits that are NaN or inf: use finite numbers, or -inf to forbid"
            )

    def accept(self, token: int) -> None:
        accept = getattr(self._processor, "accept", None)
        if accept is not None:
            self._call(lambda: accept(token))

    def _call(self, function: Callable[[], object]) -> object:
        try:
            return function()
        except BaseException as error:  # SystemExit and its like must not end the engine's thread, which serves others
            raise GenerationConfigError(
                f"the logits_processor {self._name} failed: {type(error).__name__}: {last_line(error)}"
            ) from error
