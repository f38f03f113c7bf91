"""Tests decode steps between the blocks of a prompt's call, on the fake device: they change no answer and leak no slot."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from support.engine.engine_schedules import assert_slots_counted
from support.engine.output_queues import outputs_of

from staticllm.core import Variant
from staticllm.errors import DeviceError, NumericalError
from staticllm.pipelines.profiling.trace import Trace
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import assert_empty, fake_answer, fake_engine, fake_request, run_to_end, run_until
from staticllm.testing.device import MaskKind

NUM_BLOCKS = 4
MASKS = (MaskKind(), MaskKind(9))


class Eager:
    """A policy of users that lets ``num_requests`` of the running requests decode between all blocks, while it ``is_on``.

    ``then`` replaces what it returns, unless that is None.
    """

    def __init__(self, num_requests=99, then=lambda view, call: None, is_on=True):
        self.policy, self.num_requests, self.calls, self.then = make_policy("fcfs"), num_requests, [], then
        self.is_on = is_on

    def plan(self, view):
        return self.policy.plan(view)

    def between_blocks(self, view, call):
        if not self.is_on:
            return None
        self.calls.append((view, call))
        found = self.then(view, call)
        return Plan(decode=tuple(r.id for r in view.running[: self.num_requests])) if found is None else found


class Beside:
    """Two requests that decode, and then a prompt in one call of four blocks."""

    def __init__(self, policy=None, num_prompt=14, first=(8, 11), **options):
        self.policy = policy or Eager()
        self.policy.is_on = False
        self.engine = fake_engine(self.policy, masks=MASKS, num_blocks=NUM_BLOCKS, **options)
        self.decoding = [fake_request(range(100 * i, 100 * i + n), 30) for i, n in enumerate(first)]
        self.prompts = [list(request.tokens) for request in self.decoding]
        run_until(self.engine, lambda: self.decoding[-1].num_generated >= 2, self.decoding)
        self.before = [request.num_generated for request in self.decoding]
        self.late = fake_request(range(500, 500 + num_prompt), 5)
        self.runner = self.engine.runner

    def run_prompt(self):
        """Run steps until the late prompt has its first token, and return how many tokens the others got meanwhile."""
        self.policy.is_on = True
        self.engine.core.post()
        trace = self.engine.core.profiler.trace = Trace()
        run_until(self.engine, lambda: self.late.num_generated or not self.late.unfinished, [self.late])
        self.engine.core.post()
        self.engine.core.profiler.trace = None
        self.steps = trace.steps
        return [request.num_generated - before for request, before in zip(self.decoding, self.before, strict=True)]

    def check(self, *requests):
        """Run to the end, and check the answers of these requests, by default of all, and that no slot is left."""
        run_to_end(self.engine)
        for request in requests or (*self.decoding, self.late):
            prompt = request.request.prompt
            assert request.tokens == fake_answer(prompt, request.request.max_new_tokens, MASKS)
        assert_slots_counted(self.engine)
        assert_empty(self.engine)
        self.engine.close()


def test_requests_decode_between_the_blocks_of_a_prompt():
    beside = Beside()
    assert beside.run_prompt() == [NUM_BLOCKS - 1] * 2
    *inserted, call = beside.steps
    assert [step.is_inserted for step in inserted] == [True] * (NUM_BLOCKS - 1)
    assert call.prefill == ((beside.late.id, 14),)
    assert not call.is_inserted
    assert call.num_inserted == NUM_BLOCKS - 1
    assert call.start <= inserted[0].start
    assert inserted[-1].end <= call.end
    assert call.paused_seconds > 0
    assert call.seconds == pytest.approx(0.024, abs=1e-4), "the seconds of other calls are not the call's own"
    assert [view.running[0].num_generated for view, _ in beside.policy.calls] == [
        b + beside.before[0] for b in (0, 1, 2)
    ]
    assert [call.num_done for _, call in beside.policy.calls] == [1, 2, 3]
    assert [call.num_inserted for _, call in beside.policy.calls] == [0, 1, 2]
    assert all(beside.late.id not in {request.id for request in view.requests} for view, _ in beside.policy.calls)
    beside.check()


def test_tokens_of_inserted_steps_reach_their_readers_before_the_call_ends():
    seen = []
    beside = Beside(Eager(then=lambda view, call: seen.append(len(outputs_of(beside.decoding[0])))))
    outputs_of(beside.decoding[0])
    beside.run_prompt()
    assert seen[1:] == [1, 1], "the token of each step"
    beside.check()


def test_a_policy_may_choose_which_requests_decode():
    beside = Beside(Eager(num_requests=1))
    assert beside.run_prompt() == [NUM_BLOCKS - 1, 0]
    beside.check()


def test_a_policy_without_the_hook_lets_a_due_step_run():
    """The fake device's costs are long beside the real clock, so that each step that may run is due as soon as it is allowed."""
    beside = Beside(make_policy("fcfs"))
    core = beside.engine.core
    core.device.runner.costs.update(Variant(16, 128), 1.0)
    assert beside.run_prompt() == [0, 0], "no request has waited for the bound"
    beside.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_shipped_policies_run_in_blocks(name):
    engine = fake_engine(make_policy(name), masks=MASKS, num_blocks=NUM_BLOCKS)
    requests = [fake_request(range(50 * i, 50 * i + 4 + 3 * i), 12) for i in range(7)]
    run_to_end(engine, requests)
    assert [r.tokens for r in requests] == [fake_answer(r.request.prompt, 12, MASKS) for r in requests]
    assert_empty(engine)
    engine.close()


