"""The answers of a decision: a probability per option, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .questions import Choice, Predicate, Question, Value


@dataclass(frozen=True)
class PredicateAnswer:
    """How probable it is that a statement holds."""

    name: str | None
    """The name of the question."""
    probability: float
    """That of yes, 0 to 1."""


@dataclass(frozen=True)
class OptionProbability:
    """The probability of one option of a choice."""

    value: Value
    """The option's."""
    probability: float
    """0 to 1; those of all options add up to 1."""


@dataclass(frozen=True)
class ChoiceAnswer:
    """Which option is the most probable."""

    name: str | None
    """The name of the question."""
    choice: Value
    """The most probable option, the first of several."""
    confidence: float
    """How far its probability is above that of a guess, 0 to 1 (``choice_confidence``)."""
    probabilities: tuple[OptionProbability, ...]
    """In the order of the question."""


@dataclass(frozen=True)
class LevelProbability:
    """The probability of one level of a score."""

    label: str
    """The level's."""
    value: int
    """Its number, 0 for the lowest."""
    probability: float
    """0 to 1; those of all levels add up to 1."""


@dataclass(frozen=True)
class ScoreAnswer:
    """How much it is."""

    name: str | None
    """The name of the question."""
    score: float
    """The expected number of the level."""
    confidence: float
    """How close the levels are to the most probable one, 0 to 1 (``score_confidence``)."""
    probabilities: tuple[LevelProbability, ...]
    """The lowest first."""


@dataclass(frozen=True)
class Refusal:
    """A question without an answer. The other answers are unharmed."""

    name: str | None
    """The name of the question."""
    reason: str
    """Why: its logits were not finite."""


Answer: TypeAlias = PredicateAnswer | ChoiceAnswer | ScoreAnswer | Refusal


@dataclass(frozen=True)
class DecisionUsage:
    """The tokens of a decision."""

    input_tokens: int
    """Those of the state once, and those of each question once, however often they are shown."""
    state_tokens: int
    """Those of the state."""
    cached_tokens: int
    """Those of the state that an earlier request had computed."""
    device_tokens: int
    """The rows that the device ran: the new ones of the state, the questions, their orders, the labels."""


@dataclass(frozen=True)
class Decision:
    """The answers to the questions about one state."""

    answers: tuple[Answer, ...]
    """In the order of the questions."""
    usage: DecisionUsage
    """What it took."""
    is_calibrated: bool = False
    """Whether the probabilities are those of a calibration."""


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
        found = tuple(OptionProbability(*each) for each in zip(question.values, probabilities, strict=True))
        return ChoiceAnswer(question.name, question.values[best], choice_confidence(probabilities), found)
    shares = enumerate(zip(question.labels, probabilities, strict=True))
    levels = tuple(LevelProbability(label, place, probability) for place, (label, probability) in shares)
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
