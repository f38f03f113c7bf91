"""The memory between the parts of a chain: no value is lost before its last reader, and layers take turns with few buffers."""

from __future__ import annotations

import numpy as np
import openvino as ov
from hypothesis import given
from hypothesis import strategies as st

from staticllm.compiler_passes.blocks.chain_model import OfWire, OfWireRows, WireType
from staticllm.compiler_passes.compiling.chain import ChainPlan, PlannedCall, make_wires, wire_bytes

BYTES = 64


def plan_of(calls, num_wires):
    wires = tuple(WireType((1, BYTES), ov.Type.u8) for _ in range(num_wires))
    return ChainPlan(("device",), tuple(calls), wires, (), ())


def layers(count):
    """Return a chain whose host writes a hidden value and a shared one, which each layer reads."""
    host = PlannedCall(0, (), (OfWire(0), OfWire(1)))
    blocks = [PlannedCall(0, (OfWire(1 + n if n else 0), OfWire(1)), (OfWire(n + 2),)) for n in range(count)]
    return plan_of([host, *blocks], count + 2)


@st.composite
def plans(draw):
    """Return a chain of calls, each of which reads some of the wires that are written by then and writes new ones."""
    calls = [PlannedCall(0, (), tuple(map(OfWire, range(draw(st.integers(1, 3))))))]
    num_wires = len(calls[0].outputs)
    for _ in range(draw(st.integers(1, 8))):
        read = draw(st.lists(st.integers(0, num_wires - 1), min_size=1, max_size=3))
        count = draw(st.integers(0, 2))
        kinds = [draw(st.sampled_from([OfWire, lambda number: OfWireRows(number, "rows")])) for _ in read]
        inputs = tuple(kind(number) for kind, number in zip(kinds, read, strict=True))
        calls.append(PlannedCall(0, inputs, tuple(OfWire(num_wires + n) for n in range(count))))
        num_wires += count
    return plan_of(calls, num_wires)


def check(plan):
    """Run a plan whose calls write the numbers of their wires, and check what each call reads while it writes."""
    memory = [wire.memory for wire in make_wires(plan)]
    for call in plan.calls:
        for target in call.outputs:
            memory[target.number][:] = target.number
        for end in (*call.inputs, *call.outputs):
            assert np.all(memory[end.number] == end.number), (end, call)


@given(plans())
def test_no_wire_is_overwritten_before_its_last_reader_has_run(plan):
    check(plan)


def test_layers_take_turns_with_two_buffers():
    plan = layers(12)
    check(plan)
    assert wire_bytes(plan) == 3 * BYTES, "two hidden values, and what all layers read"
