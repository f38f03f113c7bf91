"""Simulates one device: the engine's step with a clock in place of the programs; only answers of one request share a prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.profiling.records import JobRecord, StepRecord
from staticllm.pipelines.programs.cost_model import CostModel
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Device, JobView, Plan, Policy, RequestStatus, View
from staticllm.pipelines.scheduling.planner import Planner
from staticllm.pipelines.scheduling.request_table import Limits, RequestInfo, RequestTable
from staticllm.pipelines.simulator.away_requests import AwayRequests
from staticllm.pipelines.simulator.cost_model import Cost, HostCost
from staticllm.pipelines.simulator.drafting import Drafting
from staticllm.pipelines.simulator.sibling_groups import SiblingGroup
from staticllm.pipelines.simulator.simulated_request import ScheduledRows, SimulatedRequest

JOBS = 1
"""The number of the source of jobs; a device has one at most."""


@dataclass(frozen=True)
class BulkJobs:
    """Calls of another model, such as packed documents, of which one always waits until the moment ``end``.

    ``seconds`` is the duration of one call; calls are shorter if the device's policy asks for it, at no cost.
    """

    seconds: float
    end: float


@dataclass(frozen=True)
class DeviceModel:
    """The programs, costs and KV slots of a device.

    ``kv_slots`` is the size of the arena, ``host_kv_slots`` that of the host pool, and ``max_seq_len`` the largest number of
    slots of one sequence. The policy sees the exact costs; with ``known`` it begins with these measurements and updates them.
    ``jobs`` are calls of another model on the same device.
    ``lingers``: whether the device waits for away requests that are due. ``drafting``: drafts of the next tokens, None without.
    """

    index: VariantIndex
    cost: Cost
    limits: Limits
    kv_slots: int
    host_kv_slots: int
    max_seq_len: int
    host: HostCost = field(default_factory=HostCost)
    known: Mapping[Variant, float] | None = None
    jobs: BulkJobs | None = None
    lingers: bool = True
    drafting: Drafting | None = None


class SimulatedDevice:
    """A device on a virtual clock: ``begin`` starts a call and returns its end, and ``finish`` must be called at that moment."""

    def __init__(self, model: DeviceModel, policy: Policy) -> None:
        self.model = model
        self.planner = Planner(policy, model.lingers)
        self.steps: list[StepRecord] = []
        self.jobs: list[JobRecord] = []
        self.table = RequestTable(model.limits)
        self.slots_used = self.host_slots_used = 0
        self._learned = None if model.known is None else CostModel(model.known)
        self._requests: dict[int, SimulatedRequest] = {}
        self._inbox: deque[SimulatedRequest] = deque()
        self._parts: list[ScheduledRows] = []
        self._runs_job = False
        self._away = AwayRequests()
        self._wait_until: float | None = None
        self._idle_since = float("-inf")
        self._rng = np.random.default_rng(0)
        self._num_siblings = 0
        self._groups: list[SiblingGroup] = []
        self._draft_seconds = 0.0  # of the draft model, before the call
        self._num_swapped = 0  # KV slots copied between arena and host pool since the last call began

    @property
    def num_requests(self) -> int:
        """The number of requests that have not left the device."""
        return len(self._requests) + len(self._inbox)

    @property
    def is_running(self) -> bool:
        """Whether a call has begun and not finished."""
        return bool(self._parts) or self._runs_job

    def submit(self, request: SimulatedRequest) -> None:
        """Add a request, which the next plan can use.

        Raises:
            ConfigError: it needs more KV slots than a sequence or the host pool can have.
        """
        needed = request.num_tokens
        if needed > self.model.max_seq_len:
            raise ConfigError(
                f"a prompt of {needed} tokens: a sequence can have {self.model.max_seq_len} KV slots; raise them"
            )
        if request.has_slots and needed > self.model.host_kv_slots:
            raise ConfigError(
                f"{needed} KV slots arrive at once, HOST_KV_SLOTS is {self.model.host_kv_slots}: raise it"
            )
        self._inbox.append(request)

    def begin(self, now: float) -> float | None:
        """Start a call at the moment ``now``. Return the moment of its end; None if there is nothing to do before ``wake_at``."""
        self._admit()
        self._wait_until = None
        for away in self._away.back_at(now):
            self.table.add(away.came_back(now, self.table.num_free_for_fed > 0))
        self._release_beams(now)
        model = self.model
        bulk = model.jobs if model.jobs is not None and now < model.jobs.end else None
        if not len(self.table) and bulk is None:
            return None
        free = model.kv_slots - self.slots_used + self._away.num_slots
        free += sum(group.num_evictable for group in self._groups)
        free_host_slots = model.host_kv_slots - self.host_slots_used
        device = Device(model.index, self._learned or model.cost, self.slots_used, swap_seconds=model.host.swap)
        view = self.table.view(now, free, free_host_slots, device)
        if bulk is not None:
            view = replace(view, jobs=(JobView(JOBS, min(bulk.seconds, self.planner.longest_job(view)), 0.0),))
        plan = self.planner.plan(replace(view, away=self._away.views))
        if plan.wait_until is not None:
            self._wait_until = plan.wait_until
            return None
        if plan.job is not None:
            return self._begin_job(now, view.jobs[0].seconds)
        self._parts = self._with_drafts(self._fitting(self._prepare(plan)))
        variant = self._variant(self._parts)
        assert variant is not None
        num_rows = sum(part.num_rows for part in self._parts)
        was_idle = now > self._idle_since
        lead = model.host.wake if was_idle and model.host.wake is not None else model.host(num_rows, len(self._parts))
        start = now + lead + self._num_swapped * model.host.swap + self._draft_seconds
        seconds = model.cost(variant)
        self._num_swapped = 0
        for part in self._parts:
            request = self._requests[part.request_id]
            request.started = start if request.started is None else request.started
        if self._learned is not None:
            self._learned.update(variant, seconds)
        self._record(start, seconds, variant, view, plan.preempt)
        return start + seconds

    def wake_at(self, now: float) -> float | None:
        """Return the moment of the next ``begin`` if nothing arrives before; None if only an arrival can be a reason for one."""
        moments = [self._away.next_back, self._wait_until]
        return min((max(moment, now) for moment in moments if moment is not None), default=None)

    def _begin_job(self, now: float, seconds: float) -> float:
        self._runs_job = True
        self.jobs.append(JobRecord(now, seconds, JOBS, 1))
        return now + seconds

    def finish(self, now: float) -> list[SimulatedRequest]:
        """End the call at the moment ``now``: count its slots and add its tokens. Return the requests that leave the device."""
        parts, self._parts, self._idle_since = self._parts, [], now
        self._runs_job = False
        out = now + self.model.host.answer
        gone: list[SimulatedRequest] = []
        for part in parts:
            counts = [part.num_rows] if part.is_prefill else [1] * part.num_kept
            for count in counts:
                self.slots_used += count
                if not self.table[part.request_id].add_computed(count):
                    continue
                ended = self._add_token(self._requests[part.request_id], out)
                gone += ended
                if any(request.arrival.id == part.request_id for request in ended):
                    break
        return gone

    def _add_token(self, request: SimulatedRequest, out: float) -> list[SimulatedRequest]:
        """Add a token that appears at the moment ``out``; after a prompt, one of each answer. Return the requests that end."""
        siblings = self._fork(request) if request.arrival.num_answers > 1 and request.group is None else []
        gone = []
        for each in (request, *siblings):
            each.token_times.append(out)
            if each.is_over or each.num_tokens > self.model.max_seq_len:
                self._end(each)
                gone.append(each)
            elif each.group is not None and each.group.are_beams:
                each.group.wait(self.table[each.arrival.id])
                self.table.remove(each.arrival.id)
            elif each.arrival.think is None:
                self._chose(each.arrival.id, out)
            else:
                self._away.add(self.table[each.arrival.id], each.arrival.think, out)
                self.table.remove(each.arrival.id)
        return gone

    def _fork(self, request: SimulatedRequest) -> list[SimulatedRequest]:
        """Return the other answers of a request whose prompt has run, or its other beams; they share the prompt's slots."""
        info, arrival = self.table[request.arrival.id], request.arrival
        group = request.group = SiblingGroup(info.num_computed, arrival.are_beams)
        group.share(info)
        self._groups.append(group)
        siblings = []
        for _ in range(1, arrival.num_answers):
            self._num_siblings += 1
            id = -self._num_siblings  # no arrival has it
            sibling = replace(request, arrival=replace(arrival, id=id), token_times=list(request.token_times))
            other = RequestInfo(id, arrival.time, info.num_tokens, arrival.priority, is_fed=arrival.are_beams)
            other.begin(info.num_computed)
            group.share(other)
            self._requests[id] = sibling
            self.table.add(other)
            siblings.append(sibling)
        return siblings

    def _release_beams(self, now: float) -> None:
        """Let the beams of each search that have all run go on together."""
        for group in self._groups:
            if group.is_complete:
                for info in group.release(now, self.table.num_free_for_fed):
                    self.table.add(info)

    def _with_drafts(self, parts: list[ScheduledRows]) -> list[ScheduledRows]:
        """Add drafted tokens to the rows that decode, if that promises more tokens per second."""
        drafting, self._draft_seconds = self.model.drafting, 0.0
        decoding = [part for part in parts if not part.is_prefill and self._requests[part.request_id].group is None]
        if drafting is None or not decoding or any(self._requests[p.request_id].arrival.think for p in decoding):
            return parts
        requests = [self._requests[part.request_id] for part in decoding]
        left = min(min(r.limit - len(r.token_times) - 1, self.model.max_seq_len - r.num_tokens) for r in requests)
        rows = sum(part.num_rows for part in parts)
        free = self.model.kv_slots - self.slots_used - rows

        def cost_of(count: int) -> float | None:
            more = count * len(decoding)
            variant = self._variant(parts) if not more else None
            if more and more <= free:
                variant = self.model.index.smallest(rows + more, len(parts) + more, self.slots_used)
            return None if variant is None else self.model.cost(variant)

        count = drafting.choose(len(decoding), max(left, 0), cost_of)
        self._draft_seconds = count * drafting.seconds
        drafted = {part.request_id for part in decoding}
        return [
            replace(p, num_rows=1 + count, num_drafted=count, num_accepted=drafting.draw(count, self._rng))
            if count and p.request_id in drafted
            else p
            for p in parts
        ]

    def _chose(self, request_id: int, now: float) -> None:
        self.table.add_token(request_id, now)
        if self.table[request_id].status is RequestStatus.SWAPPED:
            self._offload(request_id)

    def _admit(self) -> None:
        """Admit submitted requests. One that brings slots waits until the host pool has room for them."""
        while self._inbox:
            request = self._inbox[0]
            num_slots = request.num_tokens - 1 if request.has_slots else 0
            if num_slots > self.model.host_kv_slots - self.host_slots_used:
                return
            self._inbox.popleft()
            arrival = request.arrival
            is_fed = arrival.are_beams or arrival.think is not None
            info = RequestInfo(arrival.id, arrival.time, request.num_tokens, arrival.priority, is_fed=is_fed)
            if request.has_slots:
                info.arrive_swapped(num_slots, len(request.token_times), request.token_times[-1])
                self.host_slots_used += num_slots
            self._requests[arrival.id] = request
            self.table.add(info)

    def _prepare(self, plan: Plan) -> list[ScheduledRows]:
        """Preempt, swap out and swap in as planned, and return the parts of the call, as the engine does."""
        for request_id in plan.preempt:
            self._preempt(request_id)
        for request_id in plan.swap_out:
            self.table[request_id].swap_out()
            self._offload(request_id)
        for request_id in plan.swap_in:
            self._swap_in(request_id)
        decode = [ScheduledRows(request_id, 1, False) for request_id in plan.decode]
        return [*decode, *(ScheduledRows(request_id, count, True) for request_id, count in plan.prefill)]

    def _fitting(self, parts: list[ScheduledRows]) -> list[ScheduledRows]:
        """Return the head of ``parts`` that has slots and a program; slots that were swapped in may need a larger program."""
        needed = sum(part.num_rows for part in parts)
        while needed > self.model.kv_slots - self.slots_used and self._away.num_slots:
            self.slots_used -= self._away.evict_oldest()
        while len(parts) > 1 and not self._fits(parts):
            parts.pop()
        while not self._fits(parts):
            keep = parts[0].request_id
            if self._evict_waiting():
                continue
            victims = [info.id for info in self.table if info.own_slots and info.in_arena and info.id != keep]
            assert victims, "a plan without slots, and no request to take them from"
            self._preempt(victims[-1])
        return parts

    def _evict_waiting(self) -> bool:
        """Take the slots of beams that wait for others. Return whether there were any."""
        for group in self._groups:
            if group.num_evictable:
                self.slots_used -= group.evict()
                return True
        return False

    def _fits(self, parts: list[ScheduledRows]) -> bool:
        num_rows = sum(part.num_rows for part in parts)
        return num_rows <= self.model.kv_slots - self.slots_used and self._variant(parts) is not None

    def _variant(self, parts: list[ScheduledRows]) -> Variant | None:
        is_fresh = not any(self.table[part.request_id].num_computed for part in parts)
        num_rows, num_logits = (
            sum(part.num_rows for part in parts),
            len(parts) + sum(part.num_drafted for part in parts),
        )
        return self.model.index.smallest(num_rows, num_logits, self.slots_used, is_fresh)

    def _freed(self, info: RequestInfo) -> int:
        """Return how many arena slots become free without a request; those of a shared prompt stay."""
        group = self._requests[info.id].group
        return info.own_slots if group is None else group.leave(info)

    def _preempt(self, request_id: int) -> None:
        self._release(request_id)
        self.table[request_id].preempt()

    def _offload(self, request_id: int) -> None:
        """Move the slots of a swapped request to the host pool; without room there they stay in the arena."""
        info = self.table[request_id]
        if info.num_computed <= self.model.host_kv_slots - self.host_slots_used:
            self._num_swapped += info.num_computed
            self.host_slots_used += info.num_computed
            self.slots_used -= self._freed(info)
            info.leave_arena()

    def _swap_in(self, request_id: int) -> None:
        info = self.table[request_id]
        if info.in_arena:
            info.swap_in()
            return
        info.swap_in(info.num_computed)
        self._num_swapped += info.num_computed
        self.host_slots_used -= info.num_computed
        self.slots_used += info.num_computed

    def _end(self, request: SimulatedRequest) -> None:
        self._release(request.arrival.id)
        self.table.remove(request.arrival.id)
        del self._requests[request.arrival.id]
        if request.group is not None:
            request.group.members.discard(request.arrival.id)
            self._groups = [group for group in self._groups if group.members]

    def _release(self, request_id: int) -> None:
        info = self.table[request_id]
        if info.in_arena:
            self.slots_used -= self._freed(info)
        else:
            self.host_slots_used -= info.num_computed

    def _record(self, start: float, seconds: float, variant: Variant, view: View, preempted: tuple[int, ...]) -> None:
        decode = tuple(part.request_id for part in self._parts if not part.is_prefill)
        prefill = tuple((part.request_id, part.num_rows) for part in self._parts if part.is_prefill)
        num_slots = self.slots_used + sum(part.num_kept for part in self._parts)
        drafts = tuple((p.request_id, p.num_drafted, p.num_accepted) for p in self._parts if p.num_drafted)
        self.steps.append(
            StepRecord(
                start,
                seconds,
                variant,
                decode,
                prefill,
                num_slots,
                len(view.waiting),
                len(view.swapped),
                preempted=preempted,
                drafts=drafts,
                draft_seconds=self._draft_seconds,
            )
        )
