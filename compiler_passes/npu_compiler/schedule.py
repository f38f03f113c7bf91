"""Reads the schedule that the NPU compiler predicts for a program: a Chrome trace of DMA, DPU and SHAVE tasks.

The times come from the compiler's cost model, not from a device. The file may contain anything: it is bounded, and every value
is checked before it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from staticllm.errors import DeviceError, shown

from ..compiling.npu_compiler import LayerTime, Schedule
from ..compiling.npu_platform import Platform

MAX_TRACE = 128 << 20
"""The most bytes of a trace. A block of a 0.5B model has 0.2 MB, a whole program of 24 such blocks 6 MB."""
MAX_US = 1e12
_ENGINES = {"DMA": "DMA", "DPU": "DPU", "SHAVE": "SW"}
_LAYER_TIMES = {"DMA": "DMA time", "DPU": "DPU time", "SHAVE": "Shave time"}
_UNITS = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|us|ns|s)(?:\s+|$)")
_SHAPE = re.compile(r"\[?((?:\d{1,12}x){1,12})[a-z]{1,8}(\d{1,2})")
_LARGE_BYTES = 16 << 10
_SLOW_BYTES_PER_US = 10e3
_TASK_US = 0.85
_TOO_MUCH = 0.75
_Event: TypeAlias = Mapping[str, Any]


def read_schedule(data: bytes, platform: Platform) -> Schedule:
    """Return the schedule of a compiler's trace.

    Raises:
        DeviceError: it has more than ``MAX_TRACE`` bytes, or is not such a trace.
    """
    if len(data) > MAX_TRACE:
        raise DeviceError(f"the compiler's schedule has {len(data)} bytes, at most {MAX_TRACE} are read: {_REMEDY}")
    try:
        document = json.loads(data)
        events = [_checked_event(event) for event in _list_of(document["traceEvents"]) if event.get("ph") == "X"]
        statistics = document["taskStatistics"]
        total = _number(statistics["total duration"])
        engines = {engine: _number(statistics[f"{key} duration"]) for engine, key in _ENGINES.items()}
        sums = {engine: _number(statistics[f"Sum of {key} task durations"]) for engine, key in _ENGINES.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeviceError(
            f"the compiler's schedule is damaged ({type(error).__name__} {shown(str(error))}): {_REMEDY}"
        ) from None
    tasks = [event for event in events if event.get("cat") == "DMA"]
    saved = _saved_by_repricing(tasks) if platform.prices_4_bit_as_16 else 0.0
    return Schedule(total, max(total - saved, 0.0), engines, sums, len(tasks), _layers(events))


_REMEDY = "compile without a schedule, or install the version of openvino again"


def _list_of(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("traceEvents is no list")
    return value


def _number(value: Any) -> float:
    """Return a number of microseconds. Raises ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_US:  # NaN is not in it
        raise ValueError(f"a time of {shown(value)} us")
    return float(value)


def _checked_event(event: Any) -> _Event:
    """Return a task or layer whose duration, name and arguments can be used. Raises ``ValueError``."""
    _number(event.get("dur"))
    if not isinstance(event.get("name"), str) or not isinstance(event.get("args", {}), dict):
        raise ValueError(f"the event {shown(event)}")
    return event  # type: ignore[no-any-return]


def _layers(events: list[_Event]) -> tuple[LayerTime, ...]:
    """Return the layers, dearest first; parts of one node are added up."""
    found: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.get("cat") != "Layer":
            continue
        arguments = event.get("args", {})
        times = found[event["name"], str(arguments.get("Layer type", ""))]
        for engine, key in _LAYER_TIMES.items():
            times[engine] += _microseconds(str(arguments.get(key, "")))
    rows = [LayerTime(*key, times["DMA"], times["DPU"], times["SHAVE"]) for key, times in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.total, row.name)))


def _microseconds(text: str) -> float:
    """Return the time of ``"1ms 49us 493ns"``; 0.0 for anything else."""
    return math.fsum(float(number) * _UNITS[unit] for number, unit in _TIME.findall(text[:200]))


def _saved_by_repricing(tasks: list[_Event]) -> float:
    """Return the microseconds by which 4-bit reads are too dear, on the engine where they are most.

    The trace gives their bytes, but not their type. Of large dense reads, only those of 4-bit weights are slower than 10 GB/s:
    the model charges four times the bytes, at 32 GB/s, and 0.85 us per task.
    """
    saved: defaultdict[object, float] = defaultdict(float)
    for task in tasks:
        duration = float(task["dur"])
        arguments = task.get("args", {})
        size = _bytes_of(arguments.get("Input tensor shape"))
        is_dense = arguments.get("Input tensor shape") == arguments.get("Input tensor strides")
        is_read = (arguments.get("Source memory:"), arguments.get("Destination memory:")) == ("DDR", "CMX")
        if is_read and is_dense and size >= _LARGE_BYTES and size < duration * _SLOW_BYTES_PER_US:
            saved[str(task.get("tid"))] += (duration - _TASK_US) * _TOO_MUCH
    return max(saved.values(), default=0.0)


def _bytes_of(shape: Any) -> float:
    """Return the bytes of a tensor such as ``[1x64xf16]``; 0.0 for anything else."""
    found = _SHAPE.match(shape) if isinstance(shape, str) else None
    if found is None:
        return 0.0
    return math.prod(float(size) for size in found[1].split("x") if size) * int(found[2]) / 8


def heaviest(schedule: Schedule, count: int) -> Iterator[LayerTime]:
    """Yield the sums over all layers of one kind, dearest first, at most ``count``; their names are empty."""
    found: defaultdict[str, list[LayerTime]] = defaultdict(list)
    for layer in schedule.layers:
        found[layer.kind].append(layer)
    rows = [
        LayerTime(
            "", kind, *(math.fsum(getattr(each, engine) for each in of_kind) for engine in ("dma", "dpu", "shave"))
        )
        for kind, of_kind in found.items()
    ]
    yield from sorted(rows, key=lambda row: -row.total)[:count]
