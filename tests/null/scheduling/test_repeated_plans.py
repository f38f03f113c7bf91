"""Tests that a decode step of all requests is planned once, and that every shipped policy would have planned it again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Device, Plan
from staticllm.pipelines.scheduling.planner import POLICIES, Planner, make_policy
from staticllm.pipelines.scheduling.request_table import Limits, RequestInfo, RequestTable
from staticllm.testing import fake_answer, fake_engine, fake_request, run_to_end

INDEX = VariantIndex([Variant(1, 64), Variant(4, 64, 4), Variant(16, 0, 1), Variant(16, 64, 4)])


class Served:
    """A table whose requests run on a device without slots of its own: planned calls are only counted."""

    def __init__(self, priorities, gap_ms=None, max_num_seqs=8):
        self.table, self.now, self.free_slots = RequestTable(Limits(max_num_seqs, gap_ms=gap_ms)), 0.0, 1000
        for number, priority in enumerate(priorities):
            self.table.add(RequestInfo(number, float(number), 3, priority))

    def view(self):
        return self.table.view(self.now, self.free_slots, 1000, Device(INDEX, lambda variant: 0.02, high_slot=20))

    def run(self, plan):
        self.now += 0.02
        for request, count in (*plan.prefill, *((request, 1) for request in plan.decode)):
            if self.table[request].add_computed(count):
                self.table.add_token(request, self.now)

    def run_prompts(self, planner):
        self.run(planner.plan(self.view()))
        for info in self.table:  # the others; decode_first would never run them
            if info.status == "waiting":
                self.run(Plan(prefill=((info.id, 3),)))

    def repeated(self, planner):
        return planner.repeated(self.table, self.free_slots, INDEX.max_decoding(20))


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(priorities=st.lists(st.integers(0, 2), min_size=1, max_size=4), gap_ms=st.sampled_from([None, 100.0]))
def test_every_shipped_policy_would_plan_it_again(name, priorities, gap_ms):
    served, planner = Served(priorities, gap_ms), Planner(make_policy(name))
    served.run_prompts(planner)
    served.run(planner.plan(served.view()))
    for _ in range(5):
        repeated = served.repeated(planner)
        assert repeated is not None
        assert len(repeated.decode) == len(priorities)
        assert repeated == planner.plan(served.view())
        served.run(repeated)


def test_it_is_planned_anew_when_anything_changes():
    served, planner = Served([0, 0, 0]), Planner(make_policy("dynamic"))
    served.run_prompts(planner)
    assert served.repeated(planner) is None, "the last call was a prompt"
    served.run(planner.plan(served.view()))
    assert served.repeated(planner)
    served.free_slots = 2
    assert served.repeated(planner) is None, "a request must give its slots"
    served.free_slots = 1000
    assert planner.repeated(served.table, 1000, 2) is None, "they decode in turns"
    served.table[1].swap_out()
    assert served.repeated(planner) is None, "one of them is swapped"
    served.table[1].swap_in()
    served.table.add(RequestInfo(9, served.now, 5))
    assert served.repeated(planner) is None, "a prompt waits"
    served.table.remove(9)
    served.table.remove(1)
    assert served.repeated(planner) is None, "one of them has ended"


def test_a_swap_is_not_repeated():
    served, planner = Served([0]), Planner(make_policy("dynamic"))
    served.run_prompts(planner)
    served.table[0].swap_out()
    plan = planner.plan(served.view())
    assert plan == Plan(decode=(0,), swap_in=(0,))
    served.table[0].swap_in()
    assert served.repeated(planner) is None


@pytest.mark.parametrize("is_shipped", [True, False])
def test_a_stream_alone_is_planned_once_but_by_a_users_policy_in_each_step(monkeypatch, is_shipped):
    class Mine(POLICIES["fcfs"]):
        """A policy of a user."""

    policy, calls = make_policy("fcfs") if is_shipped else Mine(), []
    plan = POLICIES["fcfs"].plan
    monkeypatch.setattr(POLICIES["fcfs"], "plan", lambda self, view: calls.append(view) or plan(self, view))
    engine, request = fake_engine(policy), fake_request([1, 2, 3], 20)
    run_to_end(engine, [request])
    engine.close()
    assert request.tokens == fake_answer([1, 2, 3], 20)
    assert len(calls) == (2 if is_shipped else 20)
