"""Gets a plan from the policy, checks it, and falls back to ``fcfs`` if the policy fails."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import islice

from staticllm.core import Variant
from staticllm.errors import ConfigError, shown
from staticllm.system.threads import start_thread

from ..programs.variant_index import VariantIndex
from . import policies
from .between_blocks import due_step
from .interface import CallView, Plan, Policy, RequestStatus, View
from .job_scheduler import ChatActivity, JobScheduler, urgency
from .plans import IllegalPlanError, alone, check, check_between_blocks, check_wait_so_far
from .policies.fcfs import Fcfs
from .request_table import RequestTable
from .work_classes import ProactiveRequests, reactive_view

POLICIES: dict[str, Callable[[], Policy]] = {
    name: import_module(f"{policies.__name__}.{name}").POLICY for name in policies.policy_names()
}
"""What makes each shipped policy, by name."""
STALL_SECONDS = 2.0
"""Time limit for one plan of a user's policy, which then counts as stalled."""
MAX_WAIT_SHARE = 0.2
"""Longest wait for idle requests before a call, as a share of that call's time."""


def make_policy(scheduler: object) -> Policy:
    """Return the shipped policy of this name, or the user's own object.

    Raises:
        ConfigError: neither.
    """
    if isinstance(scheduler, str) and (name := str.__str__(scheduler)) in POLICIES:
        return POLICIES[name]()
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "plan", None)):
        raise ConfigError(
            f"scheduler={shown(scheduler)}: must be one of {', '.join(POLICIES)}, or an object with a method plan(view)"
        )
    return scheduler  # type: ignore[return-value]


@dataclass(frozen=True)
class _Duties:
    """What a policy decides itself: which jobs run, both classes of requests, and the steps between blocks. ``fcfs``: nothing."""

    plans_jobs: bool = False
    plans_classes: bool = False
    decides_between: bool = False


