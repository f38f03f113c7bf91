"""What this process holds of the system, counted while the garbage collector does not run."""

import gc
import time
from contextlib import contextmanager
from pathlib import Path

import openvino as ov

PROCESS = Path("/proc/self")


def num_threads():
    return len(list((PROCESS / "task").iterdir()))


def num_files():
    return len(list((PROCESS / "fd").iterdir()))


def programs():
    """Return the compiled models that Python holds."""
    return [held for held in gc.get_objects() if isinstance(held, ov.CompiledModel)]


@contextmanager
def no_collector():
    """Run a block without the garbage collector, so that only what is dropped is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_gives_back(first, *uses):
    """Check that each of ``uses`` gives back all programs, threads and files that it took.

    ``first`` is not measured: it starts the threads that OpenVINO keeps for the process.
    """
    with no_collector():
        first()
        time.sleep(0.5)  # threads that have ended are counted a moment longer
        threads, files, known = num_threads(), num_files(), {id(held) for held in programs()}
        for use in uses:
            use()
            left = [held for held in programs() if id(held) not in known]
            assert not left, use
            end = time.monotonic() + 5
            while num_threads() > threads and time.monotonic() < end:  # one that has ended is counted a moment longer
                time.sleep(0.02)
            assert num_threads() <= threads, use
            assert num_files() <= files, use
