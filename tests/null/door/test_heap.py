"""Large blocks of the heap return to the system when they are freed. It changes the process, so it runs in another one."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, numpy as np
from staticllm.system.heap import return_large_blocks
from staticllm.pipelines.diagnostics.process_memory import private_bytes

def left():
    blocks = [np.ones(1 << 18) for _ in range(50)]  # 2 MiB each
    blocks.append(np.ones(1))
    kept = blocks[::10]
    before = private_bytes()
    del blocks
    return (before - private_bytes()) >> 20

np.ones(3 << 20)  # glibc has freed 24 MiB: blocks of 2 MiB come from its heap from now on
np.ones(3 << 20)
is_possible = return_large_blocks() if sys.argv[1] == "yes" else False
print(int(is_possible), left())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_freed_blocks_between_used_ones_return_to_the_system():
    def run(wanted):
        done = subprocess.run([sys.executable, "-c", SCRIPT, wanted], capture_output=True, text=True, check=True)
        return tuple(map(int, done.stdout.split()))

    is_possible, returned = run("yes")
    if not is_possible:
        pytest.skip("another C library")
    assert returned >= run("no")[1] + 20, "45 of 50 blocks of 2 MiB were freed"


SMALL = """
from staticllm.system.heap import return_free_memory
from staticllm.pipelines.diagnostics.process_memory import private_bytes

blocks = [bytes(2000) for _ in range(10000)]  # small ones, of Python's allocator and of the heap
kept = blocks[-1]
before = private_bytes()
del blocks
freed = private_bytes()
print(int(return_free_memory()), (freed - private_bytes()) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the function")
def test_free_memory_below_a_used_block_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, check=True)
    is_possible, returned = map(int, done.stdout.split())
    if not is_possible:
        pytest.skip("another C library")
    assert returned >= 15, "20 MB of blocks were freed"


def test_other_systems_are_left_alone(monkeypatch):
    from staticllm.system import heap

    monkeypatch.setattr(heap.sys, "platform", "win32")
    monkeypatch.setattr(heap.ctypes, "CDLL", None)
    assert heap.return_large_blocks() is False
    assert heap.return_free_memory() is False
