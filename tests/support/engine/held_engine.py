"""An engine whose device is held, so that a test sees what waits for it."""

from __future__ import annotations

import threading

SECONDS = 60


def hold(llm):
    """Hold the device of a pipeline's engine; return the event that frees it, and the thread."""
    is_free, is_held = threading.Event(), threading.Event()

    def wait():
        is_held.set()
        is_free.wait(SECONDS)

    thread = threading.Thread(target=llm.engine.run_between_steps, args=(wait,))
    thread.start()
    assert is_held.wait(SECONDS)
    return is_free, thread
