"""Puts decode steps between the blocks of a call in flight, as the policy decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

from ..programs.in_flight import Between, CallInFlight
from ..scheduling.interface import CallView, RequestStatus, RequestView, View
from .batch import Batch
from .serving import Serving


class AbandonedCallError(Exception):
    """A call in flight cannot go on, because all slots were lost between two of its blocks. Its requests run again."""


class InsertedStepError(Exception):
    """A step between two blocks has raised ``error``, which only a bug can do. It is no error of the call in flight."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self._errors = [error]

    def reraise(self) -> NoReturn:
        """Raise the error, and keep it no longer: it would be a cycle through all frames, which only the collector ends."""
        raise self._errors.pop()


class InsertedSteps:
    """The decode steps between the blocks of calls with prompts. No slot is moved, swapped or evicted for them.

    Runs on the engine's thread.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._seconds: dict[int, float] = {}  # device time of the ended calls of prompts that have begun

    def between(self, batch: Batch, run: Callable[[Batch], None]) -> Between | None:
        """Return what is to be called between two blocks of a batch, and calls ``run``; None if nothing may run there.

        Only prompts make way: a decode step would wait for another one as long as it takes itself.
        """
        return partial(self._run_due, batch, run) if batch.has_prompts and not batch.checks else None

    def count(self, batch: Batch, seconds: float) -> None:
        """Add the ``seconds`` that a batch took to the times of those of its prompts that go on."""
        before = {id: self._seconds.pop(id, 0.0) for id in (entry.state.id for entry in batch.entries)}
        prompts = [entry for entry in batch.entries if entry.is_prefill]
        rest = [each.state for each in prompts if len(each.segment.sequence) < len(each.state.tokens)]
        self._seconds |= {state.id: before[state.id] + seconds for state in rest}
        if len(self._seconds) > len(self._serving.device.table):  # some were ended meanwhile
            self._seconds = {
                id: known for id, known in self._seconds.items() if id in self._serving.device.kv_manager.states
            }

    def _run_due(self, batch: Batch, run: Callable[[Batch], None], flight: CallInFlight) -> None:
        """Run the decode step that the policy wants now, if it wants one. Called between two blocks of ``batch``.

        Raises:
            AbandonedCallError: the slots of the call in flight were lost.
            InsertedStepError: the step, or the choice of it, has raised.
        """
        try:
            if (inserted := self._due(batch, flight)) is not None:
                run(inserted)
        except Exception as error:
            raise InsertedStepError(error) from None
        if any(entry.state.kv.sequence is not entry.segment.sequence for entry in batch.entries):
            raise AbandonedCallError

    def _due(self, batch: Batch, flight: CallInFlight) -> Batch | None:
        """Return the step that runs now; None for none."""
        now = self._serving.clock()
        runner = self._serving.device.runner
        steps = runner.insertable()
        if not steps or self._serving.device.quarantine.has_suspects:
            return None
        is_proactive = all(entry.state.info.is_proactive for entry in batch.entries if entry.is_prefill)
        running = self._first_class(self._running(batch, now), is_proactive)
        if not running:
            return None
        prompt = min(
            (entry.state for entry in batch.entries if entry.is_prefill), key=lambda state: state.started or now
        )
        call = CallView(
            variant=flight.variant,
            seconds=runner.costs(flight.variant),
            num_blocks=flight.num_blocks,
            num_done=flight.num_done,
            num_inserted=flight.num_inserted,
            steps=steps,
            prompt_start=prompt.started or now,
            prompt_seconds=self._seconds.get(prompt.id, 0.0) + flight.seconds,
            is_proactive=is_proactive,
        )
        plan = self._serving.planner.between_blocks(self._view(batch, running), call)
        return None if plan is None else self._serving.device.batches.inserted(plan)

    def _running(self, batch: Batch, now: float) -> set[int]:
        """Return the running requests outside the batch that can decode now: they neither end nor move their slots."""
        inside = {entry.state.id for entry in batch.entries}
        states = self._serving.device.kv_manager.states
        limit = self._serving.device.options.max_seq_len
        ids = [id for id in self._serving.device.table.ids(RequestStatus.RUNNING) if id not in inside]
        return {
            id
            for id in ids
            if states[id].kv.sequence is not None
            and len(states[id].tokens) < limit
            and states[id].finish_reason_at(now) is None
        }

    def _first_class(self, running: set[int], is_proactive: bool) -> set[int]:
        """Return those of the running requests that may decode: no proactive one before reactive prompts or requests."""
        states = self._serving.device.kv_manager.states
        reactive = {id for id in running if not states[id].info.is_proactive}
        return reactive if reactive or not is_proactive else running

    def _view(self, batch: Batch, running: set[int]) -> View:
        """Return the view without the requests of the batch, in which only the requests in ``running`` run."""
        inside = {entry.state.id for entry in batch.entries}
        view = self._serving.view()

        def outside(requests: tuple[RequestView, ...]) -> tuple[RequestView, ...]:
            return tuple(request for request in requests if request.id not in inside)

        return replace(
            view,
            waiting=outside(view.waiting),
            prefilling=outside(view.prefilling),
            running=tuple(request for request in view.running if request.id in running),
            swapped=outside(view.swapped),
            free_slots=self._serving.device.runner.insertable_slots,
            jobs=(),
            idle=(),
        )
