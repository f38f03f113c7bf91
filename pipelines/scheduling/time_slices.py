"""Shares the places of running requests among more requests in time slices, so that no answer pauses for long."""

from __future__ import annotations

from collections.abc import Iterable

from .interface import RequestStatus, RequestView, View
from .plans import in_order, to_swap_in

WAIT_SHARE = 0.6
"""Share of ``gap_ms`` that a swapped request waits for a place; the rest is for prompts that run meanwhile."""
SWAP_SHARE = 0.01
"""Target share of time for swaps; prompts that would exceed it are held back."""
MAX_SWAP_SHARE = 3 * SWAP_SHARE
"""Tolerated share: requests that have begun grow, and their swaps with them."""

SLICE_PROMPTS = 2
"""Least length of a slice, in calls with the waiting prompt."""
SAMPLE = 16
"""Swapped requests whose mean length counts; there may be hundreds."""
MIN_SECONDS = 1e-9
"""Lower bound of divisors."""


def by_wait(requests: Iterable[RequestView]) -> list[RequestView]:
    """Return swapped requests in the order in which they run again: by priority, then the longest without a token first."""
    return sorted(requests, key=lambda request: (-request.priority, request.last_token_time or 0.0, request.id))


class TimeSlices:
    """Decides which running request gives its place to which swapped one, and when.

    With m swapped requests, one request is swapped every ``gap / m`` seconds, so that each of them waits ``gap`` seconds (a
    share of ``view.gap_ms``). The request that has run longest gives its place to the request that has waited longest. Swaps
    cost time, so ``num_startable`` delays prompts whose requests could not get a place in time with ``SWAP_SHARE`` of the time
    for swaps.
    """

    def __init__(self) -> None:
        self._due = float("inf")  # an interval after this moment, on the clock of the view, a place changes hands
        self._began: dict[int, float] = {}  # running request -> the moment since which it has had its place

    def exchange(self, view: View) -> tuple[list[RequestView], list[RequestView]]:
        """Return the running requests that are swapped out now, and as many swapped ones that are swapped in; usually none."""
        self._began = {request.id: self._began.get(request.id, view.now) for request in view.running}
        if not view.swapped or _free_places(view) or view.gap_ms is None or self._due > view.now:
            self._due = view.now
            return [], []
        interval = self._interval(view)
        count = int((view.now - self._due) / interval)
        if count < 1:
            return [], []
        gone, come = self._pairs(view, count)
        self._due = max(self._due + count * interval, view.now - len(view.running) * interval) if come else view.now
        return gone, come

    def num_startable(self, view: View) -> float:
        """Return the number of prompts that may begin: afterwards each request can still have a token within ``gap_ms``.

        The prompts are counted by priority, then by arrival. Those of a higher priority do not wait for swapped requests of a
        lower one. A slice is at least ``SLICE_PROMPTS`` times as long as the longest of these prompts, because a prompt that
        does not fit into it runs in chunks, which costs more.
        """
        if view.gap_ms is None or not view.waiting:
            return float("inf")
        free = _free_places(view)
        swap_seconds = _swap_seconds(view) / SWAP_SHARE
        begun = [request for request in (*view.swapped, *view.prefilling) if not request.is_client_driven]
        room = free + _swappable(view) - len(begun)
        count = 0
        longest = 0.0
        for prompt in in_order(view.waiting):
            longest = max(longest, _prompt_seconds(view, prompt))
            seconds = max(swap_seconds, SLICE_PROMPTS * longest / view.max_num_seqs, MIN_SECONDS)
            others = sum(r.status == RequestStatus.PREFILLING or r.priority >= prompt.priority for r in begun)
            if count >= min(free + int(WAIT_SHARE * view.gap_ms / 1e3 / seconds) - others, room):
                break
            count += 1
        return count

    def slice_seconds(self, view: View) -> float:
        """Return the seconds for which a request keeps its place; prompts may not delay decoding for longer."""
        if view.gap_ms is None or not view.swapped:
            return float("inf")
        return self._interval(view) * view.max_num_seqs

    def _interval(self, view: View) -> float:
        """Return the seconds between two changes of places."""
        assert view.gap_ms is not None
        wait = WAIT_SHARE * view.gap_ms / 1e3
        return max(wait / len(view.swapped), _swap_seconds(view) / MAX_SWAP_SHARE, MIN_SECONDS)

    def _pairs(self, view: View, count: int) -> tuple[list[RequestView], list[RequestView]]:
        """Return at most ``count`` requests to swap out, the longest running first, and those to swap in for them.

        A request never gives its place to one of lower priority, and both pools have room for what is moved.
        """
        gone = list[RequestView]()
        come = list[RequestView]()
        running = sorted(view.running, key=lambda request: (request.priority, self._began[request.id], request.id))
        room = view.free_slots - len(view.running)
        host_room = view.free_host_slots
        for old, new in zip(running[:count], by_wait(view.swapped), strict=False):
            host_room -= old.num_computed
            room += old.own_slots - (0 if new.in_arena else new.num_computed)
            if old.priority > new.priority or host_room < 0 or room < 0:
                break
            gone.append(old)
            come.append(new)
        return gone, come


def _swappable(view: View) -> float:
    """Return the number of requests that the host pool can hold at the length of the longest running one, less that one.

    If prompts filled it, no running request could be swapped out any more.
    """
    length = max((request.num_computed for request in view.running), default=0)
    num_slots = view.free_host_slots + sum(request.num_computed for request in view.swapped if not request.in_arena)
    return max(num_slots // max(length, 1) - 1, 0)


def _free_places(view: View) -> int:
    """Return the number of further requests that may be running; 0 if the free KV slots do not suffice for a swapped one."""
    if not view.free_seqs or (view.swapped and not to_swap_in(view, by_wait)):
        return 0
    return view.free_seqs


def _swap_seconds(view: View) -> float:
    """Return the seconds that it takes to swap one request of mean length out and another one in."""
    requests = (*view.running, *view.swapped[:SAMPLE])
    if not requests:
        return 0.0
    return 2 * view.device.swap_seconds * sum(request.num_computed for request in requests) / len(requests)


def _prompt_seconds(view: View, prompt: RequestView) -> float:
    """Return the seconds of a call with this prompt, or with as much of it as one call holds."""
    rows = min(prompt.num_left, max(view.device.index.widest))
    variant = view.device.call(rows, 1, is_fresh=True) or view.device.call(rows)
    return view.device.seconds(variant) if variant else 0.0
