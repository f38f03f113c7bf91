"""Drafts in simulations: how many drafted tokens a call checks, and how many of them are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from staticllm.errors import ConfigError


@dataclass(frozen=True)
class Drafting:
    """Drafts of up to ``most`` tokens, each accepted with the probability ``accept`` if all before it were.

    The draft model takes ``seconds`` for each token of the drafts of a call, all requests together; prompt lookup takes 0.

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

    def num_expected(self, count: int) -> float:
        """Return how many of ``count`` drafted tokens are accepted on average."""
        return sum(self.accept**place for place in range(1, count + 1))

    def choose(self, num_decoding: int, limit: int, cost_of: Callable[[int], float | None]) -> int:
        """Return how many tokens to draft for each of the decoding requests; 0 if none pays.

        As in the engine, the tokens per second that are expected must be more than without drafts. ``cost_of(count)`` is the
        duration of the call with so many drafted tokens for each request, None if no program holds it.
        """
        best, best_rate = 0, 0.0
        for count in range(min(self.most, limit) + 1):
            seconds = cost_of(count)
            if seconds is None:
                break
            rate = num_decoding * (1 + self.num_expected(count)) / max(seconds + count * self.seconds, 1e-12)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def draw(self, count: int, rng: np.random.Generator) -> int:
        """Return how many of ``count`` drafted tokens are accepted."""
        return next((place for place in range(count) if rng.random() >= self.accept), count)
