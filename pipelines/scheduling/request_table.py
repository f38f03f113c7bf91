"""The request table holds every request of an engine and its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .interface import OWN_BOUND, Device, RequestStatus, RequestView, TokenBound, View

WAITING, PREFILLING = RequestStatus.WAITING, RequestStatus.PREFILLING
RUNNING, SWAPPED = RequestStatus.RUNNING, RequestStatus.SWAPPED

_Counts = Counter[tuple[RequestStatus, bool, bool]]
"""Requests by status, ``is_client_driven`` and ``is_proactive``."""

TRANSITIONS: dict[RequestStatus, tuple[RequestStatus, ...]] = {
    WAITING: (WAITING, PREFILLING),
    PREFILLING: (WAITING, PREFILLING, RUNNING, SWAPPED),
    RUNNING: (WAITING, PREFILLING, SWAPPED),
    SWAPPED: (WAITING, PREFILLING, RUNNING),
}
"""Legal successors of each status. Any request may be preempted and waits again; a shortened conversation prefills again."""


class RequestInfo:
    """One answer of a request in the table. Only its methods change it; ``view`` is the form that a policy receives.

    ``num_tokens`` must run before the next token can be chosen, and ``num_computed`` of them have keys and values. ``own_slots``
    counts the arena slots that would be free without the request; ``in_arena`` is False if its slots are in the host pool. The
    KV cache manager updates both. ``is_client_driven`` is as in ``RequestView``.
    """

    def __init__(
        self,
        id: int,
        arrival: float,
        num_tokens: int,
        priority: int = 0,
        deadline: float | None = None,
        is_client_driven: bool = False,
    ) -> None:
        self._view: RequestView | None = None
        self.is_client_driven = is_client_driven
        self.id = id
        self.arrival = arrival
        self.priority = priority
        self.deadline = deadline
        self._status = WAITING
        self._counts: _Counts | None = None  # of the table that it is in
        self.num_tokens = num_tokens
        self.num_computed = 0
        self.own_slots = 0
        self.num_generated = 0
        self.last_token_time: float | None = None
        self.in_arena = True

    @property
    def view(self) -> RequestView:
        """The request as a policy receives it; the same object until the request changes."""
        if self._view is None:
            self._view = RequestView(
                id=self.id,
                status=self.status,
                arrival=self.arrival,
                num_tokens=self.num_tokens,
                num_computed=self.num_computed,
                own_slots=self.own_slots,
                num_generated=self.num_generated,
                last_token_time=self.last_token_time,
                priority=self.priority,
                deadline=self.deadline,
                in_arena=self.in_arena,
                is_client_driven=self.is_client_driven,
            )
        return self._view

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        if self._counts is not None:
            is_proactive = self.priority < 0
            self._counts[self._status, self.is_client_driven, is_proactive] -= 1
            self._counts[status, self.is_client_driven, is_proactive] += 1
        self._status = status

    @property
    def is_proactive(self) -> bool:
        """Whether nobody waits for it, as in ``RequestView``."""
        return self.priority < 0

    def enter(self, counts: _Counts) -> None:
        """Record that the request is in a table, whose ``counts`` it keeps."""
        self._counts = counts
        counts[self._status, self.is_client_driven, self.is_proactive] += 1

    def leave(self) -> None:
        """Record that the request is in no table."""
        if self._counts is not None:
            self._counts[self._status, self.is_client_driven, self.is_proactive] -= 1
        self._counts = None

    def set_priority(self, priority: int) -> None:
        """Change the priority, and with it perhaps the class."""
        counts = self._counts
        self.leave()
        self.priority = priority
        self._view = None
        if counts is not None:
            self.enter(counts)

    def come_back(self, num_computed: int, now: float, can_run: bool) -> None:
        """Record that a client request came back with new tokens; ``num_computed`` tokens have slots of the arena.

        With one token to run it is running if ``can_run``, else swapped; with more it is prefilling.
        """
        if num_computed:
            is_single = self.num_tokens - num_computed == 1
            self._move_to(PREFILLING)
            self.num_computed = num_computed
            self.own_slots = num_computed
            self.num_generated = int(is_single)
            self.last_token_time = now if is_single else None
            if is_single:
                self._move_to(RUNNING if can_run else SWAPPED)

    def arrive_swapped(self, num_computed: int, num_generated: int, last_token_time: float) -> None:
        """Record that the request was prefilled on another device and that its slots are in the host pool."""
        self.status = SWAPPED
        self.in_arena = False
        self.num_tokens = num_computed + 1
        self.num_computed = num_computed
        self.num_generated = num_generated
        self.last_token_time = last_token_time
        self._view = None

    def begin(self, num_computed: int) -> None:
        """Record that the request has a sequence in the arena, with ``num_computed`` tokens of a cached prefix."""
        self._move_to(PREFILLING if num_computed else WAITING)
        self.num_computed = num_computed

    def add_computed(self, count: int) -> bool:
        """Record that ``count`` more tokens have keys and values. Return whether the next token can be chosen now."""
        self._move_to(PREFILLING if self.status is WAITING else self.status)
        self.num_computed += count
        self.own_slots += count if self.in_arena else 0
        return self.num_computed == self.num_tokens

    def add_token(self, now: float, can_run: bool) -> None:
        """Record a chosen token. A request whose prompt has just ended is running if ``can_run``, else it is swapped."""
        if self.status is PREFILLING:
            self._move_to(RUNNING if can_run and self.in_arena else SWAPPED)
        self.num_tokens += 1
        self.num_generated += 1
        self.last_token_time = now
        self._view = None

    def swap_out(self) -> None:
        """Record that the request is swapped; its slots stay in the arena until ``leave_arena``."""
        self._move_to(SWAPPED)

    def leave_arena(self) -> None:
        """Record that the request's slots were copied to the host pool."""
        self.in_arena = False
        self.own_slots = 0
        self._view = None

    def swap_in(self, own_slots: int | None = None) -> None:
        """Record that the request is running again; ``own_slots`` is given if slots were copied back into the arena."""
        self._move_to(RUNNING)
        self.in_arena = True
        self.set_own_slots(self.own_slots if own_slots is None else own_slots)

    def preempt(self, num_tokens: int | None = None) -> None:
        """Record that the request lost its slots; all its tokens run again, or the ``num_tokens`` that were kept."""
        self._move_to(WAITING)
        self.num_tokens = self.num_tokens if num_tokens is None else num_tokens
        self.num_computed = 0
        self.own_slots = 0
        self.in_arena = True

    def restart(self, num_tokens: int, num_computed: int) -> None:
        """Record that the conversation was shortened to ``num_tokens``, of which the first ``num_computed`` have slots."""
        self._move_to(PREFILLING)
        self.num_tokens = num_tokens
        self.num_computed = num_computed
        self.own_slots = num_computed
        self.in_arena = True

    def set_own_slots(self, own_slots: int) -> None:
        """Set the number of arena slots that would be free without the request."""
        if own_slots != self.own_slots:
            self.own_slots = own_slots
            self._view = None

    def _move_to(self, status: RequestStatus) -> None:
        assert status is self.status or status in TRANSITIONS[self.status], f"{self.status} -> {status}"
        self.status = status
        self._view = None


