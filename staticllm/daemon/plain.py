"""Serves a model as it is: each infer request of a client is one of OpenVINO's own, and its calls take turns on the device.

Models without states are stateless calls. A model with states keeps them in the client's own infer request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.daemon.compiling import compile_model, is_virtual
from staticllm.daemon.devices import Devices
from staticllm.daemon.model_source import ModelSource
from staticllm.daemon.packed.state_guard import StateGuard
from staticllm.devices import check_device, get_core, read_first_tensor
from staticllm.pipelines.costs.model import CallCosts
from staticllm.pipelines.scheduling.device_turns import Ask, Call

read_first_tensor()

Array = NDArray[Any]


class PlainModel:
    """A model that OpenVINO compiled as it is; the clients share its weights."""

    def __init__(self, id: int, compiled: ov.CompiledModel, device: str, devices: Devices, num_bytes: int) -> None:
        """Take the compiled model, the device that was asked for, and the bytes of the weights that each call reads."""
        self.num_bytes = num_bytes
        self.id, self.device, self.compiled, self.devices = id, real_device(compiled, device), compiled, devices
        self.costs, self.turns = CallCosts(), devices.turns(self.device)
        self.num_outputs = len(compiled.outputs)  # ``output_tensors`` takes 40 us
        self.width = max(1, int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")))
        self.mode = "stateful" if compiled.create_infer_request().query_state() else "plain"
        self.names = [port.get_any_name() if port.get_names() else "" for port in compiled.inputs]

    def open(self, owner: int) -> PlainRequest:
        """Return a new infer request of the client ``owner``."""
        return PlainRequest(self, self.compiled.create_infer_request(), owner)

    def get_property(self, name: str) -> object:
        """Return a property of the compiled model.

        Raises:
            RuntimeError: OpenVINO does not know it.
        """
        value: object = self.compiled.get_property(name)
        return value

    def close(self) -> None:
        """Release the compiled model."""
        del self.compiled


class PlainRequest:
    """An infer request of one client. One thread at a time may call the methods."""

    def __init__(self, model: PlainModel, request: ov.InferRequest, owner: int) -> None:
        self._model, self._request, self._owner = model, request, owner
        self._guard = StateGuard(request) if model.mode == "stateful" else None
        self._given: dict[str, Array] = {}  # the inputs of a model with states, which stay until others are given
        self._inputs: dict[int, Array] = {}  # the memory of its input tensors

    def infer(
        self, inputs: Mapping[int, Array], priority: int = 0, wants_last: bool = False
    ) -> tuple[list[Array], Call]:
        """Run a call on ``inputs`` by index, and return the outputs: views, valid until the next call.

        ``wants_last`` is a hint for packed models, and means nothing here.

        Raises:
            RuntimeError: OpenVINO refused the inputs.
            PromptError: they do not fit the states of a language model.
        """
        model, request = self._model, self._request
        if self._guard is not None:
            self._check(self._guard, inputs)
        for index, array in inputs.items():
            self._set_input(index, array)
        shapes = tuple(array.shape for array in inputs.values())
        ask = Ask(self._owner, model.costs.expected(shapes), priority, model.id, model.width, num_bytes=model.num_bytes)
        with model.turns.turn(ask) as call:
            start = time.perf_counter()
            if self._guard is None:
                request.infer(share_inputs=True, share_outputs=True)
            else:
                self._infer_guarded(self._guard)
            call.taken = time.perf_counter() - start
        model.costs.add(shapes, call.taken)
        return [request.get_output_tensor(index).data for index in range(model.num_outputs)], call

    def _set_input(self, index: int, array: Array) -> None:
        """Copy an input into the request, because clients may write to theirs meanwhile.

        A tensor is used again as long as its shape stays: a device has more work with a new one than a small call takes.

        Raises:
            RuntimeError: OpenVINO refused it.
        """
        known = self._inputs.get(index)
        if known is not None and known.shape == array.shape and known.dtype == array.dtype:
            known[...] = array
            return
        tensor = ov.Tensor(np.array(array))
        self._request.set_input_tensor(index, tensor)
        self._inputs[index] = tensor.data

    def set_priority(self, priority: int) -> None:
        """Do nothing: every call brings its priority, and one that waits has been given it by the devices."""

    def reset(self) -> None:
        """Set all states back."""
        self._request.reset_state()
        if self._guard is not None:
            self._guard.reset()

    def state_names(self) -> list[str]:
        """Return the names of the states."""
        return [state.name for state in self._request.query_state()]

    def get_state(self, index: int) -> Array:
        """Return the value of a state."""
        values: Array = self._request.query_state()[index].state.data
        return values

    def set_state(self, index: int, values: Array) -> None:
        """Set the value of a state.

        Raises:
            PromptError: its type or shape is not that of the state.
            IndexError: there is no such state.
        """
        if self._guard is not None:
            self._guard.check_state(index, values)
            self._guard.forget()
        self._request.query_state()[index].state = ov.Tensor(np.array(values))

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state.

        Raises:
            PromptError: its type or shape is not that of the state.
            IndexError: there is no such state.
        """
        if self._guard is not None:
            self._guard.write_state(index, values)

    def reset_state(self, index: int) -> None:
        """Set one state back."""
        if self._guard is not None:
            self._guard.forget()
        self._request.query_state()[index].reset()

    def _check(self, guard: StateGuard, inputs: Mapping[int, Array]) -> None:
        """Check the inputs of a call."""
        names = self._model.names
        new = {names[index]: array.copy() for index, array in inputs.items() if index < len(names)}
        given = {**self._given, **new}
        guard.check(given)
        self._given = given

    def _infer_guarded(self, guard: StateGuard) -> None:
        """Run a call, and note what it does to the states."""
        try:
            self._request.infer(share_inputs=True, share_outputs=True)
        except BaseException:
            guard.forget()
            raise
        guard.count(self._given)

    def profile(self) -> list[dict[str, object]]:
        """Return the times of the nodes in the last call; the model must be compiled with ``PERF_COUNT``."""
        return [
            {"node_name": node.node_name, "node_type": node.node_type, "exec_type": node.exec_type,
             "status": node.status.name, "real_us": node.real_time.microseconds, "cpu_us": node.cpu_time.microseconds}
            for node in self._request.profiling_info
        ]  # fmt: skip

    def cancel(self) -> None:
        """Do nothing: a call is one device call, which nothing can end."""

    def close(self) -> None:
        """Release the infer request and its memory."""
        del self._request


def real_device(compiled: ov.CompiledModel, asked: str) -> str:
    """Return the device that runs the model if the client asked for ``AUTO`` or the like, so that all take turns on it."""
    if not is_virtual(asked):
        return asked
    try:
        first = next(iter(compiled.get_property("EXECUTION_DEVICES")), asked)
    except RuntimeError:
        return asked
    return str(first).strip("()")


def compile_plain(source: ModelSource, id: int, devices: Devices) -> PlainModel:
    """Compile a model as it is.

    Raises:
        DeviceError: the device is not on this machine.
        RuntimeError: OpenVINO or the device refuses it.
    """
    core = get_core()
    if not is_virtual(source.device):
        check_device(core, source.device)
    compiled = compile_model(source)
    return PlainModel(id, compiled, source.device, devices, source.num_bytes)
