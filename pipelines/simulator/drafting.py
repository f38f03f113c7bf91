"""Drafts in simulations: a draft model whose tokens are accepted with a given probability."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.engine.speculation.draft_model import PACKED_TOKENS, DraftModel
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.simulator.cost_model import HostCost
from staticllm.pipelines.simulator.simulated_programs import (
    PROMPT_TOKEN,
    VOCAB_SIZE,
    Tokens,
    VirtualClock,
    next_logits,
    simulated_runner,
)

LONGEST_CHUNK = 256
"""The most tokens of a prompt in one call of the draft model."""
WRONG = np.eye(1, VOCAB_SIZE, PROMPT_TOKEN, dtype=np.float32)
"""The logits of a token that is never accepted, since answers have no token of a prompt."""


@dataclass(frozen=True)
class Drafting:
    """Drafts of up to ``most`` tokens, each accepted with the probability ``accept`` if all before it were.

    The draft model takes ``seconds`` for each token of the drafts of a call, all requests together, and for each chunk of a
    prompt that it reads; 0 stands for prompt lookup. The engine decides when drafts pay, as for a real draft model.

    Raises:
        ConfigError: a value is impossible.
    """

    most: int
    accept: float
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.most < 1 or not 0 <= self.accept <= 1 or not 0 <= self.seconds < float("inf"):
            raise ConfigError(
                f"drafts of {self.most} tokens, accepted with {self.accept:g}, {self.seconds:g} s each: must be at least one "
                "token, a probability from 0 to 1, and 0 s or more"
            )

    @property
    def params(self) -> DraftParams:
        """The parameters of a request that drafts."""
        return DraftParams(max_tokens=self.most, uses_model=True)

    def model(self, max_num_seqs: int, max_seq_len: int, clock: VirtualClock) -> DraftModel:
        """Return a draft model for ``max_num_seqs`` sequences of ``max_seq_len`` tokens."""
        num_slots, sizes = max_num_seqs * max_seq_len, range(1, max_num_seqs + 1)
        variants = {Variant(min(max_seq_len, LONGEST_CHUNK), num_slots)}
        variants |= {Variant(n * rows, num_slots, n) for n in sizes for rows in (1, PACKED_TOKENS)}
        rng = np.random.default_rng(0)

        def guess(tokens: Tokens) -> Logits:
            logits = next_logits(tokens)
            logits[rng.random(len(tokens)) >= self.accept] = WRONG
            return logits

        runner = simulated_runner(variants, lambda variant: self.seconds, num_slots, clock, HostCost(), None, guess)
        return DraftModel(runner, sys.maxsize)  # it knows the tokens of every prompt
