"""A request inside the engine: its answers, and the queue that receives their tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.random  # which numpy would import with the first request, when files may be scarce

from staticllm.core import Clock, FinishReason
from staticllm.errors import GenerationConfigError

from ..generation.drafts import AnswerDrafts, Draft, DraftParams
from ..generation.filters import Logits
from ..generation.grammar_mask import ForcedTokens, GrammarMask, Grammars
from ..generation.logits_processors import LogitsProcessor, processors_for
from ..generation.sampler import SampledToken, Sampler
from ..profiling.records import EngineProgress, RequestProgress, RequestRecord
from ..programs.model_runner import ModelRunner, SegmentResult
from ..scheduling.request_table import RequestInfo
from .request import CompileTimes, EngineRequest, Finished, OutputQueue, TokenOutput, new_id
from .sequence import ActiveRequest, Outcome, SequenceState


@dataclass
class Tally:
    """What was counted since the last token of an answer; the next token carries it to the reader.

    ``num_accepted`` of ``num_drafted`` tokens of drafts were accepted.
    """

    device_seconds: float = 0.0
    own_seconds: float = 0.0
    sampling_seconds: float = 0.0
    draft_seconds: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0


class AnswerState(SequenceState):
    """One answer inside the engine: its prompt, and the tokens that its sampler chooses."""

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
        id = new_id() if index else request.id
        info = RequestInfo(id, request.arrival, len(request.prompt), request.priority, request.deadline)
        super().__init__(info, request.id, request.prompt, clock, request.owner, request.conditions)
        self.request = request
        self.index = index
        self.overflow = request.overflow
        self.vocab_size = vocab_size
        self.drafts = _drafts_of(request, grammar_mask)
        self._grammar_mask = grammar_mask
        self._tally = Tally()
        self._queue = queue
        self._new_tokens: list[TokenOutput] = []
        late = request.stop_token_ids | request.late_token_ids
        processors = processors_for(request.sampling, request.prompt, vocab_size, request.min_new_tokens, late)
        rng = np.random.default_rng(request.seed + index)
        masks = () if grammar_mask is None else (grammar_mask,)  # the last ones: no other allows what they forbid
        self.sampler = Sampler(request.sampling, [*processors, *more_processors, *masks], rng)

    @property
    def can_bypass_arena(self) -> bool:
        """Whether no other answer shares its prompt."""
        return self.request.num_sequences == 1

    @property
    def num_left(self) -> int:
        """The most tokens that may still be chosen."""
        limit = self.request.max_new_tokens
        return sys.maxsize if limit is None else limit - self.num_generated

    def take_result(self, result: SegmentResult, count: int) -> Outcome:
        """Count ``count`` tokens that a call has run, and return what follows."""
        if result.argmax is None:
            return Outcome.FAIL
        return Outcome.CHOOSE if self.info.add_computed(result.num_accepted) else Outcome.CONTINUE

    def prepare(self) -> None:
        """Prepare the choice of the next token, while the device computes its logits."""
        self.sampler.prepare()

    def sample(self, logits: Logits, argmax: int | None = None) -> SampledToken:
        """Choose the next token from ``logits [vocab]``; ``argmax`` is the index of the largest, if known. ``add`` adds it.

        Raises:
            GenerationConfigError: no token is left to choose.
        """
        start = self.clock()
        choice = self.sampler.sample(logits, argmax)
        self._tally.sampling_seconds += self.clock() - start
        return choice

    def add(self, choice: SampledToken) -> FinishReason | None:
        """Add a chosen token to the answer. Return why the answer ends with it, None if it continues."""
        reason = self.reason_to_end(choice.token, 1)
        now = self.clock()
        self.tokens.append(choice.token)
        self.token_times.append(now)
        tally = self._tally
        output = TokenOutput(
            id=choice.token,
            logprob=choice.logprob,
            time=now,
            sampling_seconds=tally.sampling_seconds,
            index=self.index,
            device_seconds=tally.device_seconds,
            num_cached=self.kv.num_cached,
            num_drafted=tally.num_drafted,
            num_accepted=tally.num_accepted,
            draft_seconds=tally.draft_seconds,
            own_seconds=tally.own_seconds,
            num_recomputed=self.kv.num_recomputed,
            top=choice.top,
        )
        self._new_tokens.append(output)
        self._tally = Tally()
        return reason

    def reason_to_end(self, token: int, count: int) -> FinishReason | None:
        """Return why the answer ends with ``token``, the ``count``-th after those that were added; None if it continues."""
        if token in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_generated + count != self.request.max_new_tokens:
            return None
        is_whole = self._grammar_mask is not None and self._grammar_mask.is_whole
        return FinishReason.STOP if is_whole else FinishReason.LENGTH

    def count_draft(self, draft: Draft, num_accepted: int) -> None:
        """Count the tokens of a draft that a call checked."""
        self._tally.num_drafted += len(draft.tokens)
        self._tally.num_accepted += num_accepted
        if self.drafts is not None:
            self.drafts.observe(draft, num_accepted)

    def add_draft_seconds(self, seconds: float) -> None:
        """Add the ``seconds`` that the draft model took for a draft of this answer, and of others in the same calls."""
        self._tally.draft_seconds += seconds

    def replace_tokens(self, tokens: list[int]) -> None:
        """Replace the prompt and the answer so far, in a conversation that was shortened."""
        super().replace_tokens(tokens)
        if self.drafts is not None:
            self.drafts.forget()

    def add_call(self, seconds: float, own_seconds: float) -> None:
        """Add the ``seconds`` of a device call that this answer was part of, and the part of them by its rows."""
        self._tally.device_seconds += seconds
        self._tally.own_seconds += own_seconds

    def post(self) -> None:
        """Hand the tokens chosen since the last time to the reader."""
        while self._new_tokens:
            self._queue.put(self._new_tokens.pop(0))  # once only, also if a listener raises

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Post the remaining tokens, and then the end of the answer."""
        self.post()
        self._queue.put(Finished(reason, error, self.index))

    def record(self, reason: FinishReason) -> RequestRecord:
        """Return the record of the answer, which ends now. Only the first answer counts the prompt."""
        num_prompt = 0 if self.index else len(self.request.prompt)
        return RequestRecord(
            id=self.id,
            arrival=self.request.arrival,
            started=self.started,
            token_times=tuple(self.token_times),
            num_prompt=num_prompt,
            num_cached=self.kv.num_cached,
            reason=reason,
            ended=self.clock(),
            is_proactive=self.info.is_proactive,
        )

    def progress(self) -> RequestProgress:
        """Return how far the answer is. Any thread may call."""
        request = self.request
        info = self.info
        is_search = request.beams is not None and self.started is not None  # its beams are sequences of their own
        return RequestProgress(
            id=self.id,
            status="running" if is_search else info.status.value,
            arrival=request.arrival,
            started=self.started,
            first_token=self.token_times[0] if self.token_times else None,
            num_prompt=len(request.prompt),
            num_cached=self.kv.num_cached,
            num_computed=info.num_computed,
            num_generated=self.num_generated,
            max_new_tokens=request.max_new_tokens,
            priority=info.priority,
        )


