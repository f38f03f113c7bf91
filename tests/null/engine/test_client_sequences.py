"""Tests requests whose tokens a client chooses, beside ordinary ones: each gets the logits of its own tokens."""

import warnings
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engine.engine_schedules import HOSTILE, MASKS, Disturbed, Schedule, assert_slots_counted
from support.quick import examples

from staticllm.core import Variant
from staticllm.errors import BusyError, ClosedError, PromptError
from staticllm.pipelines.engine.client_sequences.sequence import ClientSequence, Feed
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import (
    FAKE_VARIANTS,
    POISON,
    assert_empty,
    fake_engine,
    fake_request,
    fake_runner,
    run_to_end,
)
from staticllm.testing.device import fake_next_token

MAX_SEQ_LEN = 64
ALL_LOGITS = tuple(
    Variant(variant.rows, variant.kv_len, variant.sequences, variant.rows - variant.sequences)
    for variant in FAKE_VARIANTS
    if variant.rows == 8
)
VARIANTS = (*FAKE_VARIANTS, *ALL_LOGITS)


class Branch:
    """A client sequence, the tokens that it was fed, and the feed in progress."""

    def __init__(self, sequence, tokens=()):
        self.sequence, self.tokens, self.new = sequence, list(tokens), []
        self.sequence.vocab_size += 1  # POISON is outside the vocabulary
        self.is_closed = False

    def done(self, result, wanted):
        """Check the logits of the feed in progress."""
        new, self.new = self.new, []
        if result.error is not None:
            assert self.is_closed, result.error
            return
        self.tokens += new
        assert len(result.logits) == (1 if wanted == "last" else len(new))
        ends = range(len(self.tokens) - len(result.logits), len(self.tokens))
        for end, line in zip(ends, result.logits, strict=True):
            head = self.tokens[: end + 1]
            if POISON in head:
                assert np.isnan(line).all()
            elif result.is_finite:
                assert int(line.argmax()) == fake_next_token(head, MASKS)
        assert result.is_finite == (POISON not in self.tokens)


class Client:
    """Acts by a script: waits some steps, then feeds all of its branches, or forks or closes one."""

    def __init__(self, engine, number, script):
        self.engine, self.number, self.script = engine, number, deque(script)
        self.branches = [Branch(ClientSequence(engine))]
        self.wait = 0

    @property
    def is_done(self):
        return not self.script and not any(branch.new for branch in self.branches)

    def act(self):
        if self.wait or not self.script:
            self.wait -= self.wait > 0
            return
        if any(branch.new for branch in self.branches):
            if self.script[0][1] == "close busy":
                self._close(len(self.script))
            return
        self.wait, what, count = self.script.popleft()
        if what == "fork" and self.branches:
            branch = self.branches[count % len(self.branches)]
            self.branches.append(Branch(branch.sequence.fork(), branch.tokens))
        elif what == "close":
            self._close(count)
        elif what in ("one", "last", "all", "poison"):
            self._feed(what, 1 if what == "one" else count)

    def _feed(self, what, count):
        feeds = []
        for index, branch in enumerate(self.branches):
            if len(branch.tokens) + count > MAX_SEQ_LEN:
                continue
            start = 40 * self.number + len(branch.tokens)
            branch.new = [start + i + 7 * index * (start > 10) for i in range(count)]
            if what == "poison" and not index:
                branch.new[count // 2] = POISON
            wanted = "last" if what == "last" else "all"
            feeds.append(
                Feed(branch.sequence, branch.new, lambda r, branch=branch, w=wanted: branch.done(r, w), wanted)
            )
        if feeds:
            self.engine.feed(feeds)

    def _close(self, index):
        if self.branches:
            branch = self.branches.pop(index % len(self.branches))
            branch.is_closed = True
            branch.sequence.close(is_reusable=bool(index % 2))

    def close(self):
        while self.branches:
            self._close(0)


actions = st.tuples(
    st.integers(0, 4),
    st.sampled_from(["one", "one", "one", "last", "all", "all", "fork", "close", "close busy", "poison"]),
    st.integers(1, 25),
)
prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(POLICIES)),
        "prompts": st.lists(prompts, max_size=5),
        "clients": st.lists(st.lists(actions, min_size=1, max_size=14), min_size=1, max_size=4),
        "cancels": st.sets(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=2),
        "moves": st.lists(st.sampled_from(["swap_out", "preempt", "skip", None, None, *HOSTILE]), max_size=12),
        "max_num_seqs": st.integers(1, 4),
        "host_kv_slots": st.sampled_from([0, 40, 256]),
        "gap_ms": st.sampled_from([None, 0.01, 1.0]),
        "is_packable": st.booleans(),
        "poisoned": st.just(()),
        "switches": st.sets(st.integers(1, 60), max_size=2),
        "num_blocks": st.sampled_from([1, 3]),
    }
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
def test_any_schedule_gives_each_client_the_logits_of_its_tokens(schedule):
    """Schedules include forks, closes at any moment, evictions, NaN, other runners, and ordinary requests with swaps."""
    variants = VARIANTS if schedule["is_packable"] else [v for v in VARIANTS if v.sequences == 1]
    engine = fake_engine(
        Disturbed(schedule["policy"], schedule["moves"]),
        schedule["max_num_seqs"],
        variants,
        MAX_SEQ_LEN,
        schedule["host_kv_slots"],
        gap_ms=schedule["gap_ms"],
        masks=MASKS,
        num_blocks=schedule["num_blocks"],
        starts_thread=False,
    )
    run, clients = Schedule(schedule), [Client(engine, i, script) for i, script in enumerate(schedule["clients"])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the scheduler Disturbed is replaced by fcfs")
        for step in range(3000):
            run.arrive(engine, step)
            if step in schedule["switches"]:
                engine.switch(
                    fake_runner(variants, MASKS, num_blocks=schedule["num_blocks"]), engine.core.device.options
                )
            for client in clients:
                client.act()
            engine.steps.step()
            assert_slots_counted(engine)
            if step > 60 and engine.is_idle and all(client.is_done for client in clients):
                break
        assert all(client.is_done for client in clients)
        for client in clients:
            client.close()
        engine.steps.step()
    assert len(engine.core.device.kv_manager.idle) == 0
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent=False)


