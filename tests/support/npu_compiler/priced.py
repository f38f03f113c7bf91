"""A compiler for tests that compiles nothing, and whose schedules have the prices that a test sets."""

from __future__ import annotations

import json
import re

from staticllm.compiler_passes.compiling.npu_compiler import LayerTime, NPUProgram, Schedule
from staticllm.errors import DeviceError

TAIL_US, REQUIREMENTS = 50.0, "npu=4000;t=4"
_NAME = re.compile(r"(\w+?)\d+ of \w+\[(\d+)(?:x(\d+))?")


def block_us(rows, kv_len):
    """Return a price by which few large calls are cheapest."""
    return 100.0 + rows + kv_len / 64


class PricedCompiler:
    """Prices a block by ``price`` of its program's rows and KV length, and a tail by ``TAIL_US``.

    ``share``: repriced microseconds as a share of them. A part whose name begins with ``refused`` is refused.
    """

    version = "a fake compiler"

    def __init__(self, price=block_us, share=1.0, refused="no part"):
        self.price, self.share, self.refused = price, share, refused
        self.compiled = []
        self.is_closed = False

    def compile(self, model, platform, properties=None, *, name="", seconds=1.0, with_schedule=True):
        if name.startswith(self.refused):
            raise DeviceError(f"the NPU compiler crashed on {name}, with code 3: report the crash")
        kind, rows, kv_len = _NAME.match(name).groups("0")
        total = self.price(int(rows), int(kv_len)) if kind == "block" else TAIL_US
        self.compiled.append(name)
        layers = (LayerTime("a", "MatMul", total, 2.0, 1.0), LayerTime("b", "Softmax", 1.0, 0.0, 3.0))
        engines = {"DMA": total, "DPU": 2.0, "SHAVE": 4.0}
        schedule = Schedule(total, total * self.share, engines, engines, 7, layers)
        trace = json.dumps({"traceEvents": [], "name": name}).encode()
        return NPUProgram(name.encode(), schedule, 0.5, REQUIREMENTS, trace)

    def close(self):
        self.is_closed = True
