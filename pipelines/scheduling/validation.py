"""Checks the rules of a plan, so that a plan that breaks one never reaches the device."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import Plan, RequestStatus, RequestView, View

MAX_WAIT_SECONDS = 1.0
"""Longest total wait before one call that a policy may ask for, in seconds."""


class IllegalPlanError(Exception):
    """A plan that breaks a rule; ``rule`` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"rule {rule!r}: {detail}")
        self.rule = rule


def check(plan: object, view: View) -> Plan:
    """Return ``plan`` if it is a ``Plan`` and breaks no rule.

    Raises ``IllegalPlanError`` (it is not a ``Plan``, or it breaks a rule; the error names the rule).
    """
    if not isinstance(plan, Plan):
        raise IllegalPlanError("is-a-plan", f"plan() returned a {type(plan).__name__}, not a Plan")
    if plan.wait_until is not None:
        return _check_wait(plan, view)
    if plan.job is not None:
        return _check_job(plan, view)
    try:
        known = {request.id: request for request in view.requests}
        _check_requests(plan, known)
        _check_resources(plan, view, known)
    except (TypeError, ValueError) as error:
        raise IllegalPlanError(
            "is-a-plan", f"the plan holds something other than request ids and counts: {error}"
        ) from None
    return plan


def check_wait_so_far(plan: Plan, start: float) -> None:
    """Check that the waits before one call, the first of which began at ``start``, are short enough in all.

    Raises ``IllegalPlanError`` (they are not).
    """
    if plan.wait_until is not None and plan.wait_until > start + MAX_WAIT_SECONDS:
        waited = plan.wait_until - start
        raise IllegalPlanError(
            "waits-briefly", f"{waited:g} s of waiting before one call, at most {MAX_WAIT_SECONDS:g} s"
        )


def _check_wait(plan: Plan, view: View) -> Plan:
    if plan != Plan(wait_until=plan.wait_until):
        raise IllegalPlanError("waits-alone", "the plan waits and has requests or a job")
    if not view.idle:
        raise IllegalPlanError("waits-for-idle", "the plan waits although no request is idle")
    if (
        isinstance(plan.wait_until, bool)
        or not isinstance(plan.wait_until, (int, float))
        or not plan.wait_until > view.now
    ):
        raise IllegalPlanError(
            "waits-ahead", f"the plan waits until {plan.wait_until!r}, which is not after {view.now}"
        )
    return plan


def _check_job(plan: Plan, view: View) -> Plan:
    if plan != Plan(job=plan.job):
        raise IllegalPlanError("one-model-a-call", f"the plan has job {plan.job!r} and requests in one call")
    if plan.job not in {job.id for job in view.jobs}:
        raise IllegalPlanError("known-jobs", f"the plan names job {plan.job!r}, which does not wait")
    return plan


def _check_requests(plan: Plan, known: dict[int, RequestView]) -> None:
    moves = [("decode", plan.decode), ("swap_in", plan.swap_in), ("swap_out", plan.swap_out), ("preempt", plan.preempt)]
    for name, ids in (*moves, ("prefill", tuple(request for request, _ in plan.prefill))):
        for request in ids:
            if request not in known:
                raise IllegalPlanError("known-requests", f"{name} names request {request!r}, which does not exist")
        if len(set(ids)) != len(ids):
            raise IllegalPlanError("named-once", f"{name} names a request twice")
    _check_swaps(plan, known)
    gone = {*plan.swap_out, *plan.preempt}
    for request, count in plan.prefill:
        if known[request].status not in (RequestStatus.WAITING, RequestStatus.PREFILLING) or request in gone:
            raise IllegalPlanError("prefill-unfinished", f"request {request} has no prompt left to run")
        if not isinstance(count, int) or not 1 <= count <= known[request].num_left:
            left = known[request].num_left
            raise IllegalPlanError("prefill-count", f"{count!r} tokens of request {request}, which has {left} left")


def _check_swaps(plan: Plan, known: dict[int, RequestView]) -> None:
    for request in plan.swap_in:
        if known[request].status != RequestStatus.SWAPPED:
            raise IllegalPlanError("swap-in-swapped", f"request {request} is swapped in but was not swapped out")
    for request in plan.swap_out:
        if known[request].status != RequestStatus.RUNNING:
            raise IllegalPlanError("swap-out-running", f"request {request} is swapped out but not running")
    gone = {*plan.swap_out, *plan.preempt}
    if set(plan.swap_out) & set(plan.preempt) or set(plan.swap_in) & set(plan.preempt):
        raise IllegalPlanError("one-fate", "a request is preempted and swapped at once")
    for request in plan.decode:
        if request in gone or (known[request].status != RequestStatus.RUNNING and request not in plan.swap_in):
            raise IllegalPlanError("decode-running", f"request {request} decodes but is not running")


def _check_resources(plan: Plan, view: View, known: dict[int, RequestView]) -> None:
    if not plan.num_rows:
        raise IllegalPlanError("runs-something", "the plan runs no token although there are requests")
    num_running = len({request.id for request in view.running} - {*plan.swap_out, *plan.preempt}) + len(plan.swap_in)
    if num_running > view.max_num_seqs:
        raise IllegalPlanError(
            "max-num-seqs", f"{num_running} requests would be running, MAX_NUM_SEQS is {view.max_num_seqs}"
        )
    freed = sum(known[request].own_slots for request in (*plan.swap_out, *plan.preempt))
    brought = sum(known[request].num_computed for request in plan.swap_in if not known[request].in_arena)
    if plan.num_rows + brought > view.free_slots + freed:
        raise IllegalPlanError(
            "free-slots",
            f"{plan.num_rows + brought} KV slots are needed, {view.free_slots + freed} are free: swap out or preempt a request",
        )
    swapped_slots = sum(known[request].num_computed for request in plan.swap_out)
    if swapped_slots > view.free_host_slots:
        raise IllegalPlanError(
            "host-slots",
            f"{swapped_slots} KV slots would be swapped out, the host pool has room for {view.free_host_slots}",
        )
    fresh = not plan.decode and all(not known[request].num_computed for request, _ in plan.prefill)
    if view.device.call(plan.num_rows, plan.num_sequences, fresh) is None:
        raise IllegalPlanError(
            "holds", f"no program holds {plan.num_rows} rows of {plan.num_sequences} sequences in one call"
        )
