"""Logits processors change the logits of a request before a token is chosen: penalties, and tokens not allowed yet.

A request has a list of processors, and its sampler applies them in order. A new one needs a class
with the members of ``LogitsProcessor`` and an entry in ``processors_for``; the sampler does not change. Processors that a user
made come after all others (``user_processors.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.repetition import BadWords, DryPenalty, NoRepeatNgrams


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
        self._presence, self._frequency = presence, frequency
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
