"""Requests that are decoded by beam search: their beams are client sequences, and the engine chooses their tokens together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from staticllm.core import Clock, FinishReason
from staticllm.errors import GenerationConfigError, NumericalError, as_ours

from ..generation.beam_search import BeamLimits, BeamMask, BeamSearch, Ending, Hypothesis, Successor
from ..generation.filters import Logits
from ..generation.grammar_mask import GrammarLimitError
from .client_sequences.feeds import Feeds
from .client_sequences.state import BeamState, FeedOrder, FeedResult
from .request import Decode, EngineRequest, Finished, OutputQueue, TokenOutput
from .state import RequestState

BROKEN = 3
"""Most characters that are decoded of a first token that is the rest of a character."""


class BeamRequest(RequestState):
    """A beam search inside the engine. Its tokens come at its end: only then it is known which answers are the best.

    ``sequences`` has one entry for the records; it never holds slots. Each beam is a client sequence, so beams share the slots of
    their common tokens, wait for each other wherever policies run them, and lose slots to others like the sequences of clients.
    """

    def __init__(
        self,
        request: EngineRequest,
        vocab_size: int,
        queue: OutputQueue | None = None,
        decode: Decode | None = None,
        mask: BeamMask | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(request, vocab_size, queue, clock=clock)
        self._first_mask = mask
        assert request.beams is not None, "not a beam search"
        limits = BeamLimits(request.max_new_tokens, request.stop_token_ids, request.min_new_tokens)
        self._search = BeamSearch(request.beams, request.prompt, limits, _ending_of(request, decode))
        self._beams: list[BeamState] = []
        self._steps: list[tuple[float, float]] = []  # the seconds of choosing, and of the device, for each token
        self._choosing_seconds = 0.0
        self._device_seconds = 0.0  # since the last token
        self._feeds: Feeds | None = None  # while the search runs
        self._on_end: Callable[[BeamRequest, FinishReason], None]

    def begin(self, feeds: Feeds, on_end: Callable[[BeamRequest, FinishReason], None]) -> None:
        """Begin the search with the client sequences of a core: run the prompt. ``on_end`` is told when it has ended."""
        self._feeds = feeds
        self._on_end = on_end
        self._beams = [feeds.open_beam(self.priority, self.request.conditions, self.request.owner)]
        self._beams[0].mask = self._first_mask
        self._feed(0, self.request.prompt)

    def end(self, reason: FinishReason, error: Exception | None = None) -> None:
        """End the search. Without an error, the best hypotheses so far are the answers. A second call does nothing."""
        if self._feeds is None:
            return
        found: list[Hypothesis] = []
        if error is None:
            self._search.end(reason)
            found = self._search.hypotheses()[: self.request.num_sequences]
        feeds = self._feeds
        self._feeds = None
        self._close_beams(feeds, found)
        for index, hypothesis in enumerate(found):
            self._report(index, hypothesis)
        is_whole = error is None and reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole and self.request.grammar is not None and len(found) < self.request.num_sequences:
            error = _too_few(len(found), self.request)
        self.finish_from(len(found), reason if error is None else FinishReason.ERROR, error)
        self._on_end(self, reason)

    @property
    def is_waiting(self) -> bool:
        """Whether the prompt, which the first beam runs, has not begun."""
        beams = self._beams
        return super().is_waiting and bool(beams) and beams[0].started is None

    def set_priority(self, priority: int) -> None:
        """Change the priority of the search and of its beams."""
        super().set_priority(priority)
        for state in self._beams:
            state.info.set_priority(priority)

    def give_up(self, feeds: Feeds, reason: FinishReason, error: Exception | None) -> None:
        """End the search without answers, in any state that an exception left, also one in the middle of its end."""
        self._feeds = None
        for state in self._beams:
            feeds.forget(state)
        self.finish_from(0, reason, error)

    def _feed(self, index: int, tokens: Sequence[int]) -> None:
        assert self._feeds is not None, "it has ended"
        order = FeedOrder(tuple(tokens), "last", partial(self._take, index), self.clock())
        self._feeds.feed(self._beams[index], order)

    def _take(self, index: int, result: FeedResult) -> None:
        """Choose the next beams, when the feeds of all have ended; this is one of them."""
        lead = self.sequences[0]
        if self._feeds is None:
            return
        if result.error is not None or result.logits is None or not result.is_finite:
            self.end(FinishReason.ERROR, result.error or _not_finite())
            return
        self._device_seconds = max(self._device_seconds, result.device_seconds)  # beams mostly share their calls
        lead.started = lead.started or self._beams[index].started
        if not lead.token_times:
            lead.kv.num_cached = self._beams[index].kv.num_cached
        lead.kv.num_recomputed = max(lead.kv.num_recomputed, self._beams[index].kv.num_recomputed)
        try:
            self._choose(self._feeds, index, result.logits[-1])
        except Exception as error:  # of this request alone; the others continue
            if isinstance(error, GrammarLimitError) and self._steps:
                self.end(FinishReason.LENGTH)
            else:
                self.end(FinishReason.ERROR, as_ours(error))

    def _choose(self, feeds: Feeds, index: int, logits: Logits) -> None:
        """Let the search know the logits ``[vocab]`` after a beam, and go on if they were the last ones of the step."""
        start = self.clock()
        self._search.take(index, logits, self._beams[index].mask)
        successors = self._search.advance() if self._search.is_complete else None
        now = self.clock()
        self._choosing_seconds += now - start
        if successors is None:
            return
        self.sequences[0].token_times.append(now)
        self._steps.append((self._choosing_seconds, self._device_seconds))
        self._choosing_seconds = 0.0
        self._device_seconds = 0.0
        if not successors:
            self.end(FinishReason.STOP)
            return
        self._continue(feeds, successors)
        for number, successor in enumerate(successors):
            if self._feeds is not None:  # else a feed before it failed at once
                self._feed(number, [successor.token])

    def _continue(self, feeds: Feeds, successors: Sequence[Successor]) -> None:
        """Give each new beam a sequence: its parent's for the first child, a fork for the others. Close what has no child."""
        before = self._beams
        taken = set[int]()
        beams = list[BeamState]()
        for successor in successors:
            parent = before[successor.parent]
            beams.append(feeds.fork(parent) if successor.parent in taken else parent)
            taken.add(successor.parent)
        for state, mask in zip(beams, _masks_after(before, successors), strict=True):
            state.mask = mask
        for index, state in enumerate(before):
            if index not in taken:
                feeds.close(state, is_reusable=False)
        self._beams = beams

    def _close_beams(self, feeds: Feeds, found: Sequence[Hypothesis]) -> None:
        """Close all beams. The one that begins most like the best answer stays cached: a conversation goes on with it."""
        prompt = list(self.request.prompt)
        answer = prompt + list(found[0].tokens) if found else prompt
        best = max(self._beams, key=lambda state: _num_equal(state.tokens, answer), default=None)
        for state in self._beams:
            feeds.close(state, is_reusable=state is best)
        self._beams = []

    def _report(self, index: int, hypothesis: Hypothesis) -> None:
        """Hand an answer to the reader: its tokens, with the moments at which tokens of their place were chosen."""
        lead = self.sequences[0]
        for place, (token, logprob) in enumerate(zip(hypothesis.tokens, hypothesis.logprobs, strict=True)):
            moment = lead.token_times[place]
            chosen, device = self._steps[place]
            self.queue.put(
                TokenOutput(
                    token, logprob, moment, chosen, index, device,
                    num_cached=lead.kv.num_cached, num_recomputed=lead.kv.num_recomputed,
                )
            )  # fmt: skip
        self._finish_one(index, partial(self.queue.put, Finished(self._reason_of(hypothesis), None, index)))

    def _reason_of(self, hypothesis: Hypothesis) -> FinishReason:
        """Return why an answer ended; one that fills its tokens may be whole by its grammar."""
        if hypothesis.reason is not FinishReason.LENGTH or self._first_mask is None:
            return hypothesis.reason
        mask = self._first_mask.clone()
        for token in hypothesis.tokens:
            mask.accept(token)
        return FinishReason.STOP if mask.is_whole else FinishReason.LENGTH