def variants(prefill, decode):
    """Return variants whose prompts and decode steps have these KV lengths; 128 is that of all slots."""
    packed = [Variant(n, kv_len, n) for n in (1, 4) for kv_len in decode]
    return [*packed, *(Variant(16, kv_len) for kv_len in prefill)]


def test_no_step_runs_at_another_kv_length_than_that_of_a_call_that_reads_slots():
    beside = Beside(variants=variants((64, 128), (32, 128)))
    assert beside.run_prompt() == [0, 0], "the prompt's call reads slots at 64"
    assert not beside.policy.calls
    beside.check()


def test_a_call_that_reads_no_slots_leaves_the_kv_length_free():
    beside = Beside(variants=variants((0, 64, 128), (32, 128)))
    assert beside.run_prompt() == [NUM_BLOCKS - 1] * 2
    beside.check()


@pytest.mark.parametrize("num_prompt", range(11, 15))
def test_a_step_takes_only_slots_that_the_call_in_flight_does_not_need(num_prompt):
    beside = Beside(Eager(num_requests=1), num_prompt, (22, 24), variants=variants((64,), (64,)))
    num_left = 64 - beside.runner.cache.slots.num_used - num_prompt
    assert 2 <= num_left <= 5
    assert sum(beside.run_prompt()) == max(0, min(NUM_BLOCKS - 1, num_left))
    run_to_end(beside.engine)
    assert_empty(beside.engine)
    beside.engine.close()


def test_a_step_takes_no_slot_above_those_that_the_call_in_flight_reads():
    """There are more slots than its KV length, but a step up there would need another stride of the arena."""
    seen = []
    policy = Eager(1, lambda view, call: seen.append((call.variant.kv_len, beside.runner.cache.arena.is_read)))
    beside = Beside(policy, 14, (29, 31), variants=variants((64, 128), (64, 128)))
    assert 64 - beside.runner.cache.slots.num_used == 2
    assert beside.runner.cache.slots.num_free > 14 + 2 * NUM_BLOCKS
    assert sum(beside.run_prompt()) == 2, "the third token would lie above"
    assert seen
    assert set(seen) == {(64, True)}, "no slot may move meanwhile"
    assert not beside.runner.cache.arena.is_read
    beside.check()


def test_slots_may_move_under_a_call_that_reads_none():
    seen = []
    policy = Eager(then=lambda view, call: seen.append((call.variant.kv_len, beside.runner.cache.arena.is_read)))
    beside = Beside(policy, variants=variants((0, 64, 128), (32, 128)))
    beside.run_prompt()
    assert set(seen) == {(0, False)}
    beside.check()


