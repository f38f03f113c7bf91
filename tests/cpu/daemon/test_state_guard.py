"""Tests that calls of stateful models whose sizes or beams do not fit the states are refused, and that the states stay usable."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov
import pytest

from staticllm.daemon.models.plain import PlainModel
from staticllm.daemon.packed.replay import Caller, OriginalModel, Replay
from staticllm.daemon.sharing.device_scheduler import DeviceScheduler, EngineId
from staticllm.daemon.sharing.devices import Devices
from staticllm.errors import PromptError
from tests.support.attach.packed_programs import EXACT

NAMES = ("input_ids", "attention_mask", "position_ids", "beam_idx")


def call(num_past, columns, batch=2, **changes):
    inputs = {
        "input_ids": np.full((batch, columns), 7, np.int64), "attention_mask": np.ones((batch, num_past + columns), np.int64),
        "position_ids": np.tile(np.arange(num_past, num_past + columns), (batch, 1)),
        "beam_idx": np.arange(batch, dtype=np.int32),
    }  # fmt: skip
    return inputs | changes


@pytest.fixture(params=["as it is", "a replay"])
def request_of(request, model_path):
    """A function that runs a call, one that sets a state, and one that reads its shape, of the same original model."""
    xml = str(model_path("llama") / "openvino_model.xml")
    if request.param == "a replay":
        own = {"scheduler": DeviceScheduler(), "compiling": threading.Lock(), "engine": EngineId(1), "num_bytes": 0}
        replay = Replay(OriginalModel(ov.Core().read_model(xml), "CPU", EXACT, **own), Caller())
        return replay.infer, replay.set_state, lambda: tuple(replay.states()[0].state.shape)
    model = PlainModel(1, ov.Core().compile_model(xml, "CPU", EXACT), "CPU", Devices(), 0)
    own = model.open(1)

    def infer(inputs):
        places = {model.names.index(name): array for name, array in inputs.items() if name in model.names}
        return own.call(places).outputs[0].copy()

    return infer, own.set_state, lambda: own.get_state(0).shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"beam_idx": np.array([0, 2], np.int32)}, "beam_idx has 2"),
        ({"beam_idx": np.array([-1, 0], np.int32)}, "beam_idx has -1"),
        ({"beam_idx": np.array([0], np.int32)}, "beam_idx has the shape"),
        ({"attention_mask": np.ones((2, 5), np.int64)}, "attention_mask has the shape"),
        ({"attention_mask": np.ones((1, 7), np.int64)}, "attention_mask has the shape"),
        ({"input_ids": np.zeros((2, 0), np.int64)}, "at least one token"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(request_of, changes, reason):
    infer, _, _ = request_of
    infer(call(0, 5))
    with pytest.raises(PromptError, match=reason) as error:
        infer(call(5, 2, **changes))
    assert "\n" not in str(error.value)
    after = infer(call(5, 2))
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after[0], after[1], atol=1e-6)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_a_state_is_written_in_its_own_type_and_shape(kind, model_path):
    """Whether a write changes the state is the device's: those of attention are copies on the CPU."""
    xml = str(model_path("llama") / "openvino_model.xml")
    own = PlainModel(1, ov.Core().compile_model(xml, "CPU", EXACT), "CPU", Devices(), 0).open(1)
    shape = own.get_state(0).shape
    own.write_state(0, np.zeros(shape, np.float32))
    with pytest.raises(PromptError, match="state 0 is written as"):
        own.write_state(0, np.zeros((*shape, 1) if kind is np.float32 else shape, kind))


def test_a_state_of_another_type_or_shape_is_refused(request_of):
    infer, set_state, shape_of = request_of
    infer(call(0, 5))
    shape = shape_of()
    for wrong in (np.zeros((3, 8), np.float32), np.zeros(shape, np.float64), np.zeros((*shape[:-1], 3), np.float32)):
        with pytest.raises(PromptError, match="state 0 gets"):
            set_state(0, wrong)
    assert np.isfinite(infer(call(5, 1))).all()
    longer = (*shape[:2], 9, shape[3])
    set_state(0, np.zeros(longer, np.float32))
    with pytest.raises(PromptError, match="reset them"):  # the other states have fewer columns
        infer(call(6, 1))


@pytest.mark.parametrize("kind", [np.int32, np.int8, np.uint8, np.float16])
def test_a_state_takes_the_types_that_openvino_converts(kind, model_path):
    xml = str(model_path("llama") / "openvino_model.xml")
    model = PlainModel(1, ov.Core().compile_model(xml, "CPU", EXACT), "CPU", Devices(), 0)

    def after(*types):
        own = model.open(1)
        own.call({model.names.index(name): array for name, array in call(0, 5).items() if name in model.names})
        for index in range(len(own.state_names()) if types else 0):
            values = np.random.default_rng(index).integers(0, 3, own.get_state(index).shape)
            own.set_state(index, values.astype(types[0]))
        inputs = {model.names.index(name): array for name, array in call(5, 1).items() if name in model.names}
        return own.call(inputs).outputs[0].copy()

    assert np.array_equal(after(kind), after(np.float32))
    assert not np.allclose(after(kind), after(), atol=1e-3), "the state makes a difference"
