"""Temperatures that make probabilities agree with how often they are right, fitted from examples with known answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from staticllm.errors import ConfigError, shown

from .answers import softmax
from .questions import Choice, Predicate, Question

FILE_NAME = "staticllm_calibration.json"
"""The file beside a model."""
LEAST, MOST = 0.05, 20.0
"""Bounds of a temperature: outside, a fit of few examples has found noise."""
NUM_BINS = 15
KINDS = ("predicate", "choice", "score")
MIN_EXAMPLES = 10


def kind_of(question: Question) -> str:
    """Return the type of a question, by which temperatures are fitted."""
    return KINDS[0] if isinstance(question, Predicate) else KINDS[1] if isinstance(question, Choice) else KINDS[2]


@dataclass(frozen=True)
class Calibration:
    """Temperatures by which log-probabilities are divided before they become probabilities."""

    temperatures: Mapping[str, float] = field(default_factory=dict)
    """Those of ``predicate``, ``choice`` and ``score``; 1, which changes nothing, for a type without one."""

    def __post_init__(self) -> None:
        for kind, heat in self.temperatures.items():
            if kind not in KINDS or isinstance(heat, bool) or not isinstance(heat, int | float):
                raise ConfigError(
                    f"a calibration of {shown(kind)} with {shown(heat)}: must be numbers for {', '.join(KINDS)}"
                )
            if not LEAST <= heat <= MOST:
                raise ConfigError(f"the temperature {heat} of {kind}: must be from {LEAST} to {MOST}; fit it again")

    def temperature_of(self, question: Question) -> float:
        """Return the temperature of a question's type; 1 without one."""
        return float(self.temperatures.get(kind_of(question), 1.0))

    def write(self, path: Path) -> None:
        """Write the temperatures as JSON."""
        path.write_text(json.dumps({"temperatures": dict(self.temperatures)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a file of ``write``; of a folder, the one in it.

        Raises:
            ConfigError: it is missing or damaged.
        """
        file = path / FILE_NAME if path.is_dir() else path
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["temperatures"]
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read ({error.strerror}): fit one with `staticllm calibrate`"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{file} is no calibration: fit one with `staticllm calibrate`") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is no calibration: fit one with `staticllm calibrate`")
        return cls(found)


@dataclass(frozen=True)
class Example:
    """A question whose answer is known. ``scores``: log-probabilities of its options; ``right``: the number of the right one."""

    kind: str
    scores: tuple[float, ...]
    right: int


@dataclass(frozen=True)
class Quality:
    """How good probabilities are.

    Attributes:
        num: The number of examples.
        accuracy: The share whose most probable option is right.
        log_loss: The mean of -log p of the right option.
        brier: The mean of Σ over options (p - y)², 0 to 2.
        calibration_error: Σ over 15 equal bins of max p: share · |accuracy - mean max p| (ECE).
    """

    num: int
    accuracy: float
    log_loss: float
    brier: float
    calibration_error: float


def quality_of(examples: Sequence[Example], heat: float = 1.0) -> Quality:
    """Return how good the probabilities of at least one example are at a temperature."""
    found = [softmax(example.scores, heat) for example in examples]
    rights = np.array([example.right for example in examples])
    best = np.array([int(p.argmax()) for p in found])
    highest = np.array([float(p.max()) for p in found])
    chosen = np.array([float(p[right]) for p, right in zip(found, rights, strict=True)])
    brier = [float((p**2).sum() - 2 * p[right] + 1) for p, right in zip(found, rights, strict=True)]
    is_right = best == rights
    bins = np.minimum((highest * NUM_BINS).astype(int), NUM_BINS - 1)
    error = sum(
        (bins == each).mean() * abs(is_right[bins == each].mean() - highest[bins == each].mean())
        for each in np.unique(bins)
    )
    loss = -np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean()
    return Quality(len(found), float(is_right.mean()), float(loss), float(np.mean(brier)), float(error))


def fitted(examples: Sequence[Example]) -> float:
    """Return the temperature with the least log-loss, by golden section on its logarithm; 1 if no other is better."""

    def loss(heat: float) -> float:
        return quality_of(examples, heat).log_loss

    low = math.log(LEAST)
    high = math.log(MOST)
    share = (math.sqrt(5) - 1) / 2
    for _ in range(60):  # the interval shrinks to 1e-12 of itself
        first = high - share * (high - low)
        second = low + share * (high - low)
        if loss(math.exp(first)) < loss(math.exp(second)):
            high = second
        else:
            low = first
    found = min(max(math.exp((low + high) / 2), LEAST), MOST)
    return found if loss(found) < loss(1.0) else 1.0
