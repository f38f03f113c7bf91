"""Holds a request as plain values (``EngineRequest``), and its progress inside the engine (``RequestState``)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.random  # which numpy would import with the first request, when files may be scarce

from staticllm.core import Clock, FinishReason
from staticllm.errors import GenerationConfigError
from staticllm.kvcache.sequence import KVSequence
from staticllm.pipelines.engine.output_queue import CompileTimes, Finished, OutputQueue, TokenOutput
from staticllm.pipelines.engine.overflow import OverflowRule
from staticllm.pipelines.generation.beam_search import BeamParams
from staticllm.pipelines.generation.drafts import AnswerDrafts, Draft, DraftParams
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.logits_processors import LogitsProcessor, processors_for
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.generation.sampler import Choice, Sampler
from staticllm.pipelines.grammars.compiler import GrammarCompiler
from staticllm.pipelines.grammars.grammar import Grammar
from staticllm.pipelines.grammars.mask import ForcedTokens, GrammarMask
from staticllm.pipelines.programs.model_runner import SegmentResult
from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import RequestInfo

if TYPE_CHECKING:
    from staticllm.pipelines.engine.engine_core import EngineCore

Decode: TypeAlias = Callable[[list[int]], str]
"""Makes text of token ids."""
_numbers = count(1)


def new_id() -> int:
    """Return a number that no other request or sequence of this process has."""
    return next(_numbers)


MAX_PRIORITY = 1 << 31
"""The highest priority of a request; the lowest one is its negative."""


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and its generation options, as plain values that can be sent to another process.

    Args:
        prompt: Token ids.
        sampling: How tokens are chosen.
        seed: Seed of the random numbers of the first answer; answer ``i`` has ``seed + i``.
        num_sequences: Number of answers; the prompt runs once, and the answers share its slots.
        max_new_tokens: The most tokens per answer; None if only the slots limit them.
        stop_token_ids: Tokens that end an answer; the first ``min_new_tokens`` tokens cannot be one of them.
        late_token_ids: Other tokens that the first ``min_new_tokens`` tokens cannot be: those that end no answer because of
            ``ignore_eos``.
        min_new_tokens: The fewest tokens per answer.
        priority: Requests with a higher priority are served first.
        deadline: The ``time.perf_counter`` moment at which the request ends, finished or not; None without one.
        overflow: The rule for a conversation that fills its slots.
        beams: The parameters of a beam search; None for one token at a time. Its answers are the ``num_sequences`` best.
        stop_strings: Texts that end a beam. Those of other answers are found by the reader.
        drafts: How its tokens are drafted; None without drafts.
        grammar: What each answer must look like; None for free text.
        adapters: The factor of each adapter that the model was loaded with; empty if the request uses none.
        owner: The client of the daemon that pays for its device time; 0 without one. It stays in its process.
        id: The request's number.
        arrival: The ``time.perf_counter`` moment of its arrival.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    num_sequences: int = 1
    max_new_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    late_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    overflow: OverflowRule = "stop"
    beams: BeamParams | None = None
    stop_strings: tuple[str, ...] = ()
    drafts: DraftParams | None = None
    grammar: Grammar | None = None
    adapters: tuple[float, ...] = ()
    owner: int = 0
    id: int = field(default_factory=new_id)
    arrival: float = field(default_factory=time.perf_counter)

    def to_dict(self) -> dict[str, Any]:
        """Return the request as a dict of JSON types.

        The id and the owner are this process's own and are left out. Moments become seconds from now, since the clocks of
        processes may differ.
        """
        plain = {**asdict(self), "prompt": list(self.prompt), "stop_token_ids": sorted(self.stop_token_ids)}
        plain["adapters"], plain["late_token_ids"] = list(self.adapters), sorted(self.late_token_ids)
        del plain["id"], plain["owner"]
        now = time.perf_counter()
        for name in ("arrival", "deadline"):
            plain[name] = None if plain[name] is None else plain[name] - now
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineRequest:
        """Return the request that ``to_dict`` described, with an id of this process."""
        plain, now = dict(values), time.perf_counter()
        for name in ("id", "owner"):  # those of another process could be taken here
            plain.pop(name, None)
        for name in ("arrival", "deadline"):
            plain[name] = None if plain[name] is None else plain[name] + now
        prompt, stops = tuple(plain.pop("prompt")), frozenset(plain.pop("stop_token_ids"))
        nested = {name: kind(**plain.pop(name)) for name, kind in _NESTED.items() if plain.get(name) is not None}
        texts, sampling = tuple(plain.pop("stop_strings", ())), SamplingParams.from_dict(plain.pop("sampling"))
        adapters, late = tuple(plain.pop("adapters", ())), frozenset(plain.pop("late_token_ids", ()))
        given = {**plain, **nested, "stop_token_ids": stops, "late_token_ids": late}
        return cls(prompt, sampling, stop_strings=texts, adapters=adapters, **given)


_NESTED: dict[str, type[Any]] = {"beams": BeamParams, "drafts": DraftParams, "grammar": Grammar}
"""The fields of a request that are values with fields of their own."""


class Outcome(Enum):
    """What follows after tokens of an answer have run."""

    CONTINUE = auto()
    """More of its tokens run."""
    CHOOSE = auto()
    """The engine chooses the next token."""
    RETURN = auto()
    """The client that chooses its tokens gets the logits."""
    FAIL = auto()
    """Its logits are not finite."""


class SequenceState:
    """One answer inside the engine. ``tokens`` holds the prompt and the answer so far, in the order of the KV slots; ``info``
    is its entry in the request table, which knows its status and counts. ``clock`` is that of the engine.

    Used on the engine's thread, except ``cancel_reason``, which any thread may set.
    """

    def __init__(
        self,
        request: EngineRequest,
        queue: OutputQueue,
        vocab_size: int,
        index: int = 0,
        more_processors: Sequence[LogitsProcessor] = (),
        grammar_mask: GrammarMask | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.request, self.index, self.clock = request, index, clock
        self.id = new_id() if index else request.id
        self.tokens = list(request.prompt)
        self.info = RequestInfo(self.id, request.arrival, len(self.tokens), request.priority, request.deadline)
        self.sequence: KVSequence | None = None  # its slots in the arena; only the KVCacheManager sets it
        self.cancel_reason: FinishReason | None = None
        self.is_shifted = False  # its keys are not those that the model would compute; only the KVCacheManager sets it
        self.num_cached = 0  # prompt tokens that the prefix cache had; only the KVCacheManager sets it
        self.started: float | None = None
        self.vocab_size = vocab_size
        self.drafts = _drafts_of(request, grammar_mask)
        self.token_times: list[float] = []
        self._device_seconds = 0.0  # device time since the last token
        self._sampling_seconds = 0.0  # time of choosing since the last token
        self._draft_seconds = 0.0  # time of the draft model since the last token
        self._num_drafted = self._num_accepted = 0  # tokens of drafts that were checked since the last token
        self._queue = queue
        self._new_tokens: list[TokenOutput] = []
        late = request.stop_token_ids | request.late_token_ids
        processors = processors_for(request.sampling, request.prompt, vocab_size, request.min_new_tokens, late)
        rng = np.random.default_rng(request.seed + index)
        masks = () if grammar_mask is None else (grammar_mask,)  # the last ones: no other allows what they forbid
        self._sampler = Sampler(request.sampling, [*processors, *more_processors, *masks], rng)

    @property
    def num_generated(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.token_times)

    @property
    def reusable_tokens(self) -> list[int]:
        """The tokens that may have keys and values of other requests, except the last of them, which must run."""
        return self.tokens

    @property
    def can_bypass_arena(self) -> bool:
        """Whether the keys and values of its prompt may go to the host pool at once."""
        return self.request.num_sequences == 1

    def num_logits(self, start: int, count: int) -> int:
        """Return how many logits a call needs that runs the tokens ``[start, start + count)``."""
        return 1

    @property
    def num_left(self) -> int:
        """The most tokens that may still be chosen."""
        limit = self.request.max_new_tokens
        return sys.maxsize if limit is None else limit - self.num_generated

    @property
    def is_recorded(self) -> bool:
        """Whether the profiler records its end."""
        return True

    def take_result(self, result: SegmentResult, count: int) -> Outcome:
        """Count ``count`` tokens that a call has run, and return what follows."""
        if result.argmax is None:
            return Outcome.FAIL
        return Outcome.CHOOSE if self.info.add_computed(result.num_accepted) else Outcome.CONTINUE

    def prepare(self) -> None:
        """Prepare the choice of the next token, while the device computes its logits."""
        self._sampler.prepare()

    def sample(self, logits: Logits, argmax: int | None = None) -> Choice:
        """Choose the next token from ``logits [vocab]``; ``argmax`` is the index of the largest, if known. ``add`` adds it.

        Raises:
            GenerationConfigError: no token is left to choose.
        """
        start = self.clock()
        choice = self._sampler.sample(logits, argmax)
        self._sampling_seconds += self.clock() - start
        return choice

    def add(self, choice: Choice) -> FinishReason | None:
        """Add a chosen token to the answer. Return why the answer ends with it, None if it continues."""
        reason = self.reason_to_end(choice.token, 1)
        now = self.clock()
        self.tokens.append(choice.token)
        self.token_times.append(now)
        output = TokenOutput(
            choice.token, choice.logprob, now, self._sampling_seconds, self.index, self._device_seconds, self.num_cached,
            self._num_drafted, self._num_accepted, self._draft_seconds,
        )  # fmt: skip
        self._new_tokens.append(output)
        self._device_seconds = self._sampling_seconds = self._draft_seconds = 0.0
        self._num_drafted = self._num_accepted = 0
        return reason

    def reason_to_end(self, token: int, count: int) -> FinishReason | None:
        """Return why the answer ends with ``token``, the ``count``-th after those that were added; None if it continues."""
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_generated + count == self.request.max_new_tokens else None

    def set_priority(self, priority: int) -> None:
        """Change the priority of the answer."""
        self.request = replace(self.request, priority=priority)
        self.info.set_priority(priority)

    def count_draft(self, draft: Draft, num_accepted: int) -> None:
        """Count the tokens of a draft that a call checked; the next token carries the counts to the reader."""
        self._num_drafted += len(draft.tokens)
        self._num_accepted += num_accepted
        if self.drafts is not None:
            self.drafts.observe(draft, num_accepted)

    def add_draft_seconds(self, seconds: float) -> None:
        """Add the ``seconds`` that the draft model took for a draft of this answer, and of others in the same calls."""
        self._draft_seconds += seconds

    def replace_tokens(self, tokens: list[int]) -> None:
        """Replace the prompt and the answer so far, in a conversation that was shortened."""
        self.tokens = tokens
        if self.drafts is not None:
            self.drafts.forget()

    def finish_reason_at(self, now: float) -> FinishReason | None:
        """Return why the answer must end at the moment ``now``: cancelled or past its deadline. None if it may continue."""
        if self.cancel_reason is not None:
            return self.cancel_reason
        deadline = self.request.deadline
        return FinishReason.DEADLINE if deadline is not None and now >= deadline else None

    def add_call(self, seconds: float) -> None:
        """Add the ``seconds`` of a device call that this answer was part of."""
        self._device_seconds += seconds

    def post(self) -> None:
        """Hand the tokens chosen since the last time to the reader; called while the device runs, so that readers wake then."""
        for token in self._new_tokens:
            self._queue.put(token)
        self._new_tokens.clear()

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Post the remaining tokens, and then the end of the answer."""
        self.post()
        self._queue.put(Finished(reason, error, self.index))


