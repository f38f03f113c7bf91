"""The rules of a plan. Whatever breaks one never reaches the device."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import Plan, RequestView, View


class IllegalPlanError(Exception):
    """A plan that breaks a rule; ``rule`` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"rule {rule!r}: {detail}")
        self.rule = rule


def check(plan: object, view: View) -> Plan:
    """The plan, if it is one and breaks no rule.

    Raises:
        IllegalPlanError: names the rule.
    """
    if not isinstance(plan, Plan):
        raise IllegalPlanError("is-a-plan", f"plan() returned a {type(plan).__name__}, not a Plan")
    try:
        known = {request.id: request for request in view.requests}
        _check_requests(plan, known)
        _check_resources(plan, view, known)
    except (TypeError, ValueError) as error:
        raise IllegalPlanError(
            "is-a-plan", f"the plan holds something else than request ids and counts: {error}"
        ) from None
    return plan


def _check_requests(plan: Plan, known: dict[int, RequestView]) -> None:
    moves = [("decode", plan.decode), ("resume", plan.resume), ("park", plan.park), ("evict", plan.evict)]
    for name, ids in (*moves, ("prefill", tuple(request for request, _ in plan.prefill))):
        for request in ids:
            if request not in known:
                raise IllegalPlanError("known-requests", f"{name} names request {request!r}, which is not there")
        if len(set(ids)) != len(ids):
            raise IllegalPlanError("named-once", f"{name} names a request twice")
    _check_moves(plan, known)
    for request, count in plan.prefill:
        if known[request].state not in ("waiting", "prefilling") or request in (*plan.park, *plan.evict):
            raise IllegalPlanError("prefill-unfinished", f"request {request} has no prompt left to run")
        if not isinstance(count, int) or not 1 <= count <= known[request].num_left:
            left = known[request].num_left
            raise IllegalPlanError("prefill-count", f"{count!r} tokens of request {request}, which has {left} left")


def _check_moves(plan: Plan, known: dict[int, RequestView]) -> None:
    for request in plan.resume:
        if known[request].state != "parked":
            raise IllegalPlanError("swap-in-swapped", f"request {request} is resumed but not parked")
    for request in plan.park:
        if known[request].state != "running":
            raise IllegalPlanError("park-running", f"request {request} is parked but not running")
    gone = {*plan.park, *plan.evict}
    if set(plan.park) & set(plan.evict) or set(plan.resume) & set(plan.evict):
        raise IllegalPlanError("one-fate", "a request is evicted and parked or resumed at once")
    for request in plan.decode:
        if request in gone or (known[request].state != "running" and request not in plan.resume):
            raise IllegalPlanError("decode-running", f"request {request} decodes but is not running")


def _check_resources(plan: Plan, view: View, known: dict[int, RequestView]) -> None:
    if not plan.num_rows:
        raise IllegalPlanError("runs-something", "the plan runs nothing while requests wait")
    slots = len({request.id for request in view.running} - {*plan.park, *plan.evict}) + len(plan.resume)
    if slots > view.max_num_seqs:
        raise IllegalPlanError("slots", f"{slots} requests decode, MAX_NUM_SEQS is {view.max_num_seqs}")
    freed = sum(known[request].own_rows for request in (*plan.park, *plan.evict))
    brought = sum(known[request].num_rows for request in plan.resume if not known[request].in_arena)
    if plan.num_rows + brought > view.free_rows + freed:
        raise IllegalPlanError(
            "free-slots",
            f"{plan.num_rows + brought} rows are needed, {view.free_rows + freed} are free: park or evict somebody",
        )
    parked_rows = sum(known[request].num_rows for request in plan.park)
    if parked_rows > view.free_parked_rows:
        raise IllegalPlanError("parked-rows", f"{parked_rows} rows to park, {view.free_parked_rows} are free")
    fresh = not plan.decode and all(not known[request].num_rows for request, _ in plan.prefill)
    if view.device.call(plan.num_rows, plan.num_sequences, fresh) is None:
        raise IllegalPlanError(
            "holds", f"no program holds {plan.num_rows} rows of {plan.num_sequences} sequences in one call"
        )
