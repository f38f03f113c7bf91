"""Beam search and group beam search, with the candidates, penalties and scores of openvino_genai, as ``tests/peer`` checks.

Group beam search is diverse beam search (arXiv 1610.02424): the beams are divided into groups, and a group avoids the tokens that
the groups before it chose in the same step.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from staticllm.core import FinishReason

from .filters import Logits, largest
from .logits_processors import LogitsProcessor

StopCriteria = Literal["early", "heuristic", "never"]
"""When a group with enough finished hypotheses ends: at once; when its best beam cannot beat the worst of them at its present
length; or when it cannot even at the largest length."""

Ending = Callable[[Sequence[int]], bool]
"""Takes the tokens of an answer, and returns whether a stop string ends it."""


class BeamMask(Protocol):
    """What may follow one beam. ``is_whole``: whether it may end here as a whole answer, not for want of tokens."""

    @property
    def is_whole(self) -> bool: ...

    def clone(self) -> BeamMask:
        """Return the mask of another beam that begins alike."""
        ...

    def prepare(self) -> None:
        """Prepare the next ``process``, while the device runs."""
        ...

    def accept(self, token: int, /) -> None: ...

    def process(self, logits: Logits, /) -> None:
        """Set the entries ``[vocab]`` of tokens that may not follow to -inf."""
        ...

    def keep_fitting(self, logits: Logits, count: int, /) -> None:
        """Set the entries ``[vocab]`` of tokens after which the answer could not end to -inf; ``count`` others are enough."""
        ...


class BeamRules:
    """Logits processors as the mask of a beam; each beam has copies of its own, since they may keep state."""

    is_whole = False

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = list(processors)

    def clone(self) -> BeamRules:
        """Return the mask of another beam that begins alike."""
        return BeamRules(copy.deepcopy(self._processors))

    def prepare(self) -> None:
        """Nothing can be prepared."""

    def process(self, logits: Logits) -> None:
        """Change the entries ``[vocab]``; -inf forbids a token."""
        for processor in self._processors:
            if processor.is_active:
                processor.process(logits)

    def keep_fitting(self, logits: Logits, count: int) -> None:
        """No answer has to end in time."""

    def accept(self, token: int) -> None:
        for processor in self._processors:
            processor.accept(token)


@dataclass(frozen=True)
class BeamParams:
    """The parameters of one search, with the names and meanings of ``openvino_genai.GenerationConfig``."""

    num_beams: int
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    length_penalty: float = 1.0
    no_repeat_ngram_size: int | None = None
    """None if n-grams may repeat."""
    stop_criteria: StopCriteria = "heuristic"

    @property
    def group_size(self) -> int:
        return self.num_beams // self.num_beam_groups


@dataclass(frozen=True)
class BeamLimits:
    """Where answers end."""

    max_new_tokens: int | None
    """None without a limit."""
    stop_token_ids: Collection[int] = frozenset()
    min_new_tokens: int = 0
    """None of ``stop_token_ids`` is among this many first tokens."""


@dataclass(frozen=True)
class Successor:
    """One beam of the next step: the beam of this step that it continues, by its index, and its new token."""

    parent: int
    token: int


@dataclass(frozen=True)
class Hypothesis:
    """An answer that has ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """What each token adds to the sum of log-probabilities, less diversity penalties."""
    score: float
    """That sum, divided by the length to the power of ``length_penalty``."""
    reason: FinishReason


