"""Tests requests whose tokens a client chooses, beside ordinary ones: each gets the logits of its own tokens."""

import warnings
from collections import deque

import numpy as np
import pytest
from engine_schedules import HOSTILE, MASKS, Disturbed, Schedule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick import examples

from staticllm.core import Variant
from staticllm.errors import BusyError, ClosedError, PromptError
from staticllm.pipelines.engine.fed_sequence import Feed
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import FAKE_VARIANTS, POISON, assert_empty, fake_engine, fake_runner
from staticllm.testing.device import fake_next_token

MAX_SEQ_LEN = 64
ALL_LOGITS = tuple(
    Variant(variant.rows, variant.kv_len, variant.sequences, variant.rows - variant.sequences)
    for variant in FAKE_VARIANTS
    if variant.rows == 8
)
VARIANTS = (*FAKE_VARIANTS, *ALL_LOGITS)


class Lane:
    """A fed sequence, the tokens that it was fed, and the feed in progress."""

    def __init__(self, sequence, tokens=()):
        self.sequence, self.tokens, self.new = sequence, list(tokens), []
        self.sequence._vocab_size += 1  # POISON is outside the vocabulary
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
    """Acts by a script: waits some steps, then feeds all of its lanes, or forks or closes one."""

    def __init__(self, engine, number, script):
        self.engine, self.number, self.script = engine, number, deque(script)
        self.lanes = [Lane(engine.open_fed())]
        self.wait = 0

    @property
    def is_done(self):
        return not self.script and not any(lane.new for lane in self.lanes)

    def act(self):
        if self.wait or not self.script:
            self.wait -= self.wait > 0
            return
        if any(lane.new for lane in self.lanes):
            if self.script[0][1] == "close busy":
                self._close(len(self.script))
            return
        self.wait, what, count = self.script.popleft()
        if what == "fork" and self.lanes:
            lane = self.lanes[count % len(self.lanes)]
            self.lanes.append(Lane(lane.sequence.fork(), lane.tokens))
        elif what == "close":
            self._close(count)
        elif what in ("one", "last", "all", "poison"):
            self._feed(what, 1 if what == "one" else count)

    def _feed(self, what, count):
        feeds = []
        for index, lane in enumerate(self.lanes):
            if len(lane.tokens) + count > MAX_SEQ_LEN:
                continue
            start = 40 * self.number + len(lane.tokens)
            lane.new = [start + i + 7 * index * (start > 10) for i in range(count)]
            if what == "poison" and not index:
                lane.new[count // 2] = POISON
            wanted = "last" if what == "last" else "all"
            feeds.append(Feed(lane.sequence, lane.new, lambda r, lane=lane, w=wanted: lane.done(r, w), wanted))
        if feeds:
            self.engine.feed(feeds)

    def _close(self, index):
        if self.lanes:
            lane = self.lanes.pop(index % len(self.lanes))
            lane.is_closed = True
            lane.sequence.close(is_reusable=bool(index % 2))

    def close(self):
        while self.lanes:
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
    }
)


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        starts_thread=False,
    )
    run, clients = Schedule(schedule), [Client(engine, i, script) for i, script in enumerate(schedule["clients"])]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the scheduler Disturbed is replaced by fcfs")
        for step in range(3000):
            run.arrive(engine, step)
            if step in schedule["switches"]:
                engine.switch(fake_runner(variants, MASKS), engine._core.options)
            for client in clients:
                client.act()
            engine.step()
            if step > 60 and engine.is_idle and all(client.is_done for client in clients):
                break
        assert all(client.is_done for client in clients)
        for client in clients:
            client.close()
        engine.step()
    assert len(engine.kv_manager.away) == 0
    assert_empty(engine)
    engine.close()
    run.check(is_recurrent=False)