@dataclass(frozen=True)
class Limits:
    """The largest number of running requests, and the targets for TTFT, TPOT and gaps in ms; None without a target."""

    max_num_seqs: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    token_bound: TokenBound = OWN_BOUND
    """The bound on the time between two tokens, for the policy, for jobs and for the turns of other programs."""


class RequestTable:
    """The requests and their status in the order of arrival. The table itself moves no slots and calls no device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._infos: dict[int, RequestInfo] = {}
        self._counts: _Counts = Counter()

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[RequestInfo]:
        return iter(self._infos.values())

    def __getitem__(self, request: int) -> RequestInfo:
        return self._infos[request]

    def add(self, info: RequestInfo) -> None:
        self._infos[info.id] = info
        info.enter(self._counts)

    def remove(self, request: int) -> None:
        self._infos.pop(request).leave()

    def clear(self) -> None:
        for info in self._infos.values():
            info.leave()
        self._infos.clear()

    def count(self, status: RequestStatus) -> int:
        """Return the number of requests with this status."""
        return self._num(status, False) + self._num(status, True)

    def _num(self, status: RequestStatus, is_client_driven: bool) -> int:
        return self._counts[status, is_client_driven, False] + self._counts[status, is_client_driven, True]

    def are_running(self, requests: tuple[int, ...]) -> bool:
        """Return whether all of these requests are in the table and running."""
        infos = map(self._infos.get, requests)
        return all(info is not None and info.status is RUNNING for info in infos)

    def ids(self, status: RequestStatus) -> tuple[int, ...]:
        """Return the ids of the requests with this status, in the order of arrival."""
        return tuple(info.id for info in self._infos.values() if info.status is status)

    def view(self, now: float, free_slots: int, free_host_slots: int, device: Device) -> View:
        """Return the view for a policy at the moment ``now`` (seconds)."""
        groups: dict[RequestStatus, list[RequestView]] = {status: [] for status in RequestStatus}
        for info in self._infos.values():
            groups[info.status].append(info.view)
        return View(
            now=now,
            waiting=tuple(groups[WAITING]),
            prefilling=tuple(groups[PREFILLING]),
            running=tuple(groups[RUNNING]),
            swapped=tuple(groups[SWAPPED]),
            max_num_seqs=self.limits.max_num_seqs,
            free_slots=free_slots,
            free_host_slots=free_host_slots,
            device=device,
            ttft_ms=self.limits.ttft_ms,
            tpot_ms=self.limits.tpot_ms,
            gap_ms=self.limits.gap_ms,
            token_bound=self.limits.token_bound,
        )

    @property
    def has_free_seq(self) -> bool:
        """Whether a request whose prompt ends now may be running: there is a free place, and clients drive all that are swapped.

        The last place is left to client requests, if there are any.
        """
        own = self._num(RUNNING, False)
        num_driven = self._num(RUNNING, True) + self._num(SWAPPED, True)
        is_last_shared = own + 1 >= self.limits.max_num_seqs and num_driven > 0
        return not is_last_shared and self.count(RUNNING) < self.limits.max_num_seqs and not self._num(SWAPPED, False)

    @property
    def has_reactive_seq(self) -> bool:
        """The same for a reactive request if no proactive ones were there: these give their places up in the next plan."""
        counts = self._counts
        own = counts[RUNNING, False, False]
        num_driven = counts[RUNNING, True, False]
        is_last_shared = own + 1 >= self.limits.max_num_seqs and num_driven + counts[SWAPPED, True, False] > 0
        return not is_last_shared and own + num_driven < self.limits.max_num_seqs and not counts[SWAPPED, False, False]

    @property
    def num_free_for_clients(self) -> int:
        """The number of client requests that may be running when they come back with one token.

        The others are swapped until a plan gives them places, without a copy of their slots. So a place is free for each prompt
        that ends in the same call.
        """
        if self.count(SWAPPED):
            return 0
        prompts = self._num(WAITING, False) + self._num(PREFILLING, False)
        return max(0, self.limits.max_num_seqs - self.count(RUNNING) - prompts)

    def add_token(self, request: int, now: float) -> None:
        """Record a chosen token. A request whose prompt has just ended is running if there is a free place, else swapped.

        A reactive request does not wait behind proactive ones that are swapped.
        """
        info = self._infos[request]
        info.add_token(now, info.status is PREFILLING and self._has_place(info))

    def _has_place(self, info: RequestInfo) -> bool:
        if info.is_proactive:
            return self.has_free_seq
        return self.has_reactive_seq and self.count(RUNNING) < self.limits.max_num_seqs