def _ending_of(request: EngineRequest, decode: Decode | None) -> Ending | None:
    """Return the function that finds the stop strings of a request; None if it has none."""
    if not request.stop_strings or decode is None:
        return None
    longest = max(len(text) for text in request.stop_strings)

    def has_ended(tokens: Sequence[int]) -> bool:
        count = longest + 1
        text = decode(list(tokens[-count:]))
        # a token may be a part of a character, or have no text at all
        while len(text) < longest + BROKEN and count < len(tokens):
            count *= 2
            text = decode(list(tokens[-count:]))
        return any(stop in text for stop in request.stop_strings)

    return has_ended


def _masks_after(before: Sequence[BeamState], successors: Sequence[Successor]) -> list[BeamMask | None]:
    """Return what may follow each new beam."""
    masks: list[BeamMask | None] = []
    for successor in successors:
        mask = before[successor.parent].mask
        masks.append(None if mask is None else mask.clone())
        if (new := masks[-1]) is not None:
            new.accept(successor.token)
    return masks


def _too_few(count: int, request: EngineRequest) -> GenerationConfigError:
    return GenerationConfigError(
        f"the beams found {count} answers of the grammar, num_return_sequences is {request.num_sequences}: lower it, or let the "
        f"grammar allow more answers of at least min_new_tokens={request.min_new_tokens}"
    )


def _num_equal(tokens: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first tokens that are equal."""
    return next(
        (i for i, (one, two) in enumerate(zip(tokens, other, strict=False)) if one != two), min(len(tokens), len(other))
    )


def _not_finite() -> NumericalError:
    return NumericalError(
        "a beam has logits that are not finite: try INFERENCE_PRECISION_HINT='f32' and KV_CACHE_PRECISION='f32'"
    )