def test_only_calls_with_prompts_and_without_drafts_make_way():
    beside = Beside()
    beside.policy.is_on = True
    before = beside.decoding[0].num_generated
    run_until(beside.engine, lambda: beside.decoding[0].num_generated >= before + 3)
    assert not beside.policy.calls, "a decode step does not wait for another one"
    inserted, run = beside.engine.core.calls.inserted, pytest.fail
    assert inserted.between(SimpleNamespace(has_prompts=True, checks=()), run) is not None
    assert inserted.between(SimpleNamespace(has_prompts=True, checks=(1,)), run) is None
    assert inserted.between(SimpleNamespace(has_prompts=False, checks=()), run) is None
    beside.engine.steps.add([beside.late])
    beside.check()


def test_a_model_with_recurrent_states_runs_nothing_between_blocks():
    policy = Eager()
    sizes = [Variant(rows, 128) for rows in (1, 2, 4, 8, 16)]
    engine = fake_engine(policy, variants=sizes, masks=MASKS, is_recurrent=True, num_blocks=NUM_BLOCKS)
    requests = [fake_request(range(100 * i, 100 * i + 12), 12) for i in range(3)]
    run_to_end(engine, requests)
    engine.close()
    assert not policy.calls, "both calls would use the states' memory"
    assert [r.tokens for r in requests] == [
        fake_answer(r.request.prompt, 12, MASKS, is_recurrent=True) for r in requests
    ]


def test_requests_that_are_cancelled_meanwhile_run_no_more_and_the_prompt_goes_on():
    beside = Beside(Eager(then=lambda view, call: beside.decoding[0].cancel() if call.num_done == 2 else None))
    assert beside.run_prompt() == [2, NUM_BLOCKS - 1], "the step for which the policy was asked still runs"
    beside.check(beside.decoding[1], beside.late)
    assert outputs_of(beside.decoding[0])[-1].reason == "cancelled"


def test_a_prompt_that_is_cancelled_meanwhile_ends_after_its_call():
    beside = Beside(Eager(then=lambda view, call: beside.late.cancel()))
    beside.policy.is_on = True
    run_until(beside.engine, lambda: not beside.late.unfinished, [beside.late])
    beside.check(*beside.decoding)


def fail_once(program, effect):
    """Let the next run of a program end with ``effect(program)``."""
    run = program.run

    def fail(meanwhile=None, between=None):
        program.run = run
        run(meanwhile)
        effect(program)
        return 0.01

    program.run = fail


def step_program(beside):
    """Return the program of the inserted steps."""
    kv_len = next(v.kv_len for v in sorted(beside.runner.inserted) if v.rows == v.sequences == 2 and v.kv_len >= 64)
    return beside.runner.inserted[Variant(2, kv_len, 2)]


def raise_error(program):
    raise RuntimeError("the device is gone")


def test_an_inserted_step_that_the_device_refuses_ends_only_its_own_requests():
    beside = Beside(first=(18, 19))
    fail_once(step_program(beside), raise_error)
    beside.run_prompt()
    beside.check(beside.late)
    ends = [outputs_of(request)[-1] for request in beside.decoding]
    assert all(isinstance(end.error, DeviceError) for end in ends), ends


def test_an_inserted_step_whose_numbers_are_not_finite_is_repeated_request_by_request():
    beside = Beside(first=(18, 19))
    fail_once(step_program(beside), lambda program: program.buffers.logits.fill(np.nan))
    assert beside.run_prompt() == [0, 0], "suspects run alone, after the prompt"
    beside.check()


def test_one_request_whose_numbers_are_not_finite_ends_between_two_blocks():
    beside = Beside(Eager(num_requests=1), first=(18, 19))
    kv_len = step_program(beside).buffers.variant.kv_len
    fail_once(beside.runner.inserted[Variant(1, kv_len)], lambda program: program.buffers.logits.fill(np.nan))
    assert beside.run_prompt() == [0, NUM_BLOCKS - 2]
    beside.check(beside.decoding[1], beside.late)
    assert isinstance(outputs_of(beside.decoding[0])[-1].error, NumericalError)


