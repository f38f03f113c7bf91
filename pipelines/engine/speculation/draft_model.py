"""A draft model: a smaller model of the same vocabulary that guesses tokens, with its own programs and its own KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....kvcache.sequence import KVSequence, common_prefix
from ....kvcache.step import Segment
from ...costs.probe import timed_run
from ...generation.drafts import NO_DRAFT, Draft
from ...generation.filters import Logits
from ...programs.model_runner import ModelRunner
from ..state import AnswerState

KIND = "model"
"""The kind of the drafts of a draft model."""
PACKED_TOKENS = 8
"""Sequences that lack more tokens than this run in a call of their own, in chunks as a prompt does."""
MAX_FAILURES = 3
"""The number of failed calls after which the draft model is not used any more."""


@dataclass
class _Guess:
    """A draft that is being made: the answer, its sequence in the draft model, and the tokens so far."""

    state: AnswerState
    sequence: KVSequence
    limit: int
    tokens: list[int]

    @property
    def is_done(self) -> bool:
        """Whether no further token is drafted: there are enough, or the answer would end with the last one."""
        return len(self.tokens) >= self.limit or self.tokens[-1] in self.state.request.stop_token_ids


class DraftModel:
    """Drafts tokens greedily, for all requests that draft in one packed call per token. Runs on the engine's thread.

    Its sequences hold the tokens of the requests. After a draft was checked, the rejected tokens are cut off at the next
    draft, and what is missing runs together with the next token. When the slots do not suffice, the sequence that has not been
    used longest is dropped; it runs again if it is needed.

    ``seconds`` is the time that drafts have taken in all. An exception of a program costs the drafts of one call, and after
    ``MAX_FAILURES`` of them there are no more drafts; requests never notice.

    Args:
        runner: The runner of the draft model. Its model must not have recurrent states, which cannot be cut.
        vocab_size: The number of token ids of the draft model.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        assert not runner.cache.states
        self.runner = runner
        self._vocab_size = vocab_size
        self._sequences: dict[int, KVSequence] = {}  # by the id of the answer; the least recently used first
        self.num_failures = 0
        self.seconds = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether it still drafts."""
        return self.num_failures < MAX_FAILURES

    def room(self, state: AnswerState) -> int:
        """Return how many tokens can be drafted after those of an answer."""
        if not self.is_usable or not self._knows(state):
            return 0
        return max(0, self.runner.cache.num_slots - len(state.tokens))

    def step_seconds(self, num_sequences: int) -> float:
        """Return the expected seconds of one drafted token for each of ``num_sequences`` answers."""
        index = self.runner.index
        past = self.runner.cache.num_past
        count = min(num_sequences, index.max_decoding(past))
        variant = index.smallest(count, count, past)
        return float("inf") if variant is None else self.runner.costs(variant) * -(-num_sequences // count)

    def catch_up_seconds(self, state: AnswerState) -> float:
        """Return about how long the tokens of an answer take that the draft model has not seen, beyond the last two."""
        known = self._sequences.get(state.id)
        missing = len(state.tokens) - (0 if known is None else len(known)) - PACKED_TOKENS
        if missing <= 0:
            return 0.0
        index = self.runner.index
        past = self.runner.cache.num_past
        variant = index.smallest(min(missing, max(index.widest)), 1, past)
        return 0.0 if variant is None else self.runner.costs(variant) * missing / variant.rows

    def propose(self, wanted: Sequence[tuple[AnswerState, int]]) -> list[Draft]:
        """Return a draft for each answer, with at most as many tokens as given; empty where there is no room for it."""
        start = self.runner.clock()
        try:
            return self._drafts(wanted)
        except Exception as error:
            self.num_failures += 1
            self._sequences.clear()
            self.runner.cache.reset()
            if not self.is_usable:
                warnings.warn(f"the draft model is not used any more: {error}", RuntimeWarning, stacklevel=2)
            return [NO_DRAFT] * len(wanted)
        finally:
            self.seconds += self.runner.clock() - start

    def measure(self, until: float) -> None:
        """Measure what a drafted token costs, for each number of requests, before the moment ``until`` of the runner's clock."""
        index = self.runner.index
        costs = self.runner.costs
        for rows, sequences in index.sizes:
            variant = index.at(rows, sequences, 1)
            if rows == sequences and variant is not None and self.runner.clock() < until:
                program = self.runner.programs[variant]
                costs.set(variant, min(timed_run(program) for _ in range(3)))

    def close(self) -> None:
        """Drop the programs. It must not be used any more."""
        self._sequences.clear()
        self.runner.close()

    def forget(self, answer: int) -> None:
        """Free the slots of an answer that has ended."""
        sequence = self._sequences.pop(answer, None)
        if sequence is not None:
            self.runner.cache.close(sequence)

    def _drafts(self, wanted: Sequence[tuple[AnswerState, int]]) -> list[Draft]:
        in_use = {state.id for state, _ in wanted}
        guesses = dict[int, _Guess]()
        for state, limit in wanted:
            sequence = self._aligned(state)
            if limit > 0 and self._knows(state) and self._make_room(state, limit, in_use):
                guesses[state.id] = _Guess(state, sequence, limit, [])
        active = list(guesses.values())
        lines = self._first_logits(active)
        while active:
            active = [guess for guess, line in zip(active, lines, strict=True) if _add(guess, line)]
            lines = self._step([Segment(g.sequence, np.array(g.tokens[-1:], np.int64)) for g in active])
        return [_draft_of(guesses.get(state.id)) for state, _ in wanted]

    def _knows(self, state: AnswerState) -> bool:
        """Return whether all tokens of an answer are in the draft model's vocabulary, which may be the smaller one."""
        return state.vocab_size <= self._vocab_size or max(state.tokens) < self._vocab_size

    def _aligned(self, state: AnswerState) -> KVSequence:
        """Return the sequence of an answer without tokens that were rejected, and without the last one, which must run."""
        sequence = self._sequences.pop(state.id, None) or self.runner.cache.open()
        self._sequences[state.id] = sequence
        common = common_prefix(sequence.tokens, state.tokens)
        self.runner.cache.cut(sequence, min(common, len(state.tokens) - 1))
        return sequence

    def _make_room(self, state: AnswerState, limit: int, in_use: set[int]) -> bool:
        """Drop sequences that are not in use until the tokens of an answer and ``limit`` drafted ones have slots."""
        slots = self.runner.cache.slots
        needed = len(state.tokens) - len(self._sequences[state.id]) + limit * len(in_use)
        for other in list(self._sequences):
            if slots.num_free >= needed:
                break
            if other not in in_use:
                self.forget(other)
        return slots.num_free >= needed

    def _first_logits(self, guesses: Sequence[_Guess]) -> list[Logits]:
        """Run the tokens that the draft model has not seen yet, and return the logits ``[vocab]`` after the last of each."""
        found = dict[int, Logits]()
        packed = list[_Guess]()
        for guess in guesses:
            missing = guess.state.tokens[len(guess.sequence) :]
            if len(missing) > PACKED_TOKENS:
                found[guess.state.id] = self.runner.prefill(guess.sequence, missing).copy()
            else:
                packed.append(guess)
        segments = [Segment(g.sequence, np.array(g.state.tokens[len(g.sequence) :], np.int64)) for g in packed]
        found |= {guess.state.id: line for guess, line in zip(packed, self._step(segments), strict=True)}
        return [found[guess.state.id] for guess in guesses]

    def _step(self, segments: Sequence[Segment]) -> list[Logits]:
        """Run segments in as few calls as hold them, and return the logits ``[vocab]`` after each: copies."""
        lines = list[Logits]()
        rest = list(segments)
        while rest:
            count = next(n for n in range(len(rest), 0, -1) if n == 1 or self.runner.variant_for(rest[:n]) is not None)
            lines += [line.copy() for line in self.runner.step(rest[:count])]
            rest = rest[count:]
        return lines


def _add(guess: _Guess, logits: Logits) -> bool:
    """Add the most likely token of ``logits [vocab]`` that the model has to a draft. Return whether the draft goes on."""
    logits = logits[: guess.state.vocab_size]
    token = int(logits.argmax())
    drafts = guess.state.drafts
    confidence = 0.0 if drafts is None else drafts.params.confidence
    if confidence and _probability(logits, token) < confidence:
        return False
    guess.tokens.append(token)
    return not guess.is_done


def _probability(logits: Logits, token: int) -> float:
    return float(1.0 / np.exp(logits - logits[token]).sum(dtype=np.float64))


def _draft_of(guess: _Guess | None) -> Draft:
    return NO_DRAFT if guess is None or not guess.tokens else Draft(tuple(guess.tokens), KIND)
