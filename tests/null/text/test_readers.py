"""Tests how the readers of an event loop are woken: with one call into the loop, and in steps of a least gap."""

from __future__ import annotations

import asyncio
import gc
import queue
import random
import threading
import time
import weakref

import pytest

from staticllm.pipelines.text.readers import LoopWaker, OutputSignal, running_waker

NUM_EVENTS = 50


def counted(loop, monkeypatch):
    """Count the calls into a loop."""
    calls, original = [], loop.call_soon_threadsafe

    def call(function, *arguments, **options):
        calls.append(function)
        return original(function, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", call)
    return calls


def test_events_that_become_ready_together_are_set_by_one_call(monkeypatch):
    async def run():
        calls, waker = counted(asyncio.get_running_loop(), monkeypatch), running_waker()
        for _ in range(2):
            events = [asyncio.Event() for _ in range(NUM_EVENTS)]
            thread = threading.Thread(target=lambda events=events: [waker.wake(event) for event in events])
            thread.start()
            thread.join()  # the loop does not run meanwhile
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in events)), 60)
        return len([call for call in calls if getattr(call, "__self__", None) is waker])

    assert asyncio.run(run()) == 2


def test_no_event_of_several_threads_is_lost():
    async def run():
        waker = running_waker()
        rows = [[asyncio.Event() for _ in range(500)] for _ in range(4)]
        threads = [threading.Thread(target=lambda row=row: [waker.wake(event) for event in row]) for row in rows]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(asyncio.gather(*(event.wait() for row in rows for event in row)), 60)
        for thread in threads:
            await asyncio.to_thread(thread.join)

    asyncio.run(run())


def test_a_closed_loop_is_no_error_and_is_not_kept():
    async def run():
        assert running_waker() is running_waker()
        return running_waker(), weakref.ref(asyncio.get_running_loop())

    waker, loop = asyncio.run(run())
    waker.wake(asyncio.Event())
    gc.collect()
    assert loop() is None
    waker.wake(asyncio.Event())
    assert isinstance(waker, LoopWaker)


END = -1


async def read(outputs, signal):
    """Return the lists that a reader takes, and the moment of the last one."""
    batches = []
    while not batches or batches[-1][-1] != END:
        signal.clear()
        batch = []
        while not outputs.empty():
            batch.append(outputs.get_nowait())
        if batch:
            batches.append(batch)
            await signal.pause()
        else:
            await signal.wait()
    return batches, time.perf_counter()


def run(least_gap, values, seconds):
    """Put ``values`` from another thread, ``seconds()`` apart. Return the lists that were read, and how late the end was."""
    times = []

    async def main():
        outputs, signal = queue.SimpleQueue(), OutputSignal(running_waker(), least_gap)

        def put():
            for value in values:
                time.sleep(seconds())
                times.append(time.perf_counter())
                outputs.put(value)
                signal.set(value == END)

        thread = threading.Thread(target=put)
        thread.start()
        batches, moment = await asyncio.wait_for(read(outputs, signal), 60)
        await asyncio.to_thread(thread.join)
        return batches, moment

    batches, moment = asyncio.run(main())
    return batches, moment - times[-1]


@pytest.mark.parametrize("least_gap", [0, 0.002])
def test_every_output_is_read_in_order(least_gap):
    draw = random.Random(0)
    values = [*range(400), END]
    batches, _ = run(least_gap, values, lambda: draw.choice((0, 0, 0.0002, 0.003)))
    assert [value for batch in batches for value in batch] == values


def test_fast_outputs_are_read_together():
    batches, _ = run(30, [*range(50), END], lambda: 0.001)
    assert len(batches) <= 4  # two at once, and what is left with the end
    assert batches[-1][-1] == END


def test_the_end_does_not_wait_for_a_pause():
    _, late = run(30, [0, 1, 2, END], lambda: 0.02)
    assert late < 15


def test_slow_outputs_are_read_one_by_one():
    batches, _ = run(0.001, [*range(10), END], lambda: 0.05)
    assert len(batches) >= 6
