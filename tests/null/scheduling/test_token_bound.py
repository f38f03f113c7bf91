"""Tests that prompts, jobs and other programs keep one bound between two tokens, by what each of them lets happen."""

from dataclasses import replace

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.daemon.sharing.device_scheduler import DeviceScheduler, EngineId
from staticllm.daemon.sharing.device_use import DeviceUse
from staticllm.pipelines.engine.options import options_of
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import OWN_BOUND, SHARED_BOUND, Device, JobView, TokenBound
from staticllm.pipelines.scheduling.job_scheduler import BOUND_USED, JobScheduler
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.pipelines.scheduling.policies.dynamic import SLACK_USED
from staticllm.pipelines.scheduling.request_table import RUNNING, WAITING, Limits, RequestInfo, RequestTable
from staticllm.testing import fake_shape

LAST_TOKEN = 100.0
MS = [
    (TokenBound(4.0, 0.1), None, 0.01, 100),
    (TokenBound(4.0, 0.1), None, 0.05, 200),
    (TokenBound(2.5, 0.04), None, 0.01, 40),
    (TokenBound(2.5, 0.04), None, 0.05, 125),
    (TokenBound(4.0, 0.1), 70.0, 0.01, 70),
    (TokenBound(2.5, 0.04), 70.0, 0.01, 70),
    (TokenBound(2.5, 0.04), 30.0, 0.02, 30),
]
"""The bound, ``TPOT_MS``, the seconds of a decode step, and the longest time between two tokens that follows, in ms."""


def view_of(limits, step, prompt_seconds=None, jobs=()):
    """Return the view of a table with a request that got a token at ``LAST_TOKEN``, and with a prompt that takes so long."""
    table = RequestTable(limits)
    running = RequestInfo(1, 0.0, 4)
    table.add(running)
    running.status, running.num_computed, running.num_generated = RUNNING, 4, 2
    running.last_token_time = LAST_TOKEN
    if prompt_seconds is not None:
        table.add(RequestInfo(2, 1.0, 16))
        assert table[2].status is WAITING
    variants = (Variant(1, 64), Variant(16, 0, 1))
    costs = {1: step, 16: prompt_seconds}
    view = table.view(LAST_TOKEN, 64, 0, Device(VariantIndex(variants), lambda variant: costs[variant.rows], 64))
    return replace(view, jobs=jobs)


def longest(happens, most=1.0):
    """Return the longest duration, in ms, with which something happens."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if happens(middle) else (low, middle)
    return low * 1e3


@pytest.mark.parametrize(("bound", "tpot_ms", "step", "ms"), MS)
def test_prompts_jobs_and_other_programs_keep_the_same_bound(bound, tpot_ms, step, ms):
    limits = Limits(4, tpot_ms=tpot_ms, token_bound=bound)
    assert bound.of(step, tpot_ms) == pytest.approx(ms / 1e3)

    def prompt_runs(seconds):
        policy = make_policy("dynamic")
        policy.prefill_end, policy.prefill_seconds = LAST_TOKEN - 1e-6, 10.0  # prompts have just had their share
        return bool(policy.plan(view_of(limits, step, seconds)).prefill)

    def job_runs(seconds):
        job = JobView(7, seconds, LAST_TOKEN)
        return JobScheduler().choose(view_of(limits, step, jobs=(job,))) is not None

    def engine_needs_the_device():
        scheduler = DeviceScheduler()
        use = DeviceUse(scheduler, EngineId(1))
        use.step_seconds = step
        return use.due([LAST_TOKEN + 1, LAST_TOKEN], limits) - LAST_TOKEN

    assert longest(job_runs) == pytest.approx(BOUND_USED * ms - step * 1e3)
    assert engine_needs_the_device() * 1e3 == pytest.approx(ms - step * 1e3)
    delay = SLACK_USED * ms  # a call with the prompt alone, and then the decode step
    assert longest(prompt_runs) == pytest.approx(delay - step * 1e3, abs=0.01)


def test_a_program_has_its_own_bound_and_the_daemon_a_shorter_one():
    assert TokenBound(4.0, 0.1) == OWN_BOUND
    assert TokenBound(2.5, 0.04) == SHARED_BOUND
    config, shape = StaticLLMConfig(), fake_shape()
    assert options_of(config, shape, "shared").limits.token_bound is OWN_BOUND
    assert options_of(config, shape, "shared", SHARED_BOUND).limits.token_bound is SHARED_BOUND
