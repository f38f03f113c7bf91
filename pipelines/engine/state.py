"""The progress of a request inside the engine: its answers, and what is recorded of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.random  # which numpy would import with the first request, when files may be scarce

from staticllm.core import Clock, FinishReason
from staticllm.errors import GenerationConfigError
from staticllm.kvcache.sequence import KVSequence
from staticllm.pipelines.engine.request import CompileTimes, EngineRequest, Finished, OutputQueue, TokenOutput, new_id
from staticllm.pipelines.generation.drafts import AnswerDrafts, Draft, DraftParams
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.logits_processors import LogitsProcessor, processors_for
from staticllm.pipelines.generation.sampler import Choice, Sampler
from staticllm.pipelines.grammars.compiler import GrammarCompiler
from staticllm.pipelines.grammars.mask import ForcedTokens, GrammarMask
from staticllm.pipelines.profiling.records import EngineProgress, RequestProgress, RequestRecord
from staticllm.pipelines.programs.model_runner import ModelRunner, SegmentResult
from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import RequestInfo

if TYPE_CHECKING:
    from staticllm.pipelines.engine.engine_core import EngineCore


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

    is_client_driven: ClassVar[bool] = False
    """Whether a client or a beam search chooses its tokens."""

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
        self.request = request
        self.index = index
        self.clock = clock
        self.id = new_id() if index else request.id
        self.tokens = list(request.prompt)
        self.info = RequestInfo(
            self.id, request.arrival, len(self.tokens), request.priority, request.deadline, self.is_client_driven
        )
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
        self._num_drafted = 0
        self._num_accepted = 0  # tokens of drafts that were checked since the last token
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
        self._device_seconds = 0.0
        self._sampling_seconds = 0.0
        self._draft_seconds = 0.0
        self._num_drafted = 0
        self._num_accepted = 0
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
        self.request = request
        self.queue = queue or OutputQueue()
        self.clock = clock
        self._user_processors = user_processors
        self._vocab_size = vocab_size
        self._grammar_mask = grammar_mask
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
        core.device.kv_manager.add(self.sequences[0])

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
    begin = time.perf_counter()
    init_before = grammars.init_seconds
    matcher = grammars.matcher(request.grammar, vocab_size, request.max_new_tokens)
    seconds = time.perf_counter() - begin - (grammars.init_seconds - init_before)
    mask = GrammarMask(matcher, request.stop_token_ids, grammars.vocabulary.special, vocab_size, grammars.times)
    return PreparedGrammar(mask, CompileTimes(max(0.0, seconds), grammars.init_seconds))


def request_record(state: SequenceState, reason: FinishReason) -> RequestRecord:
    """Return the record of one answer that ends now."""
    request = state.request
    return RequestRecord(
        state.id, request.arrival, state.started, tuple(state.token_times),
        0 if state.index else len(request.prompt), state.num_cached, reason, state.clock(),
    )  # fmt: skip


def progress_of(requests: Iterable[RequestState], runner: ModelRunner) -> EngineProgress:
    """Return how far requests are, without those whose tokens a client feeds. Any thread may call.

    The engine's thread may change a request meanwhile, so that the counts of one may be those before and after a call.
    """
    found = {
        state.id: _sequence_progress(state)
        for request in requests
        if not request.sequences[0].info.is_client_driven
        for state in request.unfinished
    }
    return EngineProgress(tuple(found.values()), runner.cache.num_slots)


def _sequence_progress(state: SequenceState) -> RequestProgress:
    request = state.request
    info = state.info
    times = state.token_times
    is_search = request.beams is not None and state.started is not None  # its beams are sequences of their own
    return RequestProgress(
        state.id, "running" if is_search else info.status.value, request.arrival, state.started,
        times[0] if times else None, len(request.prompt), state.num_cached, info.num_computed, state.num_generated,
        request.max_new_tokens, request.priority,
    )  # fmt: skip
