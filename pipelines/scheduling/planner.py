"""Asks the policy, checks its answer, and goes on with ``fcfs`` when a policy fails."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.programs.variants import VariantIndex
from staticllm.pipelines.scheduling.interface import Plan, Policy, View
from staticllm.pipelines.scheduling.policies.chunked import Chunked
from staticllm.pipelines.scheduling.policies.common import alone
from staticllm.pipelines.scheduling.policies.decode_first import DecodeFirst
from staticllm.pipelines.scheduling.policies.dynamic import Dynamic
from staticllm.pipelines.scheduling.policies.fcfs import Fcfs
from staticllm.pipelines.scheduling.policies.prefill_first import PrefillFirst
from staticllm.pipelines.scheduling.validation import IllegalPlanError, check
from staticllm.threads import start_thread

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

    Policies of the library are called on the engine's thread. One of the user's is called on a thread of its own, with a copy
    of the view, so that neither a slow policy nor one that changes what it sees can harm the engine.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._own = policy
        self._is_shipped = type(policy) in POLICIES.values()
        self._thread = None if self._is_shipped else _PolicyThread(policy)
        self._retry_after: VariantIndex | None = None  # the programs that a replaced policy could not plan with
        self._has_warned = False

    def plan(self, view: View) -> Plan:
        """A plan that keeps every rule.

        A policy of the user that raises, stalls or breaks a rule is replaced by ``fcfs``, with one warning. While programs are
        still being compiled the fault may be ours, so it comes back when another program has arrived. A shipped policy that
        fails loses that step only.

        Raises:
            NoPlanError: no request can run at all; names the first.
        """
        self._come_back(view)
        try:
            return check(self._asked(view), view)
        except Exception as error:
            is_known = isinstance(error, (IllegalPlanError, _StallError, _PolicyError))
            self._fail(view, str(error) if is_known else f"it raised {error!r}", isinstance(error, _StallError))
        return _fallback(view)

    def close(self) -> None:
        """End the policy's thread, if it has one; a stalled one ends when its policy lets it."""
        if self._thread:
            self._thread.close()
            self._thread = None

    def _asked(self, view: View) -> object:
        return self._thread.plan(view) if self._thread else self.policy.plan(view)

    def _fail(self, view: View, reason: str, has_stalled: bool) -> None:
        name, for_how_long = type(self.policy).__name__, ""
        if self._is_shipped:
            for_how_long = " for a step"
        elif self.policy is self._own and not has_stalled and not view.device.is_complete:
            for_how_long = " until more programs are compiled"
            self._retry_after = view.device.index
        if not for_how_long or not self._has_warned:
            message = f"the scheduler {name} is replaced by fcfs{for_how_long}: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        self._has_warned = True
        if not self._is_shipped:
            self.close()
            self.policy = Fcfs()

    def _come_back(self, view: View) -> None:
        if self._retry_after is not None and view.device.index is not self._retry_after:
            self._retry_after, self.policy = None, self._own
            self._thread = _PolicyThread(self._own)


class NoPlanError(Exception):
    """Not even one request alone can run; ``request`` is the first of them."""

    def __init__(self, request: int) -> None:
        super().__init__(f"no program can run request {request}")
        self.request = request


def _fallback(view: View) -> Plan:
    """What ``fcfs`` plans; if that is illegal too, the first request that can run alone, at the cost of all others' rows.

    Raises:
        NoPlanError: no request can run.
    """
    try:
        return check(Fcfs().plan(view), view)
    except Exception:  # a fault of ours costs this step, not the requests
        requests = sorted(
            view.requests, key=lambda request: (request.state not in ("running", "swapped"), request.arrival)
        )
        for request in requests:
            for plan in alone(view, request):
                try:
                    return check(plan, view)
                except IllegalPlanError:
                    continue
        raise NoPlanError(requests[0].id) from None


class _StallError(Exception):
    pass


class _PolicyError(Exception):
    """What a policy of the user raised, told on its own thread."""


class _PolicyThread:
    """Asks a policy of the user on a thread of its own: nothing that it does can stop or change the engine."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: queue.SimpleQueue[View | None] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._index: tuple[VariantIndex, VariantIndex] | None = None  # the engine's, and the policy's copy
        self._thread = start_thread(self._run, "staticllm-policy")

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
                self._plans.put(_plain(self._policy.plan(self._copy(view)), len(view.requests)))
            except IllegalPlanError as error:
                self._plans.put(error)
            except BaseException as error:  # whatever it is, the engine must hear of it
                self._plans.put(_shown(error))

    def _copy(self, view: View) -> View:
        """The same values in objects that the engine does not use."""
        index, costs = view.device.index, view.device.seconds
        if self._index is None or self._index[0] is not index:
            self._index = index, VariantIndex(index.variants, index.needs_real_rows)
        device = replace(view.device, index=self._index[1], seconds=_Costs(costs))
        waiting, prefilling, running, swapped = (
            tuple(map(replace, group)) for group in (view.waiting, view.prefilling, view.running, view.swapped)
        )
        return replace(view, device=device, waiting=waiting, prefilling=prefilling, running=running, swapped=swapped)


class _Costs:
    """What calls cost, to be asked and not to be changed."""

    def __init__(self, costs: Callable[[Variant], float]) -> None:
        self.__call = costs

    def __call__(self, variant: Variant) -> float:
        return self.__call(variant)


def _plain(plan: object, num_requests: int) -> object:
    """The plan with tuples in place of whatever a policy returned, read on the policy's thread: it may never end.

    Raises:
        IllegalPlanError: more entries than there are requests.
    """
    if not isinstance(plan, Plan):
        return plan
    entries = {field.name: tuple(islice(getattr(plan, field.name), num_requests + 1)) for field in fields(Plan)}
    for name, values in entries.items():
        if len(values) > num_requests:
            raise IllegalPlanError("named-once", f"{name} names more than the {num_requests} requests that there are")
    plain = {name: tuple(map(_whole, values)) for name, values in entries.items() if name != "prefill"}
    return Plan(**plain, prefill=tuple(tuple(map(_whole, islice(pair, 3))) for pair in entries["prefill"]))  # type: ignore[misc]


def _whole(value: object) -> int:
    """An exact ``int``: what a policy of the user made up is neither hashed nor shown on the engine's thread."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise IllegalPlanError("is-a-plan", f"the plan holds a {type(value).__name__} where an id or a count should be")
    return int.__index__(value)


def _shown(error: BaseException) -> _PolicyError:
    """What a policy raised, as text."""
    try:
        return _PolicyError(f"it raised {error!r}"[:500])
    except BaseException:
        return _PolicyError(f"it raised {type(error).__name__}")
