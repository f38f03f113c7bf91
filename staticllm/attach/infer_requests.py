"""The places where an infer request can run: the daemon, on a connection of its own, or the program itself."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
from openvino._pyopenvino import Tensor

from ..wire.channel import Channel, NoRoomError, renew_in_children
from ..wire.endpoint import SilentError
from ..wire.messages import EARLIER, QUIET, Kind, Message, ProtocolError
from ..wire.tensors import Array
from .client import DaemonGoneError, UnavailableError, checked
from .hints import wants_last

MICROSECOND = timedelta(microseconds=1)


class CallOutputs(NamedTuple):
    """The result of a call: arrays in the order of the outputs, valid until the next call, and its time in microseconds."""

    outputs: list[Array]
    device_us: int


class DaemonRequest:
    """An infer request in the daemon. One thread at a time may call the methods.

    ``epoch`` is that of the client. ``is_closed``: it cannot be used any more. So it is after an exception in the middle of an
    exchange, from which a connection does not recover, and after a ``reset`` that failed in the daemon: the next method that
    asks for something raises that.
    """

    def __init__(self, channel: Channel, model: int, epoch: int) -> None:
        self._channel = channel
        self._model = model
        self.epoch = epoch
        self._number = 0
        self.is_closed = False
        self.is_running = False
        renew_in_children(self)
        try:
            checked(self._ask(Message(Kind.REQUEST, model)))
        except BaseException:
            self.close()
            raise

    def renew(self) -> None:
        """Give the request up in a forked child, which would read the answers to its parent."""
        self.is_closed = True

    def start(self, inputs: dict[int, Array]) -> None:
        """Send a call.

        Raises:
            RefusedError: the daemon refused it.
            DaemonGoneError: the daemon has ended.
        """
        self._number += 1
        message = Message(Kind.INFER, 1, self._number, body={"wanted": "last"} if wants_last() else {})
        self._send(message, list(inputs.values()), list(inputs))
        self.is_running = True

    def poll(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` for the result of the call that runs; return whether ``finish`` would not wait."""
        found: bool = self._exchange(self._channel.poll, seconds)
        return found

    def finish(self) -> CallOutputs:
        """Wait for the result of the call that runs.

        Raises:
            DaemonGoneError: the daemon has ended.
            Exception: the one that the call raised.
        """
        answer, arrays = self._exchange(self._result)
        self.is_running = False
        self._checked(answer)
        if answer.number != self._number:
            self.close()
            raise DaemonGoneError(f"the daemon answered call {answer.number} instead of {self._number}")
        return CallOutputs(arrays, int(answer.time * 1e6))

    def run(self, inputs: dict[int, Array]) -> None:
        self.start(inputs)
        self.finish()

    def reset(self) -> None:
        """Set all states back; does not wait for it."""
        self._exchange(self._channel.send, Message(Kind.RESET, 1, flags=QUIET))

    def state_names(self) -> list[str]:
        return [str(name) for name in self._checked(self._ask(Message(Kind.STATES, 1))).body.get("names", [])]

    def get_state(self, index: int) -> Array:
        """Return a copy of a state."""
        (values,) = self._arrays(self._checked(self._ask(Message(Kind.GET_STATE, 1, body={"index": index}))))
        return values.copy()

    def set_state(self, index: int, values: Array) -> None:
        self._send(Message(Kind.SET_STATE, 1, body={"index": index}), [values], [0])
        self._checked(self._exchange(self._channel.receive))

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state."""
        self._send(Message(Kind.SET_STATE, 1, body={"index": index, "in_place": True}), [values], [0])
        self._checked(self._exchange(self._channel.receive))

    def reset_state(self, index: int) -> None:
        self._checked(self._ask(Message(Kind.RESET_STATE, 1, body={"index": index})))

    def profile(self) -> list[dict[str, Any]]:
        """Return the times of the nodes in the last call."""
        nodes = self._checked(self._ask(Message(Kind.PROFILE, 1))).body.get("nodes", [])
        return [node for node in nodes if isinstance(node, dict)]

    def close(self) -> None:
        """End the request; the daemon frees it. A second call does nothing."""
        self.is_closed = True
        self.is_running = False
        self._channel.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    def _checked(self, answer: Message) -> Message:
        """Return an answer that carries a result.

        Raises:
            Exception: that of the call, or of a ``reset`` before it.
        """
        if not answer.flags & EARLIER:
            return checked(answer)
        self.close()
        try:
            return checked(answer)
        except Exception as error:
            raise type(error)(f"reset_state() failed, so this call was not run: {error}") from error

    def _arrays(self, answer: Message) -> list[Array]:
        return [array for _, array in self._exchange(self._channel.tensors_of, answer)]

    def _send(self, message: Message, arrays: list[Array], names: list[int]) -> None:
        """Send a message with tensors, in a larger block if they need one."""
        if size := self._exchange(self._send_or_size, message, arrays, names):
            self._checked(self._ask(Message(Kind.REQUEST, self._model, body={"block": size})))
            self._exchange(self._channel.send_tensors, message, arrays, names)

    def _send_or_size(self, message: Message, arrays: list[Array], names: list[int]) -> int:
        """Send a message with tensors and return 0; or the bytes that they need, if the block has no room for them."""
        try:
            self._channel.send_tensors(message, arrays, names)
        except NoRoomError as error:
            return error.size
        return 0

    def _result(self) -> tuple[Message, list[Array]]:
        answer = self._channel.receive()
        return answer, [array for _, array in self._channel.tensors_of(answer)]

    def _ask(self, message: Message) -> Message:
        self._exchange(self._channel.send, message)
        answer: Message = self._exchange(self._channel.receive)
        return answer

    def _exchange(self, step: Any, *arguments: Any) -> Any:
        if self.is_closed:
            raise DaemonGoneError("the connection is closed")
        try:
            return step(*arguments)
        except SilentError as error:
            self.close()
            raise UnavailableError(str(error)) from error
        except (EOFError, OSError, ProtocolError) as error:
            self.close()
            raise DaemonGoneError(f"the daemon has gone: {error or type(error).__name__}") from error
        except BaseException:  # Ctrl-C: half of a message may have been read
            self.close()
            raise


class NativeRequest:
    """An infer request of OpenVINO with the methods of ``DaemonRequest``."""

    is_closed = False
    epoch = 0
    """It does not end with a daemon."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._inputs: list[Any] = []
        self.is_running = False

    def start(self, inputs: dict[int, Array]) -> None:
        self._inputs = [Tensor(np.array(array)) for array in inputs.values()]
        for index, tensor in zip(inputs, self._inputs, strict=True):
            self._request.set_input_tensor(index, tensor)
        self._request.start_async()
        self.is_running = True

    def poll(self, seconds: float | None) -> bool:
        found: bool = self._request.wait_for(int((3600.0 if seconds is None else seconds) * 1000))
        return found

    def finish(self) -> CallOutputs:
        self.is_running = False
        self._request.wait()
        outputs = [tensor.data for tensor in self._request.output_tensors]
        return CallOutputs(outputs, int(self._request.latency * 1000))

    def run(self, inputs: dict[int, Array]) -> None:
        self.start(inputs)
        self.finish()

    def reset(self) -> None:
        self._request.reset_state()

    def state_names(self) -> list[str]:
        return [state.name for state in self._request.query_state()]

    def get_state(self, index: int) -> Array:
        values: Array = self._request.query_state()[index].state.data.copy()
        return values

    def set_state(self, index: int, values: Array) -> None:
        self._request.query_state()[index].state = Tensor(np.array(values))

    def write_state(self, index: int, values: Array) -> None:
        self._request.query_state()[index].state.data[...] = values

    def reset_state(self, index: int) -> None:
        self._request.query_state()[index].reset()

    def profile(self) -> list[dict[str, Any]]:
        return [
            {"node_name": node.node_name, "node_type": node.node_type, "exec_type": node.exec_type,
             "status": node.status.name, "real_us": node.real_time // MICROSECOND, "cpu_us": node.cpu_time // MICROSECOND}
            for node in self._request.profiling_info
        ]  # fmt: skip

    def close(self) -> None:
        """Do nothing: the infer request ends with its last reference."""


Place = DaemonRequest | NativeRequest
