"""From logits to a token. Semantics and order of openvino_genai's sampler, checked against it in ``tests/peer``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
IntArray = NDArray[np.intp]
COLDEST = 1e-6  # a temperature below this is this: the most likely token and its ties


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings of ``openvino_genai.GenerationConfig``."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    rng_seed: int = 0
    wants_logprobs: bool = False


class Sampler:
    """Chooses the tokens of one request; keeps what its penalties must remember."""

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int, rng: np.random.Generator) -> None:
        self._params = params
        self._rng = rng
        self.vocab_size = vocab_size
        self._has_penalty = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self._counts = np.zeros(vocab_size if self._has_penalty else 0, np.int32)  # of generated tokens
        self._seen = np.zeros(vocab_size if self._has_penalty else 0, bool)  # in prompt or answer
        self._generated: list[int] = []  # the distinct ones
        if self._has_penalty:
            self._seen[prompt] = True

    def sample(self, logits: Logits, banned: IntArray | None = None, best: int | None = None) -> tuple[int, float]:
        """The next token and its log-probability under the model's own logits (0.0 unless asked for).

        ``logits [vocab]`` is left as it is; tokens in ``banned`` are not chosen; ``best`` is the most likely one, if known.
        """
        original = logits
        if banned is not None or self._has_penalty or self._params.do_sample:
            best = None
        if banned is not None or self._has_penalty:
            logits = logits.copy()
        if banned is not None:
            logits[banned] = -np.inf
        if self._has_penalty:
            self._penalise(logits)
        token = self._pick(logits) if best is None else best
        logprob = _logprob(original, token) if self._params.wants_logprobs else 0.0
        if self._has_penalty:
            self._remember(token)
        return token, logprob

    def _pick(self, logits: Logits) -> int:
        return self._draw(logits) if self._params.do_sample else int(np.argmax(logits))

    def _penalise(self, logits: Logits) -> None:
        """As GenAI does it: presence and frequency penalties move a logit towards 0 and past it, whatever its sign."""
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._seen)
            values = logits[seen]
            factor = np.float32(params.repetition_penalty)
            logits[seen] = np.where(values > 0, values / factor, values * factor)
        for penalty in (params.presence_penalty, params.frequency_penalty * self._counts[self._generated]):
            values = logits[self._generated]
            logits[self._generated] = np.where(values >= 0, values - penalty, values + penalty)

    def _remember(self, token: int) -> None:
        if not self._counts[token]:
            self._generated.append(token)
        self._counts[token] += 1
        self._seen[token] = True

    def _draw(self, logits: Logits) -> int:
        candidates, probabilities = candidate_distribution(logits, self._params)
        return int(candidates[_inverse_cdf(probabilities, self._rng.random())])


def candidate_distribution(logits: Logits, params: SamplingParams) -> tuple[IntArray, NDArray[np.float64]]:
    """Tokens that may be drawn and their probabilities: temperature, top_k, top_p of these, min_p. Filtered: likely first."""
    weights = np.exp((logits - logits.max()) / np.float32(max(params.temperature, COLDEST)))
    if (
        not params.top_k and params.top_p == 1.0 and params.min_p == 0.0
    ):  # in any order: sorting would take most of the time
        return np.arange(len(weights)), weights.astype(np.float64) / weights.sum(dtype=np.float64)
    candidates = _worth_sorting(weights, params)
    order = np.argsort(-weights[candidates], kind="stable")
    candidates = candidates[order][: params.top_k or None]
    probabilities = weights[candidates].astype(np.float64)
    is_all = not params.top_k or params.top_k >= len(weights)
    probabilities /= weights.sum(dtype=np.float64) if is_all else probabilities.sum()
    keep = len(candidates)
    if params.top_p < 1.0:
        keep = min(keep, int(np.searchsorted(np.cumsum(probabilities), params.top_p)) + 1)
    if params.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
    candidates, probabilities = candidates[:keep], probabilities[:keep]
    return candidates, probabilities / probabilities.sum()


def _worth_sorting(weights: Logits, params: SamplingParams) -> IntArray:
    """Sorting a vocabulary of 150 k costs more than the rest together: leave out what the filters cut for certain."""
    if params.top_k and params.top_k < len(weights):
        return np.argpartition(weights, len(weights) - params.top_k)[-params.top_k :]
    floor = 0.0
    if params.top_p < 1.0:  # all that is below this shares less than 1 - top_p
        floor = (1.0 - params.top_p) * float(weights.sum(dtype=np.float64)) / len(weights)
    floor = max(floor, params.min_p * float(weights.max()) * 0.999)
    return np.flatnonzero(weights >= floor)


def _inverse_cdf(probabilities: NDArray[np.float64], uniform: float) -> int:
    return min(int(np.searchsorted(np.cumsum(probabilities), uniform, side="right")), len(probabilities) - 1)


def _logprob(logits: Logits, token: int) -> float:
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top).sum(dtype=np.float64)))