class Planner:
    """Returns a legal plan for every view, even if the policy fails.

    Shipped policies are called on the engine's thread. A user's policy is called on a thread of its own, with a copy of the view,
    so that neither a slow policy nor one that changes the view can harm the engine.
    """

    def __init__(self, policy: Policy, waits_for_idle: bool = True) -> None:
        self.policy = policy
        self._own = policy
        self._batch_wait = BatchWait() if waits_for_idle else None
        self._wait_start: float | None = None  # of the waits before the next call
        self._is_shipped = type(policy) in POLICIES.values()
        self._own_duties = _duties_of(policy)
        self._duties = self._own_duties  # of ``policy``
        self._thread = None if self._is_shipped else _PolicyThread(policy)
        self._retry_after: VariantIndex | None = None  # the programs for which a replaced policy had no legal plan
        self._has_warned = False
        activity = ChatActivity()
        self._jobs = JobScheduler(activity)
        self._proactive = ProactiveRequests(activity)
        self._last = Plan()  # of a shipped policy

    def plan(self, view: View) -> Plan:
        """Return a plan that breaks no rule.

        Unless the policy plans jobs itself, ``JobScheduler`` decides whether one runs, and the policy gets a view without them.
        Unless it plans both classes itself, it gets the reactive requests alone while there are any, and ``ProactiveRequests``
        adds the others.

        A user's policy that raises, stalls or breaks a rule is replaced by ``fcfs``, with one warning. While programs are still
        compiled in the background, the reason may be a missing program; the policy is then used again as soon as the next one is
        ready. A shipped policy that fails is replaced for one step.

        Raises:
            NoPlanError: no request can run at all; the error has the id of the first one.
        """
        self._restore_policy(view)
        self._last = Plan()
        duties = self._duties
        if (first := self._before_policy(view, duties)) is not None:
            return first
        try:
            return self._planned(view, duties)
        except Exception as error:
            self._fail(view, _reason(error), isinstance(error, _StallError))
        return _fallback(view if duties.plans_jobs else replace(view, jobs=()))

    def _before_policy(self, view: View, duties: _Duties) -> Plan | None:
        """Return what goes before any plan of the policy, unless that is the policy's own affair; None for nothing.

        In this order: jobs wait for a prompt that is expected at once; proactive requests get their least share; a job
        runs; the device waits for idle requests that share the next step.
        """
        if not duties.plans_jobs and (moment := self._jobs.hold_until(view)) is not None:
            return Plan(wait_until=moment)
        if self._has_others_first(view) and (due := self._proactive.due(view)) is not None:
            return due
        if not duties.plans_jobs and (job := self._jobs.choose(self._view_for_jobs(view))) is not None:
            self._proactive.note_job(job, view)
            return Plan(job=job.id)
        if self._is_shipped and self._batch_wait is not None and (moment := self._batch_wait.until(view)) is not None:
            return Plan(wait_until=moment)
        return None

    def _planned(self, view: View, duties: _Duties) -> Plan:
        """Return the plan of the policy, with proactive requests beside the reactive ones.

        Raises:
            IllegalPlanError: the policy's plan breaks a rule.
            Exception: the policy raised it.
        """
        has_both = not duties.plans_classes and view.has_both_classes
        seen = reactive_view(view) if has_both else view
        seen = seen if duties.plans_jobs else self._jobs.view_for_policy(seen)
        plan = self._checked(self._asked(seen), seen)
        if plan.job is not None or plan.wait_until is not None or duties.plans_classes:
            return plan
        if has_both:
            return self._proactive.filled(plan, view)
        if view.requests and view.requests[0].is_proactive:
            plan = check(self._proactive.shortened(plan, view), view)
        self._last = plan if self._is_shipped else Plan()
        return plan

    def between_blocks(self, view: View, call: CallView) -> Plan | None:
        """Return a legal decode step that runs between two blocks of ``call``, or None.

        A user's policy that raises, stalls or breaks a rule is replaced by ``fcfs``, as by ``plan``.
        """
        try:
            found = self._asked_between(view, call)
            return None if found is None else check_between_blocks(found, view, call)
        except Exception as error:
            self._fail(view, _reason(error), isinstance(error, _StallError))
        return None

    def _asked_between(self, view: View, call: CallView) -> object:
        if not self._duties.decides_between:
            return due_step(view, call)
        if self._thread:
            return self._thread.between_blocks(view, call)
        return self.policy.between_blocks(view, call)  # type: ignore[attr-defined]

    def longest_job(self, view: View) -> float:
        """Return the longest time that the jobs of a view should take, s; asked before they are composed."""
        return self._jobs.longest_job(self._view_for_jobs(view))

    def _has_others_first(self, view: View) -> bool:
        """Return whether reactive requests or jobs go before proactive requests, and the policy leaves that to the planner."""
        if self._duties.plans_classes:
            return False
        has_jobs = bool(view.jobs) and not self._duties.plans_jobs
        return view.has_both_classes or (has_jobs and any(request.is_proactive for request in view.requests))

    def _view_for_jobs(self, view: View) -> View:
        """Return the view without requests that go behind all jobs: the proactive ones, unless the policy plans both classes.

        Those that are running stay if reactive ones are, because they have rows in the same decode steps.
        """
        has_proactive = any(request.is_proactive for request in view.requests)
        if not has_proactive or self._duties.plans_classes:
            return view
        reactive = reactive_view(view)
        return replace(reactive, running=view.running) if reactive.running else reactive

    def repeated(self, table: RequestTable, free_slots: int, max_decoding: int) -> Plan | None:
        """Return the last plan of a shipped policy again, without a view, if it was a decode step of all requests in ``table``.

        Every shipped policy would return it again while the same requests run, and no others are there: it needs
        ``free_slots`` free KV slots, and a call that decodes ``max_decoding`` requests. In all other cases, and if jobs wait,
        the caller asks ``plan``; None says so.
        """
        plan = self._last
        ids = self._last.decode
        if not ids or len(ids) != len(table) or plan.prefill or len(ids) > min(free_slots, max_decoding):
            return None
        if plan.swap_in or plan.swap_out or plan.preempt:
            return None
        return plan if table.are_running(ids) else None

    def close(self) -> None:
        """End the policy's thread, if it has one. The thread of a stalled policy ends when ``plan`` returns."""
        if self._thread:
            self._thread.close()
            self._thread = None

    def _checked(self, plan: object, view: View) -> Plan:
        """Return ``plan`` if it breaks no rule.

        Raises:
            IllegalPlanError: it breaks one.
        """
        found = check(plan, view)
        start = view.now if self._wait_start is None else self._wait_start
        check_wait_so_far(found, start)
        self._wait_start = None if found.wait_until is None else start
        return found

    def _asked(self, view: View) -> object:
        return self._thread.plan(view) if self._thread else self.policy.plan(view)

    def _fail(self, view: View, reason: str, has_stalled: bool) -> None:
        name = type(self.policy).__name__
        period = ""
        if self._is_shipped:
            period = " for one step"
        elif self.policy is self._own and not has_stalled and not view.device.is_complete:
            period = " until more programs are compiled"
            self._retry_after = view.device.index
        if not period or not self._has_warned:
            message = f"the scheduler {name} is replaced by fcfs{period}: {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        self._has_warned = True
        if not self._is_shipped:
            self.close()
            self.policy = Fcfs()
            self._duties = _Duties()

    def _restore_policy(self, view: View) -> None:
        if self._retry_after is not None and view.device.index is not self._retry_after:
            self._retry_after = None
            self.policy = self._own
            self._duties = self._own_duties
            self._thread = _PolicyThread(self._own)


