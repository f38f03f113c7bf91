"""Tests the rules of plans, and the decisions of the shipped policies."""

import itertools
import re
import warnings
from dataclasses import replace

import pytest

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Device, Plan, RequestView, TokenBound, View
from staticllm.pipelines.scheduling.planner import POLICIES, Planner, make_policy
from staticllm.pipelines.scheduling.plans import IllegalPlanError, admissible_prompts, check, to_swap_in
from staticllm.pipelines.scheduling.policies.ratio import Ratio
from staticllm.testing import FAKE_VARIANTS, fake_answer, fake_engine, fake_request, run_to_end

INDEX = VariantIndex(FAKE_VARIANTS)


def seconds(variant):
    return (8 + variant.rows) * 1e-3


def a_view(**changes):
    """Return a view: request 1 is waiting, 2 prefilling, 3 and 4 running, and 5 swapped, with its slots in the host pool."""
    view = View(
        now=100.0,
        waiting=(RequestView(1, "waiting", 99.0, 10),),
        prefilling=(RequestView(2, "prefilling", 98.0, 20, 16, 16),),
        running=tuple(RequestView(i, "running", 90.0 + i, 12, 11, 11, 3, 99.99) for i in (3, 4)),
        swapped=(RequestView(5, "swapped", 97.0, 9, 8, 0, 1, 99.5, in_arena=False),),
        max_num_seqs=3,
        free_slots=40,
        free_host_slots=50,
        device=Device(INDEX, seconds, 64),
    )
    return replace(view, **changes)


@pytest.mark.parametrize(
    ("rule", "plan", "changes"),
    [
        ("is-a-plan", "decode all of them", {}),
        ("is-a-plan", Plan(decode=([],)), {}),
        ("is-a-plan", Plan(prefill=((1, 2, 3),)), {}),
        ("known-requests", Plan(decode=(9,)), {}),
        ("known-requests", Plan(prefill=((9, 1),)), {}),
        ("named-once", Plan(decode=(3, 3)), {}),
        ("swap-in-swapped", Plan(decode=(3,), swap_in=(4,)), {}),
        ("swap-out-running", Plan(decode=(3,), swap_out=(2,)), {}),
        ("one-fate", Plan(decode=(3,), swap_out=(4,), preempt=(4,)), {}),
        ("decode-running", Plan(decode=(5,)), {}),
        ("decode-running", Plan(decode=(1,)), {}),
        ("decode-running", Plan(decode=(3,), swap_out=(3,)), {}),
        ("prefill-unfinished", Plan(prefill=((3, 1),)), {}),
        ("prefill-unfinished", Plan(prefill=((2, 1),), preempt=(2,)), {}),
        ("prefill-count", Plan(prefill=((2, 5),)), {}),
        ("prefill-count", Plan(prefill=((2, 0),)), {}),
        ("prefill-count", Plan(prefill=((2, 1.5),)), {}),
        ("runs-something", Plan(), {}),
        ("runs-something", Plan(swap_in=(5,)), {}),
        ("max-num-seqs", Plan(decode=(3,), swap_in=(5,)), {"max_num_seqs": 2}),
        ("free-slots", Plan(prefill=((1, 10),)), {"free_slots": 9}),
        ("free-slots", Plan(decode=(3,), swap_in=(5,)), {"free_slots": 8}),
        ("host-slots", Plan(decode=(3,), swap_out=(4,)), {"free_host_slots": 10}),
        ("holds", Plan(decode=(3, 4), prefill=((1, 10), (2, 4))), {"device": Device(INDEX, seconds, 999)}),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(rule, plan, changes):
    with pytest.raises(IllegalPlanError) as error:
        check(plan, a_view(**changes))
    assert error.value.rule == rule
    assert rule in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(decode=(3, 4), prefill=((2, 4), (1, 10))),
        Plan(decode=(3, 5), swap_in=(5,), swap_out=(4,)),
        Plan(prefill=((1, 1),), preempt=(3, 4, 2, 5)),
        Plan(decode=(5,), swap_in=(5,), preempt=(3,)),
    ],
)
def test_legal_plans_pass(plan):
    assert check(plan, a_view()) is plan


