"""Asks the policy, checks its answer, and goes on with ``fcfs`` when a policy fails."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable

from staticllm.errors import ConfigError
from staticllm.pipelines.scheduling.chunked import Chunked
from staticllm.pipelines.scheduling.decode_first import DecodeFirst
from staticllm.pipelines.scheduling.dynamic import Dynamic
from staticllm.pipelines.scheduling.fcfs import Fcfs
from staticllm.pipelines.scheduling.prefill_first import PrefillFirst
from staticllm.pipelines.scheduling.rules import IllegalPlanError, check
from staticllm.pipelines.scheduling.view import Plan, Policy, View

POLICIES: dict[str, Callable[[], Policy]] = {
    "dynamic": Dynamic,
    "fcfs": Fcfs,
    "prefill_first": PrefillFirst,
    "decode_first": DecodeFirst,
    "chunked": Chunked,
}
STALL_SECONDS = 2.0
"""A policy of the user that takes longer than this for a plan has stalled."""


def make_policy(scheduler: object) -> Policy:
    """A policy from its name, or the user's own object.

    Raises:
        ConfigError: an unknown name, or an object without a method ``plan``.
    """
    if isinstance(scheduler, str) and scheduler in POLICIES:
        return POLICIES[scheduler]()
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "plan", None)):
        raise ConfigError(
            f"scheduler={scheduler!r}: must be one of {', '.join(POLICIES)}, or an object with a method plan(view)"
        )
    return scheduler  # type: ignore[return-value]


class Planner:
    """A legal plan for every view, whatever the policy does.

    Policies of the library are called where they are. One of the user's is called in a thread of its own, so that the
    device does not wait for it for ever.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        is_ours = type(policy) in POLICIES.values()
        self._thread = None if is_ours else _PolicyThread(policy)

    def plan(self, view: View) -> Plan:
        """A plan that keeps every rule. A policy that raises, stalls or breaks a rule is replaced, with one warning."""
        try:
            return check(self._thread.plan(view) if self._thread else self.policy.plan(view), view)
        except Exception as error:
            reason = str(error) if isinstance(error, (IllegalPlanError, _StallError)) else f"it raised {error!r}"
        name = type(self.policy).__name__
        warnings.warn(f"the scheduler {name} is replaced by fcfs: {reason}", RuntimeWarning, stacklevel=2)
        self.close()
        self.policy = Fcfs()
        return check(self.policy.plan(view), view)

    def close(self) -> None:
        """End the policy's thread, if it has one; a stalled one ends when its policy lets it."""
        if self._thread:
            self._thread.close()
            self._thread = None


class _StallError(Exception):
    pass


class _PolicyThread:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: queue.SimpleQueue[View | None] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="staticllm-policy", daemon=True)
        self._thread.start()

    def plan(self, view: View) -> object:
        self._views.put(view)
        try:
            plan = self._plans.get(timeout=STALL_SECONDS)
        except queue.Empty:
            raise _StallError(f"it took longer than {STALL_SECONDS:g} s for a plan") from None
        if isinstance(plan, Exception):
            raise plan
        return plan

    def close(self) -> None:
        self._views.put(None)
        self._thread.join(timeout=0.2)

    def _run(self) -> None:
        while (view := self._views.get()) is not None:
            try:
                self._plans.put(self._policy.plan(view))
            except BaseException as error:  # whatever it is, the engine must hear of it
                self._plans.put(error if isinstance(error, Exception) else RuntimeError(repr(error)))