class BatchWait:
    """Lets the device wait for idle requests that are due, if that saves more device time than the running requests lose.

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
        if not view.idle or not num_running or view.waiting or view.prefilling or view.swapped or view.jobs:
            return None
        room = min(view.free_seqs, view.device.max_decoding - num_running)
        step = _seconds(view, num_running)
        end = (view.now if self._start is None else self._start) + MAX_WAIT_SHARE * step
        due = sorted(
            each.ready_at for each in view.idle if each.ready_at is not None and view.now < each.ready_at <= end
        )
        best = None
        most = 0.0
        for count, moment in enumerate(due[: max(room, 0)], 1):
            saved = step + _seconds(view, count) - _seconds(view, num_running + count)
            gain = saved - (moment - view.now) * num_running
            if gain > most:
                best = moment
                most = gain
        return best


def _seconds(view: View, num_requests: int) -> float:
    """Return the duration of a decode step, in seconds; infinite if no call can hold it."""
    variant = view.device.call(num_requests, num_requests)
    return float("inf") if variant is None else view.device.seconds(variant)


def _duties_of(policy: Policy) -> _Duties:
    """Return what the policy says it decides. Raises ``ConfigError``."""
    return _Duties(_declared(policy, "plans_jobs"), _declared(policy, "plans_classes"), _decides_between_blocks(policy))


def _declared(policy: Policy, name: str) -> bool:
    """Return what the policy says it plans, read once so that a user's property cannot fail later. Raises ``ConfigError``."""
    try:
        found = getattr(policy, name, False)
    except Exception as error:
        raise ConfigError(
            f"{name} of the scheduler {type(policy).__name__} raised {shown(error)}: must be a bool"
        ) from error
    if not isinstance(found, bool):
        kind = type(policy).__name__
        raise ConfigError(f"{name} of the scheduler {kind} is a {type(found).__name__}: must be a bool")
    return found


def _decides_between_blocks(policy: Policy) -> bool:
    """Return whether the policy has a method ``between_blocks``, read once. Raises ``ConfigError``."""
    try:
        return callable(getattr(policy, "between_blocks", None))
    except Exception as error:
        raise ConfigError(
            f"between_blocks of the scheduler {type(policy).__name__} raised {shown(error)}: must be a method"
        ) from error


class NoPlanError(Exception):
    """No request can run, not even alone; ``request`` is the id of the first one."""

    def __init__(self, request: int) -> None:
        super().__init__(f"no program can run request {request}")
        self.request = request


def _fallback(view: View) -> Plan:
    """Return the plan of ``fcfs``; if it is illegal too, run the first request that can run alone, and preempt all others.

    Without requests, the most urgent job runs.

    Raises:
        NoPlanError: no request can run.
    """
    if not view.requests:
        return Plan(job=min(view.jobs, key=urgency).id)
    try:
        return check(Fcfs().plan(view), view)
    except Exception:  # a bug in fcfs must not end the requests
        requests = sorted(
            view.requests,
            key=lambda request: (request.status not in (RequestStatus.RUNNING, RequestStatus.SWAPPED), request.arrival),
        )
        for request in requests:
            for plan in alone(view, request):
                try:
                    return check(plan, view)
                except IllegalPlanError:
                    continue
        raise NoPlanError(requests[0].id) from None


class _StallError(Exception):
    """A user's policy did not return a plan within ``STALL_SECONDS``."""


class _PolicyError(Exception):
    """An exception of a user's policy, converted to text on the policy's thread."""


def _reason(error: Exception) -> str:
    """Return what the warning says about a policy's error."""
    is_known = isinstance(error, (IllegalPlanError, _StallError, _PolicyError))
    return str(error) if is_known else f"it raised {shown(error)}"