def short_of_slots(free_slots, free_host_slots, num_seqs, without):
    view = a_view(free_slots=free_slots, free_host_slots=free_host_slots, max_num_seqs=num_seqs)
    return replace(view, **{"running": view.running[:num_seqs], **dict.fromkeys(without, ())})


def can_run_alone(request, view):
    """Return whether the slots suffice for the request's next token if all others are preempted.

    They always do in an engine: its arena has more slots than any one sequence.
    """
    own = request.own_slots if request.in_arena else 0
    others = sum(other.own_slots for other in view.requests if other.in_arena) - own
    return view.free_slots + others >= (1 if request.in_arena else request.num_computed + 1)


SHORT_OF_SLOTS = [
    case
    for case in itertools.product(
        [0, 1, 2, 5, 9, 40],
        [0, 50],
        [1, 2, 3],
        [(), ("running",), ("waiting", "prefilling"), ("running", "prefilling", "waiting")],
    )
    if all(can_run_alone(request, short_of_slots(*case)) for request in short_of_slots(*case).requests)
]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize(("free_slots", "free_host_slots", "num_seqs", "without"), SHORT_OF_SLOTS)
def test_shipped_policies_break_no_rule_when_kv_slots_run_short(name, free_slots, free_host_slots, num_seqs, without):
    view = short_of_slots(free_slots, free_host_slots, num_seqs, without)
    check(make_policy(name).plan(view), view)


