"""Scores the labels of questions about one state: a tree of sequences, each of which shares what its parents have computed.

The state is the root, a question is a branch of it, and the tokens of its labels are branches of the question. Sequences of one
depth share calls; each sees its parents and itself, and nothing of the others. Only the state stays cached.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import StaticLLMError
from staticllm.system.threads import POLL_SECONDS

from ...kvcache.sequence import AdapterScales
from ..engine.client_sequences.sequence import ClientSequence, ExactPrefix, Feed
from ..engine.client_sequences.state import FeedResult, Wanted
from ..engine.engine import Engine
from .prompts import Shown

MAX_LOGIT_BYTES = 64 << 20
"""Bytes of logits that wait to be read; more sequences begin when these have been."""
MAX_BEGUN = 64
"""Sequences that run at the same time, for the same reason as a bound on requests: others want slots and rows, too."""
Result = TypeVar("Result")


@dataclass
class _Node:
    """A run of label tokens. ``leaves``: the label that ends with each token after it; ``children``: by their first token."""

    tokens: list[int]
    leaves: dict[int, int] = field(default_factory=dict)
    children: dict[int, _Node] = field(default_factory=dict)


def _trie(labels: Sequence[tuple[int, ...]]) -> _Node:
    """Return the labels as a tree: what several begin with runs once. Its root has no tokens; the question is before it."""
    root = _Node([])
    for number, label in enumerate(labels):
        node = root
        for token in label[:-1]:
            node = node.children.setdefault(token, _Node([token]))
        node.leaves[label[-1]] = number
    return _joined(root)


def _joined(node: _Node) -> _Node:
    """Return the tree with nodes joined that have one child and no leaf."""
    children = {token: _joined(child) for token, child in node.children.items()}
    if node.tokens and len(children) == 1 and not node.leaves:
        (child,) = children.values()
        return _Node([*node.tokens, *child.tokens], child.leaves, child.children)
    return _Node(node.tokens, node.leaves, children)


@dataclass
class _Job:
    """A feed of a node: ``base`` is the log-probability of all before it."""

    shown: int
    node: _Node
    parent: ClientSequence | None
    tokens: Sequence[int]
    base: float = 0.0
    sequence: ClientSequence | None = None

    @property
    def num_logits(self) -> int:
        return len(self.node.tokens) or 1


@dataclass(frozen=True)
class TreeScores:
    """What a tree has found.

    Attributes:
        labels: For each question as shown, the log-probability of each of its labels; NaN where logits were not finite.
        num_cached: Tokens of the state that were cached.
        num_fed: Tokens that ran.
    """

    labels: list[NDArray[np.float64]]
    num_cached: int
    num_fed: int


class DecisionCancelledError(StaticLLMError):
    """A decision was cancelled, or its time was over."""


class TreeRun:
    """One decision on an engine. ``run`` is called once, on any thread; ``cancel`` ends it from another."""

    def __init__(self, engine: Engine, priority: int, deadline: float | None, adapters: AdapterScales = ()) -> None:
        """``deadline``: a moment of ``time.perf_counter``. ``adapters``: the factor of each of the model's."""
        self._engine = engine
        self._priority = priority
        self._deadline = deadline
        self._adapters = adapters
        self._results: queue.SimpleQueue[tuple[_Job, FeedResult] | int | Exception | None] = queue.SimpleQueue()
        self._open: set[ClientSequence] = set()
        self._lock = threading.Lock()
        self.is_cancelled = False
        self._num_fed = 0

    def cancel(self) -> None:
        """End the run before the next device call; ``run`` raises ``DecisionCancelledError``."""
        self.is_cancelled = True
        self._results.put(None)

    def set_priority(self, priority: int) -> None:
        """Change the priority, before the next device call."""
        with self._lock:
            self._priority = priority
            for sequence in self._open:
                sequence.set_priority(priority)

    def run(self, state: Sequence[int], questions: Sequence[Shown]) -> TreeScores:
        """Return the scores of all labels.

        Raises:
            DecisionCancelledError: ``cancel`` was called, or the deadline is over.
            PromptTooLongError, PromptError: state and question have more tokens than the model can have.
            ClosedError: the engine was closed.
        """
        with self._lock:
            exact = ExactPrefix(state, self._results.put, self._adapters)
            root = ClientSequence(self._engine, self._priority, exact=exact)
            self._open.add(root)
        found = [np.full(len(shown.labels), np.nan) for shown in questions]
        try:
            num_cached = self._run_state(root, state)
            waiting = deque(
                _Job(number, _trie(shown.labels), root, shown.tokens) for number, shown in enumerate(questions)
            )
            self._score(waiting, found)
            return TreeScores(found, num_cached, self._num_fed)
        finally:
            self._close_all(root)

    def _run_state(self, root: ClientSequence, state: Sequence[int]) -> int:
        """Run the tokens of the state that are not cached, and return how many are."""
        num_cached = self._next(int)
        if num_cached < len(state):
            self._begin([_Job(-1, _Node([]), None, state[num_cached:], sequence=root)])
            _, result = self._next(tuple)
            if result.error is not None:
                raise result.error
        return num_cached  # the state's own logits do not matter: those of a question say whether it can be answered

    def _score(self, waiting: deque[_Job], found: list[NDArray[np.float64]]) -> None:
        running = 0
        num_logits = 0
        most = max(1, MAX_LOGIT_BYTES // (4 * self._engine.core.device.runner.cache.layout.vocab_size))
        while waiting or running:
            begun: list[_Job] = []
            while waiting and running + len(begun) < MAX_BEGUN and (not num_logits or num_logits < most):
                job = waiting.popleft()
                num_logits += job.num_logits
                begun.append(job)
            self._begin(begun)
            running += len(begun)
            for job, result in self._ready():
                running -= 1
                num_logits -= job.num_logits
                if result.error is not None:
                    raise result.error
                children = list(self._read(job, result, found)) if result.is_finite else []
                waiting.extendleft(reversed(children))  # the labels of a question before the next question
                self._leave(job, children)

    def _read(self, job: _Job, result: FeedResult, found: list[NDArray[np.float64]]) -> Iterator[_Job]:
        """Read the logits of a node; yield the jobs of its children."""
        assert result.logits is not None
        node = job.node
        base = job.base
        for row, token in enumerate(node.tokens[1:]):
            base += _log_probabilities(result.logits[row], [token])[0]
        follow = [*node.leaves, *node.children]
        after = base + _log_probabilities(result.logits[-1], follow)
        for token, value in zip(follow, after, strict=True):
            if token in node.leaves:
                found[job.shown][node.leaves[token]] = value
            if token in node.children:
                child = node.children[token]
                yield _Job(job.shown, child, job.sequence, child.tokens, float(value))

    def _begin(self, jobs: Iterable[_Job]) -> None:
        """Open a sequence for each job and feed it; together, so that they share calls."""
        feeds: list[Feed] = []
        for job in jobs:
            if job.sequence is None:
                assert job.parent is not None
                job.sequence = self._opened(job.parent)
            self._num_fed += len(job.tokens)
            wanted: Wanted = "all" if job.node.tokens else "last"
            feeds.append(Feed(job.sequence, job.tokens, partial(self._done, job), wanted))
        if feeds:
            self._engine.feed(feeds)

    def _done(self, job: _Job, result: FeedResult) -> None:
        self._results.put((job, result))

    def _next(self, kind: type[Result]) -> Result:
        """Wait for the next result, which is of this kind."""
        while not self.is_cancelled:
            left = POLL_SECONDS if self._deadline is None else min(POLL_SECONDS, self._deadline - time.perf_counter())
            if left <= 0:
                raise DecisionCancelledError("the decision took longer than its deadline")
            with suppress(queue.Empty):
                found = self._results.get(timeout=left)
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    assert isinstance(found, kind)
                    return found
        raise DecisionCancelledError("the decision was cancelled")

    def _ready(self) -> Iterator[tuple[_Job, FeedResult]]:
        """Yield the results that are there, at least one."""
        yield self._next(tuple)
        while not self._results.empty():
            yield self._next(tuple)

    def _opened(self, parent: ClientSequence) -> ClientSequence:
        with self._lock:
            sequence = parent.fork(self._priority)
            self._open.add(sequence)
        return sequence

    def _leave(self, job: _Job, children: Sequence[_Job]) -> None:
        """Open the children of a job, which begin with its sequence, and close it; the root stays."""
        assert job.sequence is not None
        for child in children:
            child.sequence = self._opened(job.sequence)
        self._close(job.sequence)

    def _close(self, sequence: ClientSequence, is_reusable: bool = False) -> None:
        with self._lock:
            self._open.discard(sequence)
        sequence.close(is_reusable)

    def _close_all(self, root: ClientSequence) -> None:
        for sequence in [each for each in self._open if each is not root]:
            self._close(sequence)
        self._close(root, is_reusable=True)


def _log_probabilities(logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the log-probabilities of ``tokens`` after ``logits [vocab]``."""
    highest = logits.max()
    total = np.exp(logits - highest).sum(dtype=np.float64)
    return logits[list(tokens)].astype(np.float64) - float(highest) - float(np.log(total))
