"""The answers of a decision: a probability per option, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .questions import Choice, Predicate, Question, Score, Value


@dataclass(frozen=True)
class PredicateAnswer:
    """How probable it is that a statement holds."""

    name: str | None
    probability: float


@dataclass(frozen=True)
class OptionProbability:
    """The probability of one option of a choice."""

    value: Value
    probability: float


@dataclass(frozen=True)
class ChoiceAnswer:
    """The most probable option, the first of several, and the probability of each, in the order of the question.

    ``confidence``: how far the highest probability is above that of a guess, 0 to 1 (``choice_confidence``).
    """

    name: str | None
    choice: Value
    confidence: float
    probabilities: tuple[OptionProbability, ...]


@dataclass(frozen=True)
class LevelProbability:
    """The probability of one level of a score. ``value``: its number, 0 for the lowest."""

    label: str
    value: int
    probability: float


@dataclass(frozen=True)
class ScoreAnswer:
    """The expected number of the level, and the probability of each, the lowest first.

    ``confidence``: how close the levels are to the most probable one, 0 to 1 (``score_confidence``).
    """

    name: str | None
    score: float
    confidence: float
    probabilities: tuple[LevelProbability, ...]


@dataclass(frozen=True)
class Refusal:
    """A question without an answer: its logits were not finite. The other answers are unharmed."""

    name: str | None
    reason: str


Answer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal


@dataclass(frozen=True)
class DecisionUsage:
    """The tokens of a decision.

    Attributes:
        input_tokens: Those of the state once, and those of each question once, however often they are shown.
        state_tokens: Those of the state.
        cached_tokens: Those of the state that an earlier request had computed.
        device_tokens: The rows that the device ran for it: the new ones of the state, the questions, the orders, the labels.
    """

    input_tokens: int
    state_tokens: int
    cached_tokens: int
    device_tokens: int


@dataclass(frozen=True)
class Decision:
    """The answers to the questions about one state, in the order of the questions.

    ``is_calibrated``: whether probabilities are those of a calibration.
    """

    answers: tuple[Answer, ...]
    usage: DecisionUsage
    is_calibrated: bool = False


def softmax(scores: Sequence[float] | NDArray[np.float64], heat: float = 1.0) -> NDArray[np.float64]:
    """Return the probabilities of scores ``[n]``, which are log-probabilities up to a constant, at temperature ``heat``."""
    found = np.asarray(scores, np.float64)
    weights = np.exp((found - found.max()) / heat)
    return np.asarray(weights / weights.sum())


def answer_of(question: Question, probabilities: Sequence[float]) -> Answer:
    """Return the answer to a question with these probabilities of its options, which add up to 1; NaN refuses it.

    Those of a ``Predicate`` are of yes and of no.
    """
    if not all(map(math.isfinite, probabilities)):
        return Refusal(question.name, "the model's logits are not finite")
    if isinstance(question, Predicate):
        return PredicateAnswer(question.name, probabilities[0])
    best = max(range(len(probabilities)), key=lambda place: probabilities[place])
    if isinstance(question, Choice):
        values = [getattr(option, "value", option) for option in question.options]
        found = tuple(map(OptionProbability, values, probabilities))
        return ChoiceAnswer(question.name, values[best], choice_confidence(probabilities), found)
    labels = [getattr(level, "label", level) for level in question.levels]
    levels = tuple(LevelProbability(label, place, probabilities[place]) for place, label in enumerate(labels))
    score = sum(level.value * level.probability for level in levels)
    return ScoreAnswer(question.name, score, score_confidence(probabilities), levels)


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Return (max p - 1/n) / (1 - 1/n): 0 for a guess, 1 for certainty (TypeSafe's formula)."""
    guess = 1 / len(probabilities)
    return 1.0 if guess == 1 else max(0.0, (max(probabilities) - guess) / (1 - guess))


def score_confidence(probabilities: Sequence[float]) -> float:
    """Return 1 - Σ p_i·|i - mode| / mean_i |i - (n-1)/2|, at least 0 (TypeSafe's formula)."""
    count = len(probabilities)
    if count == 1:
        return 1.0
    mode = max(range(count), key=lambda place: probabilities[place])
    spread = sum(p * abs(place - mode) for place, p in enumerate(probabilities))
    middle = sum(abs(place - (count - 1) / 2) for place in range(count)) / count
    return max(0.0, 1 - spread / middle)

