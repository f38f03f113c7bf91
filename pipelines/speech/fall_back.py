"""Whether the text of a window is good, or is decoded again at a higher temperature (arXiv 2212.04356, section 4.5)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ..generation.options.resolve import GenerationOptions
from .whisper_config import FallBackParams


class FallBackVerdict(Enum):
    """What becomes of the text of a window: it is kept, decoded again at the next temperature, or dropped as silence."""

    KEEP = "keep"
    AGAIN = "again"
    SILENCE = "silence"


@dataclass(frozen=True)
class DecodedWindow:
    """What a window was decoded to."""

    tokens: Sequence[int]
    """The tokens of the text, with timestamps."""
    logprobs: Sequence[float]
    """The log-probability of each token that was chosen, also of the end, at temperature 1, by its final logits."""
    no_speech: float | None = None
    """The probability that the window has no speech; None if it is not known."""
    temperature: float = 0.0
    """The temperature at which the tokens were chosen."""
    num_told: int = 0
    """The number of ``tokens`` that the caller has got already."""

    @property
    def mean_log_probability(self) -> float:
        """The log-probability per token that was chosen, as in openai-whisper; 0 if there is none."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how many times smaller zlib makes the tokens, as transformers: repeated text has a large ratio.

    Each token counts as the bytes that the largest one needs. (openai-whisper compresses the text.)
    """
    width = ((vocab_size.bit_length() - 1) // 8) + 1
    content = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))


def verdict(decoded: DecodedWindow, params: FallBackParams, vocab_size: int) -> FallBackVerdict:
    """Return what becomes of a window's text, with the rules of transformers' ``_need_fallback``.

    Without ``logprob_threshold``, where transformers fails, ``no_speech_threshold`` alone decides about silence, as in
    openai-whisper. After the last temperature there is nothing to decode again: ``best_of`` then says what is kept.
    """
    least = params.logprob_threshold
    is_unlikely = least is not None and decoded.mean_log_probability < least
    if may_be_silent(decoded.no_speech, params) and (least is None or is_unlikely):
        return FallBackVerdict.SILENCE
    is_repeated = _is_repeated(decoded, params, vocab_size)
    return FallBackVerdict.AGAIN if is_unlikely or is_repeated else FallBackVerdict.KEEP


def may_be_silent(no_speech: float | None, params: FallBackParams) -> bool:
    """Return whether a window counts as silent if its text is not good."""
    most = params.no_speech_threshold
    return most is not None and no_speech is not None and no_speech > most


def _is_repeated(decoded: DecodedWindow, params: FallBackParams, vocab_size: int) -> bool:
    most = params.compression_ratio_threshold
    return most is not None and compression_ratio(decoded.tokens, vocab_size) > most


def best_of(tried: Sequence[DecodedWindow], params: FallBackParams, vocab_size: int) -> DecodedWindow:
    """Return the most likely of the texts of which none is good, as faster-whisper: one that does not repeat itself, if there is
    one. (transformers and openai-whisper take the last one, which is the most random.)
    """
    varied = [decoded for decoded in tried if not _is_repeated(decoded, params, vocab_size)]
    return max(varied or tried, key=lambda decoded: decoded.mean_log_probability)


def options_at(options: GenerationOptions, temperature: float) -> GenerationOptions:
    """Return the options of a window at a temperature: at 0 greedy or with beams, else one answer is drawn."""
    if temperature <= 0:
        return replace(options, sampling=replace(options.sampling, do_sample=False, temperature=1.0))
    sampling = replace(options.sampling, do_sample=True, temperature=temperature)
    return replace(options, sampling=sampling, beams=None)
