"""Serves an unchanged model: each infer request of a client is an OpenVINO infer request, and calls take turns on the device.

Models without states are stateless calls. A model with states keeps them in the client's own infer request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import openvino as ov

from staticllm.daemon.infer_request import Array, CallResult
from staticllm.daemon.packed.replay import StateGuard
from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest
from staticllm.daemon.sharing.devices import Devices, real_device
from staticllm.devices import read_first_tensor
from staticllm.pipelines.costs.model import CallCosts

read_first_tensor()

MICROSECOND = timedelta(microseconds=1)


class PlainModel:
    """A model that OpenVINO compiled unchanged; the clients share its weights."""

    def __init__(self, id: int, compiled: ov.CompiledModel, device: str, devices: Devices, num_bytes: int) -> None:
        """Take the compiled model, the device that was asked for, and the bytes of the weights that each call reads."""
        self.id = id
        self.num_bytes = num_bytes
        self.compiled = compiled
        self.device = real_device(compiled, device)
        self.scheduler = devices.scheduler(self.device)
        self.costs = CallCosts()
        self.width = max(1, int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")))
        self.mode = "stateful" if compiled.create_infer_request().query_state() else "plain"
        self.names = [port.get_any_name() if port.get_names() else "" for port in compiled.inputs]

    def open(self, client: ClientId) -> PlainRequest:
        return PlainRequest(self, self.compiled.create_infer_request(), client)

    def describe(self) -> dict[str, object]:
        """Return nothing: the client knows the model."""
        return {}

    def get_property(self, name: str) -> object:
        value: object = self.compiled.get_property(name)
        return value

    def close(self) -> None:
        del self.compiled


class PlainRequest:
    """An infer request of one client: an ``InferRequest`` on an unchanged model."""

    def __init__(self, model: PlainModel, request: ov.InferRequest, client: ClientId) -> None:
        self._model = model
        self._request = request
        self._client = client
        self._guard = StateGuard(request) if model.mode == "stateful" else None
        self._given: dict[str, Array] = {}  # the inputs of a model with states, which stay until others are given
        self._priority = 0
        self._inputs: dict[int, Array] = {}  # the memory of its input tensors

    def call(self, inputs: Mapping[int, Array], priority: int = 0, wants_last: bool = False) -> CallResult:
        self._priority = priority
        model = self._model
        if self._guard is not None:
            self._check(self._guard, inputs)
        for index, array in inputs.items():
            self._set_input(index, array)
        shapes = tuple(array.shape for array in inputs.values())
        use = DeviceRequest(
            self._client, model.costs.expected(shapes), self._priority, model.id, model.width, num_bytes=model.num_bytes
        )
        with model.scheduler.use(use) as call:
            start = time.perf_counter()
            found = self._run() if self._guard is None else self._run_guarded(self._guard)
            call.taken = time.perf_counter() - start
        model.costs.add(shapes, call.taken)
        return CallResult(list(found.values()), call)

    def _set_input(self, index: int, array: Array) -> None:
        """Copy an input into the request, because clients may write to theirs meanwhile.

        A tensor is used again as long as its shape stays: a device has more work with a new one than a small call takes.
        """
        known = self._inputs.get(index)
        if known is not None and known.shape == array.shape and known.dtype == array.dtype:
            known[...] = array
            return
        tensor = ov.Tensor(np.array(array))
        self._request.set_input_tensor(index, tensor)
        self._inputs[index] = tensor.data

    def set_priority(self, priority: int) -> None:
        """Change the priority of later calls; ``Devices.set_priority`` changes the priority of waiting calls."""
        self._priority = priority

    def reset(self) -> None:
        self._request.reset_state()
        if self._guard is not None:
            self._guard.reset()

    def state_names(self) -> list[str]:
        return [state.name for state in self._request.query_state()]

    def get_state(self, index: int) -> Array:
        values: Array = self._request.query_state()[index].state.data
        return values

    def set_state(self, index: int, values: Array) -> None:
        if self._guard is not None:
            self._guard.check_state(index, values)
            self._guard.forget()
        self._request.query_state()[index].state = ov.Tensor(np.array(values))

    def write_state(self, index: int, values: Array) -> None:
        if self._guard is not None:
            self._guard.write_state(index, values)

    def reset_state(self, index: int) -> None:
        if self._guard is not None:
            self._guard.forget()
        self._request.query_state()[index].reset()

    def _check(self, guard: StateGuard, inputs: Mapping[int, Array]) -> None:
        names = self._model.names
        new = {names[index]: array.copy() for index, array in inputs.items() if index < len(names)}
        given = {**self._given, **new}
        guard.check(given)
        self._given = given

    def _run(self) -> Mapping[ov.ConstOutput, Array]:
        found: Mapping[ov.ConstOutput, Array] = self._request.infer(share_inputs=True, share_outputs=True)
        return found

    def _run_guarded(self, guard: StateGuard) -> Mapping[ov.ConstOutput, Array]:
        try:
            found = self._run()
        except BaseException:
            guard.forget()
            raise
        guard.count(self._given)
        return found

    def profile(self) -> list[dict[str, object]]:
        return [
            {"node_name": node.node_name, "node_type": node.node_type, "exec_type": node.exec_type,
             "status": node.status.name, "real_us": node.real_time // MICROSECOND, "cpu_us": node.cpu_time // MICROSECOND}
            for node in self._request.profiling_info
        ]  # fmt: skip

    def cancel(self) -> None:
        """Do nothing: a call is one device call, which cannot be interrupted."""

    def close(self) -> None:
        del self._request
