"""Takes the results of a call: counts its tokens, checks drafts and chooses the next token of each answer."""

from __future__ import annotations

from collections.abc import Sequence

from staticllm.core import FinishReason

from ..generation.grammar_mask import GrammarLimitError
from ..generation.sampler import SampledToken
from ..programs.model_runner import Logits, SegmentResult, StepResult, not_finite
from ..scheduling.interface import RequestStatus
from .batch import BatchEntry
from .client_sequences.feeds import Feeds
from .sequence import Outcome
from .serving import Serving
from .speculation.draft_check import DraftCheck
from .state import AnswerState, RequestState


class Chooser:
    """Chooses tokens for the requests that ``serving`` has. Runs on the engine's thread."""

    def __init__(self, serving: Serving, feeds: Feeds) -> None:
        self._serving = serving
        self._feeds = feeds

    def take(self, entry: BatchEntry, result: SegmentResult, step: StepResult) -> None:
        """Count the tokens that a call computed for an answer, and choose its next token if all have run."""
        state = entry.state
        if result.argmax is None and (len(step.segments) > 1 or entry.check is not None):
            # another request or the draft may be the cause; it runs again
            self._serving.device.quarantine.add(state.id)
            return
        if entry.check is not None:
            self._take_checked(entry.check)
            return
        self._serving.device.quarantine.discard(state.id)
        outcome = state.take_result(result, len(entry.segment.tokens))
        if outcome is Outcome.CHOOSE:
            assert isinstance(state, AnswerState), "clients choose the others"
            self._choose_first_or_next(state, result.logits[-1], result.argmax)
        elif outcome is Outcome.RETURN:
            self._feeds.complete(state.id)
        elif outcome is Outcome.FAIL:
            self._serving.end(state, FinishReason.ERROR, not_finite(step.variant), is_trusted=False)

    def _take_checked(self, check: DraftCheck) -> None:
        """Add the tokens that were chosen when a draft was checked, one by one as if each had had a call of its own."""
        state = check.state
        state.count_draft(check.draft, check.num_accepted)
        for choice in check.choices:
            state.info.add_computed(1)
            self._add_token(state, choice)
        if check.error is not None:
            self._fail(state, check.error)

    def _choose_first_or_next(self, state: AnswerState, logits: Logits, argmax: int | None) -> None:
        """Choose the next token; after a prompt, choose one for each of its answers."""
        if state.num_generated:
            self._choose(state, logits, argmax)
            return
        siblings: Sequence[AnswerState] = ()
        if state.kv.sequence is not None:
            self._serving.device.kv_manager.prefix.keep_prompt(state.kv.sequence)
            siblings = self._request_of(state).fork()
            for sibling in siblings:
                self._serving.device.kv_manager.fork(state, sibling)
        self._serving.outbox.add(siblings)
        for each in (state, *siblings):
            self._choose(each, logits, argmax)

    def _choose(self, state: AnswerState, logits: Logits, argmax: int | None) -> None:
        try:
            choice = state.sample(logits, argmax)
        except Exception as error:  # the sampling of this request failed; the others continue
            self._fail(state, error)
            return
        self._add_token(state, choice)

    def _fail(self, state: AnswerState, error: Exception) -> None:
        """End an answer for which no token could be chosen. It is cut off where its grammar became too complex."""
        if isinstance(error, GrammarLimitError) and state.num_generated:
            self._serving.end(state, FinishReason.LENGTH)
        else:
            self._serving.end(state, FinishReason.ERROR, error)

    def _add_token(self, state: AnswerState, choice: SampledToken) -> None:
        if (reason := state.add(choice)) is not None:
            self._serving.end(state, reason)
            return
        self._serving.device.table.add_token(state.id, self._serving.clock())
        limit = self._serving.device.options.max_seq_len
        if len(state.tokens) > limit and not self._serving.device.kv_manager.shorten(state, limit // 2):
            self._serving.end(state, FinishReason.LENGTH)
        elif self._serving.device.kv_manager.recompute_outgrown(state):
            self._serving.preempted.append(state.id)
        elif state.info.status is RequestStatus.SWAPPED:
            self._serving.device.kv_manager.offload(state)

    def _request_of(self, state: AnswerState) -> RequestState:
        request = self._serving.requests[state.request_id]
        assert isinstance(request, RequestState), "it has answers"
        return request