class RequestState:
    """A request inside the engine: its answers, and the queue that receives their tokens.

    ``sequences`` holds the first answer from the start; the others are added when the prompt has run, and share its slots.
    ``user_processors`` holds the logits processors that a user made, per answer; it is empty without any. ``grammar_mask`` is
    the processor of an answer's grammar at its beginning; each answer gets its own copy. ``clock`` is that of the engine.
    """

    def __init__(
        self,
        request: EngineRequest,
        vocab_size: int,
        queue: OutputQueue | None = None,
        user_processors: Sequence[Sequence[LogitsProcessor]] = (),
        grammar_mask: GrammarMask | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.request, self.queue, self.clock = request, queue or OutputQueue(), clock
        self._user_processors = user_processors
        self._vocab_size, self._grammar_mask = vocab_size, grammar_mask
        self._cancelled: dict[int | None, FinishReason] = {}  # by the index of the answer; None for all
        self._finished: set[int] = set()
        self.sequences = [self._new_sequence(0)]

    @property
    def unfinished(self) -> list[SequenceState]:
        """The answers that are known and have not ended. Any thread may read it."""
        return [state for state in tuple(self.sequences) if state.index not in self._finished]

    @property
    def is_waiting(self) -> bool:
        """Whether an answer holds no slots: it has not begun, or lost them. Runs on the engine's thread."""
        return any(state.info.status is RequestStatus.WAITING for state in self.unfinished)

    def admit(self, core: EngineCore) -> None:
        """Begin in a core."""
        core.kv_manager.add(self.sequences[0])

    def fork(self) -> list[SequenceState]:
        """Create the other answers and return them; called once, when the prompt of the first one has run."""
        siblings = [self._new_sequence(index) for index in range(1, self.request.num_sequences)]
        for sibling in siblings:
            sibling.started = self.sequences[0].started
        self.sequences += siblings
        self._apply_cancels()
        return siblings

    def _new_sequence(self, index: int) -> SequenceState:
        more = self._user_processors[index] if self._user_processors else ()
        mask = None if self._grammar_mask is None else self._grammar_mask.clone()
        return SequenceState(self.request, self.queue, self._vocab_size, index, more, mask, self.clock)

    def set_priority(self, priority: int) -> None:
        """Change the priority of all answers. Runs on the engine's thread."""
        self.request = replace(self.request, priority=priority)
        for state in self.sequences:
            state.set_priority(priority)

    def cancel(self, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End one answer, or all of them, before the next device call. Any thread may call.

        One answer of several ends when the prompt has run: the others need it.
        """
        self._cancelled[index] = reason
        if index is None or len(self.sequences) == self.request.num_sequences:
            self._apply_cancels()

    def _apply_cancels(self) -> None:
        for state in tuple(self.sequences):
            for index in (state.index, None):
                state.cancel_reason = self._cancelled.get(index, state.cancel_reason)

    def finish(self, state: SequenceState, reason: FinishReason, error: Exception | None = None) -> bool:
        """End one answer, and with it all answers that have not begun. Return whether the whole request has ended."""
        state.finish(reason, error)
        self._finished.add(state.index)
        return self.finish_from(len(self.sequences), reason, error)

    def finish_from(self, first: int, reason: FinishReason, error: Exception | None = None) -> bool:
        """End every answer from index ``first`` on that has not ended. Return whether the whole request has ended."""
        for index in range(first, self.request.num_sequences):
            if index not in self._finished:
                self.queue.put(Finished(reason, error, index))
                self._finished.add(index)
        return len(self._finished) == self.request.num_sequences


def _drafts_of(request: EngineRequest, grammar_mask: GrammarMask | None) -> AnswerDrafts | None:
    """Return the drafts of one answer: first what its grammar forces, then what the request asks for; None without any."""
    if grammar_mask is None:
        return None if request.drafts is None else AnswerDrafts(request.drafts, request.prompt)
    drafts = AnswerDrafts(request.drafts or DraftParams(), request.prompt)
    drafts.drafters.insert(0, ForcedTokens(grammar_mask, lambda tokens: Draft(tokens, "grammar", is_certain=True)))
    return drafts


@dataclass(frozen=True)
class EngineText:
    """What an engine needs of the tokenizer: ``decode`` to find the stop strings of beams, ``grammars`` to compile grammars."""

    decode: Decode
    grammars: GrammarCompiler


@dataclass(frozen=True)
class PreparedGrammar:
    """The processor of a grammar at the beginning of an answer, and what it took to compile."""

    mask: GrammarMask
    times: CompileTimes


def prepare_grammar(
    request: EngineRequest, vocab_size: int, grammars: GrammarCompiler | None
) -> PreparedGrammar | None:
    """Compile the grammar of a request; None without a grammar.

    Raises:
        GenerationConfigError: the grammar cannot be compiled, has no answer that is short enough, or has no tokenizer.
    """
    if request.grammar is None:
        return None
    if grammars is None:
        raise GenerationConfigError("this engine has no tokenizer, which grammars need: use a pipeline")
    begin, init_before = time.perf_counter(), grammars.init_seconds
    matcher = grammars.matcher(request.grammar, vocab_size, request.max_new_tokens)
    seconds = time.perf_counter() - begin - (grammars.init_seconds - init_before)
    mask = GrammarMask(matcher, request.stop_token_ids, grammars.vocabulary.special, vocab_size, grammars.times)
    return PreparedGrammar(mask, CompileTimes(max(0.0, seconds), grammars.init_seconds))


def mask_of(request: EngineRequest, vocab_size: int, grammars: GrammarCompiler | None) -> GrammarMask | None:
    """Return the processor of a request's grammar at the beginning of an answer; None without a grammar.

    Raises:
        GenerationConfigError: as for ``prepare_grammar``.
    """
    prepared = prepare_grammar(request, vocab_size, grammars)
    return None if prepared is None else prepared.mask
