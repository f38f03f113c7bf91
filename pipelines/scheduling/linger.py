"""Decides when the device waits a moment for tokens that a client is about to send, so that they share the next call."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import View

MAX_LINGER_SHARE = 0.2
"""The longest wait before one call, as a share of the time of that call."""


class Linger:
    """Lets the device wait for away requests that are due, if that saves more device time than the running requests lose.

    A step of k + n requests takes less time than a step of k and one of n. The difference is what a wait of w seconds saves if n
    requests come back within it; it costs k · w, because k running requests get their tokens later. FlexNPU (3.2) calls it
    a brief delay for coordination. Without it, two clients that choose their tokens themselves never share a call.

    The device does not wait while prompts, swapped requests or jobs could use it.
    """

    def __init__(self) -> None:
        self._start: float | None = None  # of the wait before the next call, on the clock of the view

    def until(self, view: View) -> float | None:
        """Return the moment until which the device waits; None if the next call should run now."""
        moment = self._best_moment(view)
        if moment is None:
            self._start = None
        elif self._start is None:
            self._start = view.now
        return moment

    def _best_moment(self, view: View) -> float | None:
        num_running = len(view.running)
        if not view.away or not num_running or view.waiting or view.prefilling or view.swapped or view.jobs:
            return None
        room = min(view.free_seqs, view.device.max_decoding - num_running)
        step = _seconds(view, num_running)
        end = (view.now if self._start is None else self._start) + MAX_LINGER_SHARE * step
        due = sorted(
            each.ready_at for each in view.away if each.ready_at is not None and view.now < each.ready_at <= end
        )
        best, most = None, 0.0
        for count, moment in enumerate(due[: max(room, 0)], 1):
            saved = step + _seconds(view, count) - _seconds(view, num_running + count)
            gain = saved - (moment - view.now) * num_running
            if gain > most:
                best, most = moment, gain
        return best


def _seconds(view: View, num_requests: int) -> float:
    """Return the duration of a decode step, in seconds; infinite if no call can hold it."""
    variant = view.device.call(num_requests, num_requests)
    return float("inf") if variant is None else view.device.seconds(variant)