class RequestState(ActiveRequest):
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
        self.id = request.id
        self.owner = request.owner
        self.queue = queue or OutputQueue()
        self.clock = clock
        self._user_processors = user_processors
        self._vocab_size = vocab_size
        self._grammar_mask = grammar_mask
        self._cancelled: dict[int | None, FinishReason] = {}  # by the index of the answer; None for all
        self._finished: set[int] = set()
        self.sequences = [self.new_sequence(0)]

    @property
    def priority(self) -> int:
        """The priority of its answers."""
        return self.sequences[0].info.priority

    @property
    def unfinished(self) -> list[AnswerState]:
        """The answers that are known and have not ended. Any thread may read it."""
        return [state for state in tuple(self.sequences) if state.index not in self._finished]

    @property
    def is_waiting(self) -> bool:
        """Whether its prompt has not begun. A request that has lost its slots since then does not count again."""
        return self.sequences[0].started is None and 0 not in self._finished

    def progress(self) -> list[RequestProgress]:
        """Return how far the answers are that have not ended."""
        return [state.progress() for state in self.unfinished]

    def fork(self) -> list[AnswerState]:
        """Create the other answers and return them; called once, when the prompt of the first one has run."""
        siblings = [self.new_sequence(index) for index in range(1, self.request.num_sequences)]
        for sibling in siblings:
            sibling.started = self.sequences[0].started
            sibling.info.set_priority(self.priority)
        self.sequences += siblings
        self._apply_cancels()
        return siblings

    def new_sequence(self, index: int) -> AnswerState:
        more = self._user_processors[index] if self._user_processors else ()
        mask = None if self._grammar_mask is None else self._grammar_mask.clone()
        return AnswerState(self.request, self.queue, self._vocab_size, index, more, mask, self.clock)

    def set_priority(self, priority: int) -> None:
        """Change the priority of all answers. Runs on the engine's thread."""
        for state in self.sequences:
            state.info.set_priority(priority)

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
        self._finish_one(state.index, partial(state.finish, reason, error))
        return self.finish_from(len(self.sequences), reason, error)

    def finish_from(self, first: int, reason: FinishReason, error: Exception | None = None) -> bool:
        """End every answer from index ``first`` on that has not ended. Return whether the whole request has ended.

        Those of a beam search are none: it reports what it found itself.
        """
        is_found = self.request.beams is None
        for index in range(first, self.request.num_sequences):
            if index not in self._finished:
                self._finish_one(index, partial(self.queue.put, Finished(reason, error, index, is_found)))
        return len(self._finished) == self.request.num_sequences

    def _finish_one(self, index: int, post_end: Callable[[], None]) -> None:
        """Count an answer as ended, before its reader knows: it may submit the next request at once."""
        self._finished.add(index)
        try:
            post_end()
        except BaseException:
            self._finished.discard(index)  # its reader still waits for the end
            raise


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


def prepare_grammar(request: EngineRequest, vocab_size: int, grammars: Grammars | None) -> PreparedGrammar | None:
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
    finishes = bool(request.sampling.finish_grammar)
    longest = request.max_new_tokens
    matcher = grammars.matcher(request.grammar, vocab_size, longest, finishes)
    seconds = time.perf_counter() - begin - (grammars.init_seconds - init_before)
    mask = GrammarMask(
        matcher, request.stop_token_ids, grammars.special, vocab_size, grammars.times, longest if finishes else None
    )
    return PreparedGrammar(mask, CompileTimes(max(0.0, seconds), grammars.init_seconds))


def progress_of(requests: Iterable[ActiveRequest], runner: ModelRunner) -> EngineProgress:
    """Return how far requests are. Any thread may call.

    The engine's thread may change a request meanwhile, so that the counts of one may be those before and after a call.
    """
    found = {each.id: each for request in requests for each in request.progress()}
    return EngineProgress(tuple(found.values()), runner.cache.num_slots)
