"""The sampling parameters of one request, with the names of ``openvino_genai.GenerationConfig`` where it has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

TokenSequences: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SamplingParams:
    """The parameters that choose tokens. ``top_k=0`` keeps all tokens.

    Without ``do_sample`` the most likely token is chosen, and temperature, ``top_k``, ``top_p``, ``min_p`` and the fields
    from ``typical_p`` to ``mirostat_eta`` have no effect. The fields from ``typical_p`` on are our own, with the names of
    llamacpp's server and of transformers. ``mirostat`` is 0 or 2. ``dry_penalty_last_n`` is -1 for the whole sequence and 0
    for DRY off; ``dry_breakers`` and ``bad_words`` are sequences of token ids, ``logit_bias`` pairs of a token id and a number.
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
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: TokenSequences = ()
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: TokenSequences = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a dict of JSON types, in which sequences are lists."""
        rows = {name: tuple(tuple(row) for row in values.get(name, ())) for name in SEQUENCES}
        return cls(**{**values, **rows})

    @property
    def uses_dry(self) -> bool:
        """Whether DRY has an effect."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


SEQUENCES = ("dry_breakers", "logit_bias", "bad_words")
"""The fields that hold tuples of tuples."""
