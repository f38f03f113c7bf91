"""From logits to a token. Semantics and order of openvino_genai's sampler, checked against it in ``tests/peer``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import GenerationConfigError

Logits = NDArray[np.float32]
IntArray = NDArray[np.intp]
COLDEST = 1e-6  # a temperature below this is this: the most likely token and its ties
BLOCK = 128  # tokens that are looked at together
BIN_SHIFT = 17  # of the bits of a float: bins as wide as a fiftieth of their value or less
NUM_BINS = (0x3F800000 >> BIN_SHIFT) + 1  # up to that of 1, the largest weight
PIECE = 1 << 15


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

        Raises:
            GenerationConfigError: every token that could be chosen is banned.
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
        if banned is not None and not np.isfinite(logits.max()):
            raise GenerationConfigError(
                f"nothing is left to choose: {len(banned)} of {self.vocab_size} tokens end the answer and min_new_tokens "
                "forbids that; lower min_new_tokens or shorten stop_token_ids"
            )
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
        params, uniform = self._params, self._rng.random()
        if not params.top_k or params.top_k >= len(logits):
            return _draw_any(_kept_weights(logits, params), uniform)
        candidates = _largest(logits, params.top_k)
        return int(candidates[_draw_any(_kept_weights(logits[candidates], params), uniform)])


def candidate_distribution(logits: Logits, params: SamplingParams) -> tuple[IntArray, NDArray[np.float64]]:
    """Tokens that may be drawn, ascending, and their probabilities: temperature, top_k, top_p of these, min_p of these.

    Of equally likely tokens at the border the first ones stay.
    """
    is_cut = params.top_k and params.top_k < len(logits)
    candidates = _largest(logits, params.top_k) if is_cut else np.arange(len(logits))
    weights = _kept_weights(logits[candidates], params)
    kept = np.flatnonzero(weights)
    return candidates[kept], weights[kept].astype(np.float64) / weights.sum(dtype=np.float64)


def _kept_weights(logits: Logits, params: SamplingParams) -> Logits:
    """Probabilities but for a factor, 0 for what top_p and min_p leave out. A vocabulary of 150 k is never sorted as a whole."""
    weights = _weights(logits, params)
    if params.top_p < 1.0:
        weights *= _nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p * float(weights.max()))
    return weights


def _weights(logits: Logits, params: SamplingParams) -> Logits:
    """Probabilities but for a factor; 1 for the most likely token."""
    weights: Logits = np.exp((logits - logits.max()) / np.float32(max(params.temperature, COLDEST)))
    return weights


def _floor(values: Logits, count: int) -> float:
    """A value that at least ``count`` of ``values`` reach, and not many more: from the maxima of blocks."""
    maxima = values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
    source = maxima if count <= len(maxima) else values
    return float(np.partition(source, len(source) - count)[len(source) - count])


def _largest(values: Logits, count: int) -> IntArray:
    """Indices of the ``count`` largest, ascending; of equal ones the first."""
    candidates = _reaching(values, _floor(values, count))
    found = values[candidates]
    border = np.partition(found, len(found) - count)[len(found) - count]
    above, equal = np.flatnonzero(found > border), np.flatnonzero(found == border)
    chosen: IntArray = np.sort(np.concatenate([above, equal[: count - len(above)]]))
    return candidates[chosen]


def _nucleus(weights: Logits, share: float) -> NDArray[np.bool_]:
    """Which are the fewest of the largest weights that together have this share of all; of equal ones the first.

    Only those at the border are sorted: bins by the leading bits of a positive float are in the order of the floats.
    """
    sums = _masses(weights)[::-1].cumsum()
    mass = share * float(sums[-1])
    place = min(int(np.searchsorted(sums, mass)), NUM_BINS - 1)
    border, rest = NUM_BINS - 1 - place, mass - (float(sums[place - 1]) if place else 0.0)
    least, above = (np.array([border, border + 1], np.uint32) << BIN_SHIFT).view(np.float32)
    kept: NDArray[np.bool_] = weights >= above
    members = np.flatnonzero((weights >= least) & ~kept)
    order = np.argsort(-weights[members], kind="stable")
    count = int(np.searchsorted(np.cumsum(weights[members][order], dtype=np.float64), rest)) + 1
    kept[members[order[:count]]] = True
    return kept


def _masses(weights: Logits) -> NDArray[np.float64]:
    """The sum of the weights in each bin. TextDelta by piece: memory for all bins at once would be new pages in every call."""
    sums = np.zeros(NUM_BINS)
    for start in range(0, len(weights), PIECE):
        piece = weights[start : start + PIECE]
        sums += np.bincount((piece.view(np.uint32) >> BIN_SHIFT).astype(np.intp), piece, NUM_BINS)
    return sums


def _reaching(values: Logits, floor: float) -> IntArray:
    return np.flatnonzero(values >= np.float32(floor))


def _draw_any(weights: Logits, uniform: float) -> int:
    """One of those with a weight: first a block of them, then one in it."""
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    value = uniform * float(sums[-1])
    block = _place(sums, value)
    inside = np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
    return int(starts[block]) + _place(inside, value - (float(sums[block - 1]) if block else 0.0))


def _place(sums: NDArray[np.float64], value: float) -> int:
    """The first that is above ``value``; the last that adds something, where rounding leaves none."""
    return int(min(np.searchsorted(sums, value, side="right"), np.searchsorted(sums, sums[-1])))


def _logprob(logits: Logits, token: int) -> float:
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top).sum(dtype=np.float64)))