def with_fed(view, fed):
    """Return the view with these requests as fed ones; a swapped one has its slots in the arena."""

    def changed(request):
        if request.id not in fed:
            return request
        return replace(request, is_client_driven=True, in_arena=True, own_slots=request.num_computed)

    names = ("waiting", "prefilling", "running", "swapped")
    return replace(view, **{name: tuple(map(changed, getattr(view, name))) for name in names})


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("fed", [(1,), (3,), (5,), (1, 2), (3, 4, 5), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize(("free_slots", "free_host_slots", "num_seqs", "without"), SHORT_OF_SLOTS)
def test_shipped_policies_break_no_rule_with_fed_requests(name, fed, free_slots, free_host_slots, num_seqs, without):
    view = with_fed(short_of_slots(free_slots, free_host_slots, num_seqs, without), fed)
    if all(can_run_alone(request, view) for request in view.requests):
        check(make_policy(name).plan(view), view)


def test_requests_that_keep_their_places_get_them_before_fed_ones():
    """The last place is that of the first request in order."""
    swapped = tuple(
        RequestView(id, "swapped", float(id), 9, 8, 8, 1, 99.5, is_client_driven=id < 5) for id in range(1, 8)
    )
    view = a_view(waiting=(), prefilling=(), running=(), swapped=swapped, free_slots=1000)

    def placed(num_seqs, **changes):
        return [request.id for request in to_swap_in(replace(view, max_num_seqs=num_seqs, **changes))]

    assert placed(1) == [1]
    assert placed(2) == [5, 1]
    assert placed(3) == [5, 6, 1]
    assert placed(5) == [5, 6, 7, 1, 2]
    urgent = tuple(replace(request, priority=int(request.id == 2)) for request in swapped)
    assert placed(3, swapped=urgent) == [2, 5, 1]
    assert placed(2, swapped=swapped[:3]) == [1, 2]
    assert [replace(view, max_num_seqs=number).free_places for number in (1, 4, 6)] == [0, 0, 2]
    assert replace(view, max_num_seqs=6, swapped=swapped[4:]).free_places == 3


def test_a_prompt_may_run_while_beams_take_turns_in_all_places():
    """It waited until the host pool had room for all beams, which never go there."""
    beams = tuple(RequestView(id, "swapped", 1.0, 21, 20, 1, 1, 99.5, is_client_driven=True) for id in range(10, 18))
    view = a_view(prefilling=(), running=(), swapped=beams, max_num_seqs=2, free_host_slots=0)
    assert [request.id for request in admissible_prompts(view)] == [1]
    assert admissible_prompts(replace(view, max_num_seqs=1)) == []
    fed = replace(view.waiting[0], id=2, arrival=999.0, is_client_driven=True)
    assert [
        request.id for request in admissible_prompts(replace(view, max_num_seqs=1, waiting=(*view.waiting, fed)))
    ] == [2]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_of_several_answers_that_share_all_slots_runs_without_the_others(name):
    """Two prompts fill the arena. Each of their answers alone frees no slot, all together free every slot of theirs."""
    answers = tuple(RequestView(i, "swapped", 90.0 + i, 25, 24, 0, 1, 99.0) for i in (1, 2, 3, 4))
    view = a_view(waiting=(), prefilling=(), running=(), swapped=answers, free_slots=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Planner(make_policy(name)).plan(view)
    assert (plan.decode, plan.swap_in, sorted(plan.preempt)) == ((1,), (1,), [2, 3, 4])


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("status", ["running", "swapped"])
def test_beams_that_share_all_slots_make_room_for_a_request_without_a_warning(name, status):
    """As when beams wait in the arena, and the request that decodes there, or comes from the host pool, needs their slots."""
    beams = tuple(RequestView(i, "swapped", 95.0 + i, 45, 44, 0, 1, 99.0) for i in (2, 3, 4))
    is_running = status == "running"
    first = RequestView(1, status, 90.0, 47, 46, 46 if is_running else 0, 1, 99.0, in_arena=is_running)
    view = a_view(waiting=(), prefilling=(), running=(), swapped=beams, free_slots=0 if is_running else 40)
    view = replace(view, running=(first,)) if is_running else replace(view, swapped=(first, *beams))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = Planner(make_policy(name)).plan(view)
    assert plan.decode == (1,) and {*plan.preempt} == {2, 3, 4}


def test_a_plan_that_leaves_a_holder_of_shared_slots_breaks_the_rule():
    answers = tuple(RequestView(i, "swapped", 90.0 + i, 25, 24, 0, 1, 99.0) for i in (1, 2, 3, 4))
    view = a_view(waiting=(), prefilling=(), running=(), swapped=answers, free_slots=0)
    with pytest.raises(IllegalPlanError, match="free-slots"):
        check(Plan(decode=(1,), swap_in=(1,), preempt=(2, 3)), view)


def test_a_policy_cannot_change_the_view():
    view = a_view()
    with pytest.raises(AttributeError):
        view.running[0].num_computed = 0
    with pytest.raises(AttributeError):
        view.free_slots = 10_000


# -- what they decide


def test_fcfs_counts_a_request_from_its_first_prompt_token_to_its_last_token():
    view = a_view()  # two running, one prefilling and one swapped request count against max_num_seqs=3
    assert make_policy("fcfs").plan(view).prefill == ((2, 4),)
    busy = replace(view, prefilling=())
    plan = make_policy("fcfs").plan(busy)
    assert plan.decode == (3, 4, 5)
    assert plan.swap_in == (5,)
    assert not plan.prefill


def test_prefill_first_decodes_only_when_no_prompt_can_run():
    plan = make_policy("prefill_first").plan(a_view())
    assert plan.prefill
    assert not plan.decode


def test_decode_first_prefills_only_in_idle_rows():
    plan = make_policy("decode_first").plan(a_view(max_num_seqs=2, device=Device(INDEX, seconds, 40)))
    assert plan.decode == (3, 4)
    assert not plan.prefill, "a call of two rows has no idle row"
    alone = make_policy("decode_first").plan(a_view(running=(), swapped=()))
    assert alone.prefill
    assert not alone.decode


def test_chunked_fills_its_token_budget():
    plan = make_policy("chunked").plan(a_view())
    assert plan.decode == (3, 4, 5), "decoding comes first"
    assert plan.prefill == ((2, 4), (1, 9)), "prompts fill the rest of the sixteen rows"


def test_ratio_keeps_its_share_to_within_one_call():
    """Both phases always have work: 4 tokens of 12 ms, or a decode step of 10 ms. A prompt that is behind runs at once."""
    policy = Ratio(0.3)
    spent = {True: 0.0, False: 0.0}
    for _ in range(300):
        plan = policy.plan(a_view(swapped=(), waiting=()))
        spent[bool(plan.prefill)] += seconds(Device(INDEX, seconds, 64).call(plan.num_rows, plan.num_sequences))
        total = sum(spent.values())
        assert abs(spent[True] - 0.3 * total) <= seconds(Variant(4, 64, 1))
    assert total > 3
    assert Ratio(0.3).plan(a_view(waiting=(), prefilling=())).decode, "a phase without work leaves its time"
    assert Ratio(0.3).plan(a_view(running=(), swapped=())).prefill


def slow_prompts(variant):
    """Return seconds: 10 ms per decode step, but 50 ms for four rows, 100 ms for eight, and 200 ms for sixteen."""
    return 0.01 if variant.rows <= 2 else variant.rows / 80


def test_dynamic_prefills_on_arrival_while_max_num_seqs_requests_run():
    view = a_view(max_num_seqs=2, now=100.0)
    plan = make_policy("dynamic").plan(view)
    assert {request for request, _ in plan.prefill} >= {2}


@pytest.mark.parametrize(
    ("tpot_ms", "waited", "prefills"), [(None, 0.0, True), (15, 0.0, False), (300, 0.0, True), (300, 0.29, False)]
)
def test_no_running_request_waits_longer_for_a_token_than_the_target(tpot_ms, waited, prefills):
    device = Device(VariantIndex(v for v in FAKE_VARIANTS if v.rows <= 8), slow_prompts, 64)
    running = tuple(replace(request, last_token_time=100.0 - waited) for request in a_view().running)
    policy = make_policy("dynamic")
    policy.prefill_end, policy.prefill_seconds = 100.0 - waited - 1e-6, 1.0  # prompts have just had their share
    gap = {} if tpot_ms is None else {"tpot_ms": tpot_ms}
    if tpot_ms is None:
        device = replace(device, seconds=lambda variant: 0.01 if variant.rows <= 2 else 0.02)
    plan = policy.plan(a_view(swapped=(), running=running, device=device, **gap))
    assert bool(plan.prefill) is prefills


@pytest.mark.parametrize(
    ("name", "bound", "num_tokens"),
    [
        ("dynamic", TokenBound(4, 0.1), 14),  # the call takes 75 ms
        ("dynamic", TokenBound(3, 0.05), 2),
        ("dynamic", TokenBound(10, 0.05), 14),
        ("dynamic", TokenBound(2.5, 0.04), 2),
        ("fcfs", TokenBound(2.5, 0.04), 14),
    ],
)
def test_the_bound_without_a_target_is_that_of_the_view(name, bound, num_tokens):
    def seconds(variant):
        return 0.01 if variant.rows <= 2 else 0.025 if variant.rows <= 4 else 0.075

    running = tuple(replace(request, last_token_time=100.0) for request in a_view().running)
    prompt = RequestView(2, "prefilling", 98.0, 30, 16, 16)
    device = Device(INDEX, seconds, 64)
    view = a_view(waiting=(), prefilling=(prompt,), swapped=(), running=running, device=device, token_bound=bound)
    assert sum(count for _, count in make_policy(name).plan(view).prefill) == num_tokens


@pytest.mark.parametrize(("num_prompts", "tpot_ms", "most"), [(1, None, 0.18), (2, None, 0.5), (2, 60, 0.06)])
def test_calls_are_longer_while_several_prompts_wait(num_prompts, tpot_ms, most):
    """Within the time in which people read two words, and never beyond a target."""

    def seconds(variant):
        return 0.045 if variant.rows <= 2 else 0.13 if variant.rows <= 8 else 0.21

    running = tuple(replace(request, last_token_time=100.0) for request in a_view().running)
    prompts = tuple(RequestView(10 + i, "prefilling", 98.0, 40, 16, 16) for i in range(num_prompts))
    device = Device(INDEX, seconds, 64)
    view = a_view(waiting=(), prefilling=prompts, swapped=(), running=running, free_slots=99, device=device)
    view = replace(view, tpot_ms=tpot_ms)
    plan = make_policy("dynamic").plan(view)
    taken = seconds(view.device.call(plan.num_rows, plan.num_sequences))
    assert taken <= most
    assert (taken > 0.18) == (num_prompts > 1 and tpot_ms is None)


def test_dynamic_never_starves_prompts_of_a_target_that_no_call_keeps():
    device = Device(INDEX, slow_prompts, 64)
    policy, now, prefilled = make_policy("dynamic"), 100.0, 0.0
    for _ in range(200):
        view = a_view(now=now, swapped=(), device=device, tpot_ms=15, max_num_seqs=2)
        running = tuple(replace(request, last_token_time=now) for request in view.running)
        plan = policy.plan(replace(view, running=running))
        variant = device.call(plan.num_rows, plan.num_sequences)
        now += slow_prompts(variant)
        prefilled += slow_prompts(variant) if plan.prefill else 0.0
    assert 0.1 < prefilled / (now - 100.0) < 0.4


def test_dynamic_batches_short_prompts_while_max_num_seqs_requests_run():
    device = Device(INDEX, lambda variant: 0.02 if variant.rows > 2 else 0.01, 64)  # sixteen rows cost as much as four
    view = a_view(now=99.001, prefilling=(), swapped=(), max_num_seqs=2, device=device)
    short = tuple(RequestView(10 + i, "waiting", 99.0, 4) for i in range(4))
    assert not make_policy("dynamic").plan(replace(view, waiting=short[:1])).prefill
    assert len(make_policy("dynamic").plan(replace(view, waiting=short)).prefill) == 4
    assert make_policy("dynamic").plan(replace(view, waiting=short[:1], now=105.0)).prefill, (
        "the batching delay is over"
    )
    assert make_policy("dynamic").plan(replace(view, waiting=short[:1], max_num_seqs=3)).prefill, (
        "another may be running"
    )


@pytest.mark.parametrize(("num_seqs", "num_tokens", "is_alone"), [(6, 4, True), (2, 4, False), (6, 40, False)])
def test_dynamic_fills_up_to_max_num_seqs_before_a_decode_step(num_seqs, num_tokens, is_alone):
    """A mixed call adds less time than a call of prompts alone, but decoding only two of six requests is worth little."""

    def cost(variant):
        return (
            variant.rows * 1e-3 if not variant.kv_len else 0.01 if variant.rows <= 2 else 8e-3 + 0.9e-3 * variant.rows
        )

    waiting = tuple(RequestView(10 + i, "waiting", 99.0, num_tokens) for i in range(4))
    changes = {"waiting": waiting, "prefilling": (), "swapped": (), "max_num_seqs": num_seqs, "free_slots": 400}
    plan = make_policy("dynamic").plan(a_view(device=Device(INDEX, cost, 64), **changes))
    assert plan.prefill
    assert (not plan.decode) is is_alone


def test_a_plan_runs_in_the_smallest_variant():
    assert Device(INDEX, seconds, 30).call(3, 3) == Variant(4, 32, 4)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_prompt_begins_if_it_would_be_preempted(name):
    """With few KV slots and a small host pool, every prompt still runs only once."""
    engine = fake_engine(make_policy(name), 2, max_seq_len=60, host_kv_slots=40)
    requests = [fake_request(range(30 * i, 30 * i + 28), 24) for i in range(12)]
    run_to_end(engine, requests)
    stats = engine.core.profiler.stats()
    rows_run = stats.prefill_rows_per_second * stats.prefill_share * stats.device_seconds
    assert rows_run == pytest.approx(12 * 28), "prompts were preempted and computed again"


def test_the_policy_in_the_documentation_works(root):
    page = (root / "docs" / "scheduling.md").read_text(encoding="utf-8")
    serving, policy, trial = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(policy.strip().splitlines()) <= 30
    scope = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(policy + trial, scope)
        engine = fake_engine(scope["ShortestFirst"](), max_num_seqs=2)
        requests = [fake_request(range(i, i + 40 - 3 * i), 12) for i in range(10)]
        expected = [fake_answer(request.tokens, 12) for request in requests]
        run_to_end(engine, requests)
    engine.close()
    scope["engine"].close()
    assert [request.tokens for request in requests] == expected
    compile(serving, "docs/scheduling.md", "exec")
