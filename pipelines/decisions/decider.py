"""Answers questions about one state with a model that chats: prompts, the tree of their rows, and probabilities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import BusyError, ConfigError, PromptTooLongError, shown

from ...kvcache.sequence import AdapterScales
from ..engine.engine import Engine
from ..text.tokenizer_tools import TokenizerTools
from .answers import Decision, DecisionUsage, answer_of, softmax
from .calibration import Calibration
from .prompts import MAX_ORDERS, DecisionPrompts, Shown, state_text
from .questions import Predicate, Question, Reading, checked
from .tree import TreeRun, TreeScores

READINGS: tuple[Reading, ...] = ("list", "branches")
DEFAULT_READING: Reading = "list"
DEFAULT_ORDERS = 2


@dataclass(frozen=True)
class DecisionLimits:
    """What a decision may have. ``max_len``: tokens of a state with one question; ``max_waiting``: decisions at a time."""

    max_len: int
    max_waiting: int


@dataclass(frozen=True)
class AskedQuestion:
    """How a question is shown: a text per order of its options, or in branches one per option."""

    texts: tuple[Shown, ...]
    reading: Reading

    @property
    def longest(self) -> int:
        """The most tokens behind the state."""
        return max(len(text.tokens) + max(map(len, text.labels)) for text in self.texts)


@dataclass(frozen=True)
class DecisionOrder:
    """What is asked, and how.

    Attributes:
        state: Tokens of the state.
        questions: The questions.
        shown: How each of them is shown.
        calibration: Temperatures; None for 1.
    """

    state: tuple[int, ...]
    questions: tuple[Question, ...]
    shown: tuple[AskedQuestion, ...]
    calibration: Calibration | None

    @property
    def num_tokens(self) -> int:
        """The tokens of the state once, and of each question once."""
        return len(self.state) + sum(len(found.texts[0].tokens) for found in self.shown)


class Decider:
    """Answers questions with the model of one engine. Any thread may call the methods."""

    def __init__(
        self,
        engine: Engine,
        tools: TokenizerTools,
        limits: DecisionLimits,
        adapters: Callable[[], AdapterScales] = lambda: (),
    ) -> None:
        """``adapters`` returns the factor of each adapter of the model that a request uses by default."""
        self._engine = engine
        self._adapters = adapters
        self._prompts = DecisionPrompts(tools)
        self._limits = limits
        self._num_running = 0
        self._lock = threading.Lock()

    def order(
        self,
        state: object,
        questions: Question | Sequence[Question],
        reading: Reading | None = None,
        orders: int | None = None,
        calibration: Calibration | None = None,
    ) -> DecisionOrder:
        """Check a state and questions, and tokenize them.

        Raises:
            QuestionError: a question or the state cannot be asked about; ``path`` says where.
            PromptError: the model has no chat template, or always thinks.
            PromptTooLongError: state and question are longer than the model's longest sequence.
            ConfigError: an option has an impossible value.
        """
        reading = DEFAULT_READING if reading is None else reading
        orders = DEFAULT_ORDERS if orders is None else orders
        if reading not in READINGS:
            raise ConfigError(f"reading={shown(reading)}: must be one of {', '.join(map(repr, READINGS))}")
        if isinstance(orders, bool) or not isinstance(orders, int) or not 1 <= orders <= MAX_ORDERS:
            raise ConfigError(f"orders={shown(orders)}: must be a whole number from 1 to {MAX_ORDERS}")
        if calibration is not None and not isinstance(calibration, Calibration):
            raise ConfigError(f"calibration={shown(calibration)}: must be a Calibration, or None")
        asked = checked(questions)
        ids = tuple(self._prompts.state(state_text(state)))
        room = self._limits.max_len - len(ids)
        found = tuple(
            self._asked(question, reading, orders, room, ("questions", place)) for place, question in enumerate(asked)
        )
        longest = max(each.longest for each in found)
        if longest > room:
            raise PromptTooLongError(len(ids) + longest, self._limits.max_len)
        return DecisionOrder(ids, asked, found, calibration)

    def _asked(
        self, question: Question, reading: Reading, orders: int, room: int, path: Sequence[str | int]
    ) -> AskedQuestion:
        """Return how a question is shown. A list that is longer than the model can have is read in branches."""
        found = AskedQuestion(tuple(self._prompts.texts(question, reading, orders, path)), reading)
        if found.longest <= room or reading == "branches":
            return found
        return AskedQuestion(tuple(self._prompts.texts(question, "branches", 1, path)), "branches")

    @contextmanager
    def running(self, priority: int, deadline_ms: float | None) -> Iterator[TreeRun]:
        """Give a run for one order, in a block that counts it.

        Raises:
            BusyError: ``MAX_WAITING`` decisions run already.
        """
        with self._lock:
            if self._num_running >= self._limits.max_waiting:
                raise BusyError(
                    f"{self._num_running} decisions are in progress, MAX_WAITING is {self._limits.max_waiting}: try again"
                )
            self._num_running += 1
        try:
            deadline = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
            yield TreeRun(self._engine, priority, deadline, self._adapters())
        finally:
            with self._lock:
                self._num_running -= 1

    def answer(self, run: TreeRun, order: DecisionOrder) -> Decision:
        """Run an order, and return its answers.

        Raises:
            DecisionCancelledError: the run was cancelled, or its time was over.
            ClosedError: the engine was closed.
        """
        scores = run.run(order.state, [text for asked in order.shown for text in asked.texts])
        labels = iter(scores.labels)
        answers = [
            answer_of(question, _probabilities(question, asked, [next(labels) for _ in asked.texts], order.calibration))
            for question, asked in zip(order.questions, order.shown, strict=True)
        ]
        return Decision(tuple(answers), _usage(order, scores), order.calibration is not None)


def _usage(order: DecisionOrder, scores: TreeScores) -> DecisionUsage:
    return DecisionUsage(order.num_tokens, len(order.state), scores.num_cached, scores.num_fed)


def _probabilities(
    question: Question,
    asked: AskedQuestion,
    scores: Sequence[NDArray[np.float64]],
    calibration: Calibration | None,
) -> list[float]:
    """Return the probability of each option of a question: the mean of those of its orders, or one branch for each."""
    heat = 1.0 if calibration is None else calibration.temperature_of(question)
    if asked.reading == "branches" and not isinstance(question, Predicate):
        found = np.array([softmax(each)[0] for each in scores])
    else:
        found = np.zeros(len(asked.texts[0].places))
        for text, each in zip(asked.texts, scores, strict=True):
            found[list(text.places)] += softmax(each) / len(asked.texts)
    # of the mean over orders, as temperatures are fitted to answers
    return softmax(np.log(np.maximum(found, np.finfo(np.float64).tiny)), heat).tolist()  # type: ignore[no-any-return]