class _PolicyThread:
    """Calls a user's policy on a thread of its own, so that it can neither stop nor change the engine."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._views: queue.SimpleQueue[tuple[View, CallView | None] | None] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._index: tuple[VariantIndex, VariantIndex] | None = None  # the engine's, and the policy's copy
        try:
            self._thread = start_thread(self._run, "staticllm-policy")
        except BaseException:  # Ctrl-C: it may have begun
            self._views.put(None)
            raise

    def plan(self, view: View) -> object:
        """Return the policy's plan, not yet checked. Runs on the engine's thread."""
        return self._asked(view, None)

    def between_blocks(self, view: View, call: CallView) -> object:
        """Return the policy's plan between two blocks of ``call``, not yet checked; None for no plan."""
        return self._asked(view, call)

    def _asked(self, view: View, call: CallView | None) -> object:
        self._views.put((view, call))
        try:
            plan = self._plans.get(timeout=STALL_SECONDS)
        except queue.Empty:
            raise _StallError(f"it took longer than {STALL_SECONDS:g} s for a plan") from None
        if isinstance(plan, Exception):
            raise plan
        return plan

    def close(self) -> None:
        """End the thread when its current plan is done, and wait for it for 0.2 s."""
        self._views.put(None)
        self._thread.join(timeout=0.2)

    def _run(self) -> None:
        while (asked := self._views.get()) is not None:
            view, call = asked
            try:
                self._plans.put(_plain(self._decided(self._copy(view), call), len(view.requests)))
            except IllegalPlanError as error:
                self._plans.put(error)
            except BaseException as error:  # also SystemExit and the like: the engine waits for an answer
                self._plans.put(_shown(error))

    def _decided(self, view: View, call: CallView | None) -> object:
        if call is None:
            return self._policy.plan(view)
        return self._policy.between_blocks(view, replace(call))  # type: ignore[attr-defined]

    def _copy(self, view: View) -> View:
        """Return an equal view whose objects the engine does not use."""
        index = view.device.index
        costs = view.device.seconds
        if self._index is None or self._index[0] is not index:
            self._index = index, VariantIndex(index.variants, index.needs_real_rows)
        device = replace(view.device, index=self._index[1], seconds=_Costs(costs))
        waiting, prefilling, running, swapped = (
            tuple(map(replace, group)) for group in (view.waiting, view.prefilling, view.running, view.swapped)
        )
        jobs = tuple(map(replace, view.jobs))
        idle = tuple(map(replace, view.idle))
        return replace(
            view, device=device, waiting=waiting, prefilling=prefilling, running=running, swapped=swapped, jobs=jobs,
            idle=idle,
        )  # fmt: skip


class _Costs:
    """The costs of calls, without access to the engine's own measurements."""

    def __init__(self, costs: Callable[[Variant], float]) -> None:
        self.__call = costs

    def __call__(self, variant: Variant) -> float:
        return self.__call(variant)


def _plain(plan: object, num_requests: int) -> object:
    """Return the plan with tuples in place of the iterables that a policy returned, which may be endless.

    Runs on the policy's thread.

    Raises:
        IllegalPlanError: a field has more entries than there are requests, or an entry that is not a whole number.
    """
    if not isinstance(plan, Plan):
        return plan
    names = [field.name for field in fields(Plan) if field.name not in ("job", "wait_until")]
    entries = {name: tuple(islice(getattr(plan, name), num_requests + 1)) for name in names}
    for name, values in entries.items():
        if len(values) > num_requests:
            raise IllegalPlanError("named-once", f"{name} names more entries than there are requests ({num_requests})")
    plain = {name: tuple(map(_whole, values)) for name, values in entries.items() if name != "prefill"}
    prefill = tuple(tuple(map(_whole, islice(pair, 3))) for pair in entries["prefill"])
    job = None if plan.job is None else _whole(plan.job)
    moment = None if plan.wait_until is None else float(plan.wait_until)
    return Plan(**plain, prefill=prefill, job=job, wait_until=moment)  # type: ignore[arg-type]


def _whole(value: object) -> int:
    """Return an exact ``int``: a user's number class must not run on the engine's thread. Raises ``IllegalPlanError``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise IllegalPlanError(
            "is-a-plan", f"the plan holds a {type(value).__name__} instead of a request id or a count"
        )
    return int.__index__(value)


def _shown(error: BaseException) -> _PolicyError:
    """Return the exception of a policy as text; its own ``__repr__`` may fail."""
    try:
        return _PolicyError(f"it raised {shown(error)}"[:500])
    except BaseException:
        return _PolicyError(f"it raised {type(error).__name__}")
