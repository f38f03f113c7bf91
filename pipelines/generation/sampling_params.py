"""The sampling parameters of one request, with the names and meanings of ``openvino_genai.GenerationConfig``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that choose tokens. ``top_k=0`` keeps all tokens.

    Without ``do_sample`` the most likely token is chosen, and temperature, ``top_k``, ``top_p`` and ``min_p`` have no effect.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    rng_seed: int = 0
    wants_logprobs: bool = False
