"""Tests that a reader of an event loop gets every output, in few pauses, and the last one at once."""

import asyncio
import queue
import random
import threading
import time

import pytest

from staticllm.pipelines.text.readers import OutputSignal, running_waker

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
