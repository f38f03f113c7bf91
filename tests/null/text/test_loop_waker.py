"""Tests that readers of an event loop are woken from other threads, by few calls into the loop and never too late."""

import asyncio
import gc
import threading
import weakref

from staticllm.pipelines.text.readers import LoopWaker, running_waker

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
