"""Serves a stateful language model to connections, in our engine where that is possible, else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import openvino as ov

from staticllm.daemon.compiling import read
from staticllm.daemon.devices import Devices
from staticllm.daemon.model_source import ModelSource, Value
from staticllm.daemon.packed.packed_model import PackedModel
from staticllm.daemon.packed.packed_request import PackedRequest
from staticllm.daemon.packed.replay import Array
from staticllm.daemon.plain import PlainModel, compile_plain, real_device
from staticllm.pipelines.engine.device_use import DeviceUse
from staticllm.pipelines.scheduling.device_turns import Call


class PackedService:
    """A packed model and the names of its inputs, which clients give by number."""

    mode = "packed"

    def __init__(
        self, id: int, model: PackedModel, source: ModelSource, inputs: Sequence[str], devices: Devices
    ) -> None:
        assert model.engine is not None, "it runs in an engine"
        self.id, self.model, self.inputs = id, model, tuple(inputs)
        self.device = real_device(model.program, source.device)
        self._config = dict(source.config)
        model.share_device(DeviceUse(devices.turns(self.device), -id, source.num_bytes), devices.compiling)

    def open(self, owner: int) -> PackedService.Request:
        """Return a new infer request of the client ``owner``."""
        return self.Request(self, owner)

    def get_property(self, name: str) -> object:
        """Return a property: as the client set it, or of one of our programs.

        Raises:
            RuntimeError: OpenVINO does not know it.
        """
        known: dict[str, Value] = self._config
        return known[name] if name in known else self.model.program.get_property(name)

    def close(self) -> None:
        """End the engine."""
        self.model.close()

    class Request:
        """An infer request of one client. One thread at a time may call the methods."""

        def __init__(self, service: PackedService, owner: int) -> None:
            self._names = service.inputs
            self._request: PackedRequest = service.model.open(owner)

        def infer(
            self, inputs: Mapping[int, Array], priority: int = 0, wants_last: bool = False
        ) -> tuple[list[Array], Call]:
            """Run a call on ``inputs`` by number, and return the logits.

            Raises:
                PromptError, RuntimeError, ClosedError: as for ``PackedRequest.infer``.
            """
            self._request.set_priority(priority)
            named = {self._names[index]: array for index, array in inputs.items() if 0 <= index < len(self._names)}
            logits = self._request.infer(named, "last" if wants_last else "all")
            times = self._request.times
            return [logits], Call(times.queued_seconds, times.device_seconds)

        def set_priority(self, priority: int) -> None:
            """Change the priority, also of a call that runs. Any thread may call."""
            self._request.set_priority(priority)

        def reset(self) -> None:
            """Forget all tokens."""
            self._request.reset_state()

        def state_names(self) -> list[str]:
            """Return the names of the states."""
            return self._request.state_names()

        def get_state(self, index: int) -> Array:
            """Return the value of a state."""
            return self._request.get_state(index)

        def set_state(self, index: int, values: Array) -> None:
            """Set the value of a state."""
            self._request.set_state(index, values)

        def write_state(self, index: int, values: Array) -> None:
            """Write values into the tensor of a state."""
            self._request.write_state(index, values)

        def reset_state(self, index: int) -> None:
            """Set one state back."""
            self._request.reset_one_state(index)

        def profile(self) -> list[dict[str, object]]:
            """Raise an error, because the nodes of our programs are not those of the client's model.

            Raises:
                RuntimeError: always.
            """
            raise RuntimeError(
                "the model shares calls with other programs: profile it without the daemon, or with --exact"
            )

        def cancel(self) -> None:
            """End a call before its next device call; any thread may call."""
            self._request.cancel()

        def close(self) -> None:
            """Give the tokens' keys and values back; they stay cached for requests that begin alike."""
            self._request.close()


def compile_model_of(source: ModelSource, id: int, devices: Devices) -> PackedService | PlainModel:
    """Compile a client's model: packed if it is a language model that can be, else as it is.

    Raises:
        ModelError, DeviceError, RuntimeError: it cannot be read, or the device refuses it.
    """
    if source.mode == "auto" and _has_states(read(source)):
        model = PackedModel(source.xml, source.device, dict(source.config), source.weights)
        if model.reason is None:
            names = [port.get_any_name() for port in read(source).inputs]
            return PackedService(id, model, source, names, devices)
        model.close()
    return compile_plain(source, id, devices)


def _has_states(model: ov.Model) -> bool:
    return bool(model.get_variables())
