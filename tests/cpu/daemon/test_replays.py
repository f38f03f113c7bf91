"""Tests replays: calls that our engine cannot run go to the original model, in pieces, and stop nobody."""

import threading

import numpy as np
import pytest

from staticllm.daemon.packed import replay
from staticllm.errors import ClosedError, PromptError


def test_a_long_call_on_the_original_runs_in_pieces_with_the_same_logits(program_on):
    program = program_on("llama")
    ours, _ = program.requests
    program.step(2, 8, padding=(3, 0))
    ours.state_names()  # from now on it runs on the original
    asked = asks_of(ours)
    program.step(2, 300, beams=[1, 1])
    program.step(3, 1, beams=[0, 1, 1])
    assert asked == [*(("prefill", 2 * columns) for columns in (128, 128, 44)), ("decode", 3)]
    program.reset()
    ours.state_names()
    del asked[:]
    program.step(2, 200, padding=(1, 0))  # the keys of hidden tokens depend on the columns of their call
    assert asked == [("prefill", 400)]
    with pytest.raises(PromptError, match="beam_idx has 5, the batch before had 2 rows"):
        ours.infer(program.inputs(2, 1) | {"beam_idx": np.array([0, 5])})


def asks_of(request):
    """Return a list of what the calls of a replay ask for, which grows."""
    scheduler, asked = request.model.original.scheduler, []
    take = scheduler.acquire

    def noted(ask):
        if not ask.owner.is_engine:
            asked.append((ask.phase, ask.rows))
        return take(ask)

    scheduler.acquire = noted
    return asked


def test_a_replay_stops_no_other_sequence(loaded, program_on, monkeypatch):
    """It waits for its compilation, and then between two of its pieces, while another client gets tokens."""
    model, _ = loaded("llama")
    slow, fast = program_on("llama"), program_on("llama", seed=1)
    slow.step(1, 150)
    fast.step(1, 9)
    original, entered, gate = model.original, threading.Semaphore(0), threading.Semaphore(0)
    original._compiled = None
    core, run = replay.get_core(), original.scheduler.acquire

    class Core:
        def compile_model(self, *args):
            entered.release()
            assert gate.acquire(timeout=60)
            return core.compile_model(*args)

    def take(ask):
        if not ask.owner.is_engine:
            entered.release()
            assert gate.acquire(timeout=60)
        return run(ask)

    monkeypatch.setattr(replay, "get_core", Core)
    original.scheduler.acquire = take
    thread = threading.Thread(target=slow.requests[0].state_names)
    thread.start()
    try:
        for _ in range(3):  # the compilation, and two pieces of its 150 tokens
            assert entered.acquire(timeout=60)
            for _ in range(3):
                fast.step(1, 1)
            assert thread.is_alive()
            gate.release()
        thread.join(60)
    finally:
        for _ in range(9):
            gate.release()
        original.scheduler.acquire = run
    assert slow.requests[0].fallback is not None
    slow.step(1, 1)


def test_a_replay_that_is_cancelled_ends_before_its_next_piece(program_on):
    program = program_on("llama")
    ours = program.requests[0]
    ours.state_names()
    asked = asks_of(ours)
    take = ours.model.original.scheduler.acquire

    def cancel(ask):
        if not ask.owner.is_engine:
            ours.cancel()
        return take(ask)

    ours.model.original.scheduler.acquire = cancel
    with pytest.raises(ClosedError, match="cancelled"):
        ours.infer(program.inputs(1, 250))
    ours.model.original.scheduler.acquire = take
    assert len(asked) == 1
    ours.reset()


def test_a_call_on_the_original_has_times_of_its_own(program_on):
    program = program_on("demo")
    program.step(1, 9)
    ours, in_engine = program.requests[0], program.requests[0].times
    assert in_engine.taken > 0
    ours.state_names()
    assert ours.fallback is not None
    program.step(1, 1)
    first = ours.times
    program.step(1, 1)
    assert len({in_engine.taken, first.taken, ours.times.taken}) == 3
    assert 0 < first.taken < 10
    assert 0 < first.queued < 10