class Fed:
    """An engine without a thread whose feeds are run to their ends."""

    def __init__(self, policy="dynamic", **options):
        self.engine = fake_engine(make_policy(policy), variants=VARIANTS, starts_thread=False, **options)

    def run(self, *feeds, wanted="all"):
        """Feed ``(sequence, tokens)`` pairs, and return their results."""
        results = self.begin(*feeds, wanted=wanted)
        for _ in range(200):
            if len(results) == len(feeds):
                return [results[index] for index in range(len(feeds))]
            self.engine.steps.step()
        raise AssertionError("feeds without a result")

    def begin(self, *feeds, wanted="all"):
        results = {}
        self.engine.feed(
            [
                Feed(sequence, tokens, lambda result, index=index: results.update({index: result}), wanted)
                for index, (sequence, tokens) in enumerate(feeds)
            ]
        )
        return results


def argmaxes(result):
    return [int(line.argmax()) for line in result.logits]


def expected(tokens, num=1):
    return [fake_next_token(tokens[: end + 1]) for end in range(len(tokens) - num, len(tokens))]


def test_decode_steps_of_several_clients_share_calls():
    fed = Fed()
    first, second = ClientSequence(fed.engine), ClientSequence(fed.engine)
    fed.run((first, [1, 2, 3]), (second, [4, 5]))
    with fed.engine.record() as trace:
        for token in range(5):
            results = fed.run((first, [token]), (second, [token + 9]))
            assert all(len(result.logits) == 1 for result in results)
    assert [len(step.decode) for step in trace.steps] == [2] * 5


def test_the_sequence_away_longest_is_evicted_and_comes_back():
    fed = Fed(host_kv_slots=0)
    sequences = [ClientSequence(fed.engine) for _ in range(4)]
    tokens = [[100 * index + i for i in range(45)] for index in range(4)]
    for sequence, prompt in zip(sequences, tokens, strict=True):
        fed.run((sequence, prompt), wanted="last")
    manager = fed.engine.core.device.kv_manager
    assert [view.num_computed for view in manager.idle.views] == [0, 0, 45, 45]
    assert manager.free_slots == manager.cache.num_slots
    for sequence, prompt in zip(sequences, tokens, strict=True):
        (result,) = fed.run((sequence, [7]))
        assert argmaxes(result) == expected([*prompt, 7])


