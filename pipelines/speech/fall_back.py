"""Whether the text of a window is good, or is decoded again at a higher temperature (arXiv 2212.04356, section 4.5)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from staticllm.pipelines.generation.options.resolve import GenerationOptions
from staticllm.pipelines.speech.whisper_config import FallBackParams


class Verdict(Enum):
    """What becomes of the text of a window: it is kept, decoded again at the next temperature, or dropped as silence."""

    KEEP = "keep"
    AGAIN = "again"
    SILENCE = "silence"


@dataclass(frozen=True)
class HeardWindow:
    """What a window was decoded to.

    Attributes:
        tokens: The tokens that were generated, with timestamps and the end of the text.
        log_probability: The sum of their log-probabilities at temperature 1, after the logits processors.
        no_speech: The probability that the window has no speech.
    """

    tokens: Sequence[int]
    log_probability: float
    no_speech: float = 0.0

    @property
    def mean_log_probability(self) -> float:
        """The log-probability per token."""
        return self.log_probability / max(1, len(self.tokens))


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how many times smaller zlib makes the tokens, as transformers: repeated text has a large ratio.

    Each token counts as the bytes that the largest one needs. (openai-whisper compresses the text.)
    """
    width = ((vocab_size.bit_length() - 1) // 8) + 1
    content = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(content) / len(zlib.compress(content))


def verdict(heard: HeardWindow, params: FallBackParams, vocab_size: int) -> Verdict:
    """Return what becomes of a window's text, with the rules of transformers' ``_need_fallback``.

    Without ``logprob_threshold``, where transformers fails, ``no_speech_threshold`` alone decides about silence, as in
    openai-whisper. After the last temperature there is nothing to decode again: ``AGAIN`` then means to keep the text.
    """
    least = params.logprob_threshold
    is_unlikely = least is not None and heard.mean_log_probability < least
    is_silent = params.no_speech_threshold is not None and heard.no_speech > params.no_speech_threshold
    if is_silent and (least is None or is_unlikely):
        return Verdict.SILENCE
    most = params.compression_ratio_threshold
    is_repeated = most is not None and compression_ratio(heard.tokens, vocab_size) > most
    return Verdict.AGAIN if is_unlikely or is_repeated else Verdict.KEEP


def options_at(options: GenerationOptions, temperature: float) -> GenerationOptions:
    """Return the options of a window at a temperature: at 0 greedy or with beams, else one answer is drawn."""
    if temperature <= 0:
        return replace(options, sampling=replace(options.sampling, do_sample=False, temperature=1.0))
    sampling = replace(options.sampling, do_sample=True, temperature=temperature)
    return replace(options, sampling=sampling, beams=None)