def test_a_commit_that_fails_between_two_blocks_recomputes_everything(monkeypatch):
    """All slots are lost, those of the prompt in flight as well, so that its call is given up and runs again."""
    beside = Beside(first=(18, 19))
    arena = beside.runner.cache.arena
    write = arena.write

    def fail(*arguments):
        monkeypatch.setattr(arena, "write", write)
        raise MemoryError("no memory")

    fail_once(step_program(beside), lambda program: monkeypatch.setattr(arena, "write", fail))
    beside.run_prompt()
    assert any(step.has_failed for step in beside.steps)
    beside.check(beside.late)
    assert all(outputs_of(request)[-1].error is not None for request in beside.decoding), (
        "these were in the failed call"
    )


def test_a_call_that_fails_after_inserted_steps_ends_only_its_own_request():
    beside = Beside()
    programs = [p for v, p in beside.runner.programs.items() if (v.rows, v.sequences) == (16, 1)]

    def fail(meanwhile=None, between=None):
        between()
        between()
        raise_error(None)

    with pytest.MonkeyPatch.context() as patch:
        for program in programs:
            patch.setattr(program, "run", fail)
        assert beside.run_prompt() == [2, 2]
    assert isinstance(outputs_of(beside.late)[-1].error, DeviceError)
    beside.check(*beside.decoding)


def test_an_interrupt_between_two_blocks_ends_all_requests_and_leaks_nothing(monkeypatch):
    beside = Beside()
    calls = beside.engine.core.calls

    def interrupt(batch):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "run_inserted", interrupt)
    beside.policy.is_on = True
    beside.engine.steps.add([beside.late])
    beside.engine.steps.step()
    assert not beside.late.unfinished
    assert beside.runner.in_flight is None
    assert not beside.runner.cache.arena.is_read
    again = fake_request(range(600, 612), 7)
    run_to_end(beside.engine, [again])
    assert again.tokens == fake_answer(range(600, 612), 7, MASKS)
    assert_empty(beside.engine)
    beside.engine.close()


def test_an_error_between_two_blocks_ends_all_requests_and_keeps_its_cause(monkeypatch):
    beside = Beside()

    def fail(batch):
        raise ValueError("a bug") from OSError("its cause")

    monkeypatch.setattr(beside.engine.core.calls, "run_inserted", fail)
    beside.policy.is_on = True
    beside.engine.steps.add([beside.late])
    beside.engine.steps.step()
    error = outputs_of(beside.late)[-1].error
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert [str(each) for each in chain[-2:]] == ["a bug", "its cause"]
    assert not any(each.unfinished for each in (beside.late, *beside.decoding))
    beside.engine.close()


BROKEN = {
    "raises": lambda view, call: 1 // 0,
    "no plan": lambda view, call: 7,
    "unknown": lambda view, call: Plan(decode=(-1,)),
    "twice": lambda view, call: Plan(decode=(view.running[0].id,) * 2),
    "prompt": lambda view, call: Plan(prefill=((view.running[0].id, 1),)),
    "preempts": lambda view, call: Plan(preempt=(view.running[0].id,), decode=(view.running[1].id,)),
    "nothing": lambda view, call: Plan(),
    "too many": lambda view, call: Plan(decode=tuple(r.id for r in view.running) * 9),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_a_policy_that_breaks_a_rule_between_blocks_is_replaced(kind):
    beside = Beside(Eager(then=BROKEN[kind]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert beside.run_prompt() == [0, 0]
    assert [str(each.message)[:39] for each in caught] == ["the scheduler Eager is replaced by fcfs"], caught
    beside.check()


def test_a_beam_search_goes_on_between_blocks():
    from support.engine.beam_steps import beam_request

    def answers(policy, num_blocks):
        engine = fake_engine(policy, masks=MASKS, num_blocks=num_blocks, starts_thread=False)
        search = beam_request(range(20), 10, num_beams=3, num_sequences=2)
        late = fake_request(range(300, 314), 4)
        engine.steps.add([search])
        for _ in range(5):
            engine.steps.step()
        run_to_end(engine, [late])
        assert late.tokens == fake_answer(range(300, 314), 4, MASKS)
        assert_empty(engine)
        engine.close()
        return [(token.id, token.index) for token in outputs_of(search) if hasattr(token, "id")]

    policy = Eager()
    assert answers(policy, NUM_BLOCKS) == answers(make_policy("fcfs"), 1)
    assert policy.calls