def test_an_evicted_sequence_is_copied_back_from_the_host_pool():
    fed = Fed()
    sequence, others = ClientSequence(fed.engine), [ClientSequence(fed.engine) for _ in range(3)]
    fed.run((sequence, range(45)))
    for index, other in enumerate(others):
        fed.run((other, range(100 * index + 100, 100 * index + 145)), wanted="last")
    with fed.engine.record() as trace:
        (result,) = fed.run((sequence, [7]))
    assert argmaxes(result) == expected([*range(45), 7])
    assert (
        sum(count for step in trace.steps for _, count in step.prefill) + sum(len(s.decode) for s in trace.steps) == 1
    )


def test_logits_that_are_not_finite_are_returned_and_spoil_nobody():
    fed = Fed()
    bad, good = ClientSequence(fed.engine), ClientSequence(fed.engine)
    bad.vocab_size += 1
    spoilt, fine = fed.run((bad, [1, POISON, 2]), (good, [3, 4]))
    assert not spoilt.is_finite
    assert np.isnan(spoilt.logits).all()
    assert argmaxes(fine) == expected([3, 4], 2)
    spoilt, fine = fed.run((bad, [5]), (good, [6]))
    assert np.isnan(spoilt.logits).all()
    assert argmaxes(fine) == expected([3, 4, 6])


@pytest.mark.parametrize("is_void", [False, True])
def test_a_failed_call_ends_the_feed_and_leaves_the_sequence_as_it_was(is_void):
    fed = Fed()
    sequence, other = ClientSequence(fed.engine), ClientSequence(fed.engine)
    fed.run((sequence, [1, 2, 3]), (other, [8, 9]))
    runner = fed.engine.runner
    run = runner.run

    def fail(*args):
        runner.run = run
        runner.cache.is_void = is_void
        raise RuntimeError("a device failure")

    runner.run = fail
    (failed,) = fed.run((sequence, [4]))
    assert "a device failure" in str(failed.error)
    assert sequence.length == 3
    results = fed.run((sequence, [5]), (other, [10]))
    assert [argmaxes(result) for result in results] == [expected([1, 2, 3, 5]), expected([8, 9, 10])]


def test_sequences_survive_an_exception_of_the_engine(monkeypatch):
    """Their slots are gone, those of a feed in progress too; it went on with slots that others had."""
    fed = Fed()
    sequence, away, other = (ClientSequence(fed.engine) for _ in range(3))
    fed.run((sequence, [1, 2, 3]), (away, [5, 6]))

    def fail(*_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(fed.engine.core, "_plan", fail)
    (failed,) = fed.run((sequence, [4]))
    assert "a bug of ours" in str(failed.error)
    monkeypatch.undo()
    fed.run((other, [8, 9, 10, 11]))
    results = fed.run((sequence, [7]), (away, [7]))
    assert [argmaxes(result) for result in results] == [expected([1, 2, 3, 7]), expected([5, 6, 7])]


def test_a_feed_that_cannot_run_ends_with_one_line():
    fed = Fed()
    sequence = ClientSequence(fed.engine)
    with pytest.raises(PromptError, match="token id 997 is outside the vocabulary: ids go from 0 to 996"):
        fed.run((sequence, [1, POISON]))
    with pytest.raises(PromptError, match="a feed has no token"):
        fed.run((sequence, []))
    with pytest.raises(BusyError, match="two feeds of one sequence"):
        fed.run((sequence, [1]), (sequence, [2]))
    (result,) = fed.run((sequence, range(65)))
    assert "a sequence of 65 tokens, it can have MAX_PROMPT_LEN" in str(result.error)
    fed.begin((sequence, [1, 2]))
    for call in (sequence.fork, lambda: fed.run((sequence, [3]))):
        with pytest.raises(BusyError, match="in progress"):
            call()
    sequence.close()
    with pytest.raises(ClosedError, match="the sequence is closed"):
        sequence.fork()


def test_close_ends_feeds_in_progress():
    fed = Fed()
    sequence, held, away = (ClientSequence(fed.engine) for _ in range(3))
    results = fed.begin((sequence, range(40)), (held, range(9)))
    fed.engine.steps.step()
    fed.engine.close()
    assert {type(result.error) for result in results.values()} == {ClosedError}
    assert len(results) == 2
    with pytest.raises(ClosedError):
        fed.run((away, [1]))
    away.close()


def test_a_closed_sequence_is_a_prefix_for_a_prompt():
    fed = Fed("fcfs")
    sequence = ClientSequence(fed.engine)
    fed.run((sequence, range(30)))
    sequence.close()
    request = fake_request([*range(30), 7, 8], 3)
    run_to_end(fed.engine, [request])
    assert request.num_cached == 30
    assert_empty(fed.engine)
