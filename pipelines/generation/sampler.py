"""Chooses tokens from logits with the semantics and the order of openvino_genai's sampler, as ``tests/peer`` checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from staticllm.errors import GenerationConfigError

from .filters import (
    Logits,
    draw,
    largest,
    nucleus,
    typical,
    weights_of,
    without_top_choices,
)
from .grammar_mask import MAX_REFUSED
from .logits_processors import LogitsProcessor, Preparable, Refusing
from .options.table import SamplingParams

TopTokens = tuple[tuple[int, float], ...]
"""Tokens with their log-probabilities, the most likely first."""


@dataclass(frozen=True)
class SampledToken:
    """A chosen token and its log-probability under the model's own logits if that was requested.

    Otherwise it is the one that a drawn token was drawn with, and 0.0 in greedy decoding, as in GenAI. ``top``: the most likely
    tokens with theirs, the most likely first, if they were requested.
    """

    token: int
    logprob: float
    top: TopTokens = ()


class Mirostat:
    """Mirostat 2 (arXiv 2007.14966, as llamacpp computes it): cuts off tokens so that the surprise stays near a target.

    Surprise is -log2 p. Tokens with more than ``limit`` are cut off, which begins at ``2 * tau``; after each token the limit
    moves by ``eta`` times the difference between ``tau`` and the surprise of that token among the kept ones.
    """

    def __init__(self, tau: float, eta: float) -> None:
        self._tau = tau
        self._eta = eta
        self.limit = 2 * tau

    def draw(self, weights: Logits, uniform: float) -> SampledToken:
        """Return the index that ``uniform``, a number in [0, 1], selects among ``weights [n]``, and move the limit."""
        least = float(weights.sum(dtype=np.float64)) * 2.0 ** -min(self.limit, 1000.0)
        kept = weights * (weights >= min(least, float(weights.max())))
        choice = _drawn(kept, uniform)
        self.limit -= self._eta * (-choice.logprob / math.log(2) - self._tau)
        return choice


class Sampler:
    """Chooses the tokens of one request, one call per token.

    The order is: ``processors`` in their order, temperature, top_k, typical_p, top_p, min_p, XTC, then a draw; or processors,
    temperature and mirostat. ``rng`` is used only if ``params.do_sample``.
    """

    def __init__(self, params: SamplingParams, processors: Sequence[LogitsProcessor], rng: np.random.Generator) -> None:
        self._params = params
        self.processors = tuple(processors)
        self._rng = rng
        self._mirostat = Mirostat(params.mirostat_tau, params.mirostat_eta) if params.mirostat else None
        self._preparable = [processor for processor in self.processors if isinstance(processor, Preparable)]
        self._refusing = [processor for processor in self.processors if isinstance(processor, Refusing)]

    def prepare(self) -> None:
        """Let the processors prepare the next token; called while the device computes its logits."""
        for processor in self._preparable:
            processor.prepare()

    def sample(self, logits: Logits, best: int | None = None) -> SampledToken:
        """Return the next token.

        Args:
            logits: float32 ``[vocab]``, finite; they are not changed.
            best: The index of the largest logit, if known. Greedy decoding without active processors returns it and does
                not read ``logits``.

        Raises:
            GenerationConfigError: the processors forbid every token.
        """
        processed = self._processed(logits)
        if best is not None and processed is logits and not self._params.do_sample:
            choice = SampledToken(best, 0.0)
        else:
            choice = self._choose(processed)
        for refusing in self._refusing:
            choice = self._not_refused(refusing, choice, processed)
        for processor in self.processors:
            processor.accept(choice.token)
        if self._params.wants_logprobs:
            top = _most_likely(logits, self._params.num_top_logprobs)
            return SampledToken(choice.token, _log_probability(logits, choice.token), top)
        return choice

    def _choose(self, processed: Logits) -> SampledToken:
        return self._draw(processed) if self._params.do_sample else SampledToken(int(np.argmax(processed)), 0.0)

    def _not_refused(self, processor: Refusing, choice: SampledToken, processed: Logits) -> SampledToken:
        """Return ``choice``, or another one from logits ``[vocab]`` if a processor refuses it."""
        left = processed
        num_refused = 0
        while processor.refuses(choice.token):
            num_refused += 1
            left = processed.copy() if left is processed else left
            left[choice.token] = -np.inf
            if num_refused == MAX_REFUSED or left.max() == -np.inf:
                left = processed.copy()
                processor.keep_ending(left)
                return self._choose(left)
            choice = self._choose(left)
        return choice

    def _processed(self, logits: Logits) -> Logits:
        """Return a copy that the active processors have changed; ``logits`` itself if none is active."""
        active = [processor for processor in self.processors if processor.is_active]
        if not active:
            return logits
        processed = logits.copy()
        for processor in active:
            processor.process(processed)
        if processed.max() == -np.inf:
            remedies = " or ".join(processor.remedy for processor in active if processor.remedy)
            raise GenerationConfigError(
                f"no token can be chosen: all {len(logits)} tokens are forbidden"
                + (f"; {remedies}" if remedies else "")
            )
        return processed

    def _draw(self, logits: Logits) -> SampledToken:
        params = self._params
        uniform = self._rng.random()
        if self._mirostat is not None:
            return self._mirostat.draw(weights_of(logits, params.temperature), uniform)
        excludes_top = params.xtc_probability > 0 and self._rng.random() < params.xtc_probability
        if not params.top_k or params.top_k >= len(logits):
            return _drawn(_kept_weights(logits, params, excludes_top), uniform)
        candidates = largest(logits, params.top_k)
        drawn = _drawn(_kept_weights(logits[candidates], params, excludes_top), uniform)
        return SampledToken(int(candidates[drawn.token]), drawn.logprob)


def _most_likely(logits: Logits, count: int) -> TopTokens:
    """Return ``count`` tokens with their log-probabilities, of equal ones those with the lowest ids first."""
    if not count:
        return ()
    found = largest(logits, min(count, len(logits)))
    ordered = sorted(map(int, found), key=lambda token: (-float(logits[token]), token))
    return tuple((token, _log_probability(logits, token)) for token in ordered)


def _drawn(weights: Logits, uniform: float) -> SampledToken:
    """Return the index that ``uniform``, a number in [0, 1], selects among ``weights [n]``, and the logarithm of its share."""
    index = draw(weights, uniform)
    return SampledToken(index, math.log(weights[index] / weights.sum()))


def _kept_weights(logits: Logits, params: SamplingParams, excludes_top: bool) -> Logits:
    """Return the weights ``[n]`` of the logits ``[n]`` that top_k keeps; tokens that another filter removes have weight 0."""
    weights = weights_of(logits, params.temperature)
    if params.typical_p < 1.0:
        weights *= typical(weights, params.typical_p)
    if params.top_p < 1.0:
        weights *= nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p * float(weights.max()))
    if excludes_top:
        weights *= without_top_choices(weights, params.xtc_threshold)
    return weights


def _log_probability(logits: Logits, token: int) -> float:
    """Return the natural logarithm of ``token``'s probability under ``logits [vocab]``."""
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top).sum(dtype=np.float64)))