@dataclass(frozen=True)
class _Beam:
    """An answer in progress."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """The log-probabilities of its tokens, less diversity penalties."""
    total: float = 0.0
    """The sum of ``logprobs``."""

    def followed_by(self, token: int, logprob: float) -> _Beam:
        return _Beam((*self.tokens, token), (*self.logprobs, logprob), self.total + logprob)


@dataclass(frozen=True)
class _Candidate:
    """A beam with one more token."""

    parent: int
    """The index of the beam that it continues."""
    beam: _Beam

    @property
    def token(self) -> int:
        return self.beam.tokens[-1]


@dataclass
class _BeamGroup:
    """Beams that compete: those in progress, best first, and a heap of the best finished ones, the worst of them first."""

    beams: list[_Beam]
    finished: list[tuple[float, int, Hypothesis]] = field(default_factory=list)
    is_done: bool = False


@dataclass(frozen=True)
class _Tokens:
    """Tokens that may follow a beam, the most likely first: ``ids [n]`` and their log-probabilities f32 ``[n]``."""

    ids: NDArray[np.intp]
    logprobs: Logits


class BeamSearch:
    """One search. ``take`` gets the logits after each beam in progress, and ``advance`` says which go on with which tokens.

    The beams in progress have indexes from 0 to ``num_beams - 1``; at first there is one, the prompt. What takes time for each
    beam is done in ``take``, so that it is divided among the calls that compute the logits of one step.

    Args:
        params: Beams, groups and penalties.
        prompt: The prompt's tokens, whose n-grams count as well.
        limits: Where answers end.
        ending: Finds stop strings; None without any.
    """

    def __init__(
        self, params: BeamParams, prompt: Sequence[int], limits: BeamLimits, ending: Ending | None = None
    ) -> None:
        self._params = params
        self._prompt = tuple(prompt)
        self._limits = limits
        self._ending = ending
        self._stop_tokens = np.array(sorted(limits.stop_token_ids), np.intp)
        self._groups = [_BeamGroup([_Beam()]) for _ in range(params.num_beam_groups)]
        self._parents = [[0] for _ in self._groups]  # by group: the index of each beam in progress
        self._beams = [_Beam()]  # in progress, by index
        self._tables: dict[
            int, Logits
        ] = {}  # with groups: log-probabilities after the beams taken in this step, by index
        self._tokens: dict[int, _Tokens] = {}  # without: the best tokens
        self._length = 0
        self._num_finished = 0

    @property
    def is_done(self) -> bool:
        return all(group.is_done for group in self._groups)

    @property
    def is_complete(self) -> bool:
        """Whether ``take`` got the logits after every beam in progress."""
        return len(self._tables) + len(self._tokens) == len(self._beams)

    def take(self, index: int, logits: Logits, mask: BeamMask | None = None) -> None:
        """Keep what may follow beam ``index`` in progress.

        Args:
            index: The beam.
            logits: f32 ``[vocab]``, finite, after the beam; they are not changed and not kept.
            mask: What forbids tokens after it; None if nothing does. The allowed tokens keep their probabilities.
        """
        table = _log_probabilities(logits)
        if mask is not None:
            mask.process(table)
        if self._length < self._limits.min_new_tokens:
            table[self._stop_tokens[self._stop_tokens < len(table)]] = -np.inf
        if (size := self._params.no_repeat_ngram_size) is not None:
            table[list(repeating_tokens((*self._prompt, *self._beams[index].tokens), size))] = -np.inf
        if mask is not None:  # a group looks at fewer tokens than these, and those that others penalize
            mask.keep_fitting(table, 2 * self._params.group_size + self._params.num_beams)
        if self._params.num_beam_groups > 1:  # the groups before it will change what is best
            self._tables[index] = table
        else:
            self._tokens[index] = self._best(table)

    def advance(self) -> list[Successor]:
        """Choose the beams of the next step, when all in progress were taken.

        Return the beams of the next step by their indexes; nothing if the search is done.
        """
        assert self.is_complete, "beams without logits"
        chosen: list[_Candidate] = []  # by the groups before, in this step
        successors: list[Successor] = []
        self._length += 1
        for number, group in enumerate(self._groups):
            if group.is_done:
                continue
            kept = self._next_beams(group, self._candidates(number, chosen))
            self._end_if_done(group, kept)
            chosen += kept
            if not group.is_done:
                group.beams = [candidate.beam for candidate in kept]
                self._parents[number] = list(range(len(successors), len(successors) + len(kept)))
                successors += [Successor(candidate.parent, candidate.token) for candidate in kept]
        self._beams = [beam for group in self._groups if not group.is_done for beam in group.beams]
        self._tables.clear()
        self._tokens.clear()
        if self._length == self._limits.max_new_tokens:
            self.end(FinishReason.LENGTH)
        return [] if self.is_done else successors

    def end(self, reason: FinishReason) -> None:
        """End the beams in progress: they become hypotheses if they are among the best of their group."""
        for group in self._groups:
            for beam in () if group.is_done else group.beams:
                self._finish(group, beam, reason)
            group.is_done = True

    def hypotheses(self) -> list[Hypothesis]:
        """Return the finished answers of all groups, the best first."""
        found = [entry for group in self._groups for entry in group.finished]
        return [hypothesis for _, _, hypothesis in sorted(found, key=lambda entry: (-entry[0], -entry[1]))]

    def _candidates(self, number: int, chosen: Iterable[_Candidate]) -> Iterator[_Candidate]:
        """Yield the best candidates of a group, best first: at most twice as many per beam as the group has beams.

        So at least one per beam does not end in a stop token. Each is made when it is asked for: few of them go on.
        """
        beams = self._groups[number].beams
        parents = self._parents[number]
        penalized = np.array([candidate.token for candidate in chosen], np.intp)
        following = [self._following(parent, penalized) for parent in parents]
        owners = np.repeat(np.arange(len(beams)), [len(tokens.ids) for tokens in following])
        ids = np.concatenate([tokens.ids for tokens in following])
        logprobs = np.concatenate([tokens.logprobs for tokens in following])
        totals = np.array([beam.total for beam in beams])[owners] + logprobs
        for place in np.argsort(-totals, kind="stable").tolist():
            owner = int(owners[place])
            yield _Candidate(parents[owner], beams[owner].followed_by(int(ids[place]), float(logprobs[place])))

    def _following(self, index: int, penalized: NDArray[np.intp]) -> _Tokens:
        """Return the best tokens after a beam, if groups before have chosen ``penalized [n]``, where a token may be repeated."""
        if index in self._tokens:
            return self._tokens[index]
        table = self._tables[index]
        if len(penalized):
            table = table.copy()
            np.subtract.at(table, penalized, np.float32(self._params.diversity_penalty))
        return self._best(table)

    def _best(self, table: Logits) -> _Tokens:
        """Return the best tokens of log-probabilities ``[vocab]``, as many as a beam needs; -inf ones are left out."""
        count = 2 * self._params.group_size
        top = largest(table, count) if count < len(table) else np.arange(len(table))
        top = top[np.argsort(-table[top], kind="stable")]
        top = top[np.isfinite(table[top])]
        return _Tokens(top, table[top])

    def _next_beams(self, group: _BeamGroup, candidates: Iterable[_Candidate]) -> list[_Candidate]:
        """Return the candidates that go on. Those that end become hypotheses, if they are among the best ``group_size``."""
        size = self._params.group_size
        kept = list[_Candidate]()
        for place, candidate in enumerate(candidates):
            if not self._is_over(candidate):
                kept.append(candidate)
            elif place < size:
                self._finish(group, candidate.beam, FinishReason.STOP)
            if len(kept) == size:
                break
        return kept

    def _is_over(self, candidate: _Candidate) -> bool:
        is_stop_token = candidate.token in self._limits.stop_token_ids
        return is_stop_token or (self._ending is not None and self._ending(candidate.beam.tokens))

    def _end_if_done(self, group: _BeamGroup, kept: Sequence[_Candidate]) -> None:
        if not kept:
            group.is_done = True
        if group.is_done or len(group.finished) < self._params.group_size:
            return
        criteria = self._params.stop_criteria
        length = self._length - 1
        if criteria == "early":
            group.is_done = True
            return
        if criteria == "never" and self._params.length_penalty > 0.0 and self._limits.max_new_tokens is not None:
            length = self._limits.max_new_tokens
        # as in GenAI, the best beam of the step before is what could still be attained
        group.is_done = length > 0 and group.finished[0][0] >= self._score(group.beams[0].total, length)

    def _finish(self, group: _BeamGroup, beam: _Beam, reason: FinishReason) -> None:
        score = self._score(beam.total, max(len(beam.tokens), 1))
        self._num_finished += 1
        hypothesis = Hypothesis(beam.tokens, beam.logprobs, score, reason)
        heapq.heappush(group.finished, (score, -self._num_finished, hypothesis))
        if len(group.finished) > self._params.group_size:
            heapq.heappop(group.finished)

    def _score(self, total: float, length: int) -> float:
        return beam_score(total, length, self._params.length_penalty)


def beam_score(total: float, length: int, length_penalty: float) -> float:
    """Return the sum of log-probabilities of an answer of ``length`` tokens, divided by the length to the power of the penalty.

    Where the power is beyond the range of floats, the score is -0.0 or -inf.
    """
    if total == 0.0:
        return 0.0
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        return float(np.float64(total) / np.float64(length) ** length_penalty)


def repeating_tokens(tokens: Sequence[int], size: int | None) -> set[int]:
    """Return the tokens that would repeat an n-gram of ``size`` tokens at the end of ``tokens``; none if ``size`` is None."""
    if size is None or len(tokens) < max(size, 2):
        return set()
    if size == 1:
        return set(tokens)
    known = np.asarray(tokens)
    tail = np.asarray(tokens[len(tokens) - size + 1 :])
    windows = np.lib.stride_tricks.sliding_window_view(known[:-1], size - 1)
    places = np.flatnonzero((windows == tail).all(axis=1)) + size - 1
    return set(known[places].tolist())


def _log_probabilities(logits: Logits) -> Logits:
    """Return the log-probabilities f32 ``[vocab]`` of logits ``[vocab]``."""
    top = logits.max()
    return logits - np.float32(top + np.log(np.exp(logits - top).sum(dtype=np.float64)))
