"""An infer request that runs natively in the program, in place of one of the daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
from openvino._pyopenvino import Tensor

from ..wire.tensors import Array
from .remote_request import Finished


class LocalRequest:
    """An infer request of OpenVINO with the methods of ``RemoteRequest``."""

    is_closed = False

    def __init__(self, request: Any) -> None:
        self._request = request
        self._inputs: list[Any] = []
        self.is_running = False

    def start(self, inputs: dict[int, Array]) -> None:
        """Start a call."""
        self._inputs = [Tensor(np.array(array)) for array in inputs.values()]
        for index, tensor in zip(inputs, self._inputs, strict=True):
            self._request.set_input_tensor(index, tensor)
        self._request.start_async()
        self.is_running = True

    def poll(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` for the result of the call that runs; return whether ``finish`` would not wait."""
        found: bool = self._request.wait_for(int((3600.0 if seconds is None else seconds) * 1000))
        return found

    def finish(self) -> Finished:
        """Wait for the result of the call that runs."""
        self.is_running = False
        self._request.wait()
        outputs = [tensor.data for tensor in self._request.output_tensors]
        return Finished(outputs, int(self._request.latency * 1000))

    def run(self, inputs: dict[int, Array]) -> None:
        """Run a call and drop its outputs."""
        self.start(inputs)
        self.finish()

    def reset(self) -> None:
        """Set all states back."""
        self._request.reset_state()

    def state_names(self) -> list[str]:
        """Return the names of the states."""
        return [state.name for state in self._request.query_state()]

    def get_state(self, index: int) -> Array:
        """Return a copy of a state."""
        values: Array = self._request.query_state()[index].state.data.copy()
        return values

    def set_state(self, index: int, values: Array) -> None:
        """Set a state."""
        self._request.query_state()[index].state = Tensor(np.array(values))

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state."""
        self._request.query_state()[index].state.data[...] = values

    def reset_state(self, index: int) -> None:
        """Set one state back."""
        self._request.query_state()[index].reset()

    def profile(self) -> list[dict[str, Any]]:
        """Return the times of the nodes in the last call."""
        return [
            {"node_name": node.node_name, "node_type": node.node_type, "exec_type": node.exec_type,
             "status": node.status.name, "real_us": node.real_time.microseconds, "cpu_us": node.cpu_time.microseconds}
            for node in self._request.profiling_info
        ]  # fmt: skip

    def close(self) -> None:
        """Do nothing: the infer request ends with its last reference."""
