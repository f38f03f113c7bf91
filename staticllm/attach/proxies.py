"""The classes of OpenVINO that an attached program gets: their ports, tensors, checks and casts are those of a placeholder."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from enum import Enum, auto
from typing import Any

import numpy as np
from openvino._ov_api import CompiledModel, InferRequest, Model
from openvino._pyopenvino import CompiledModel as CompiledModelBase
from openvino._pyopenvino import ProfilingInfo, Tensor
from openvino.utils.data_helpers import OVDict
from openvino.utils.data_helpers.data_dispatcher import _data_dispatch

from ..wire.channel import renew_in_children
from ..wire.tensors import Array
from .completions import Completions
from .remote_model import MovableRequest, RemoteModel

MAX_TIMEOUT = (1 << 31) - 1
"""The longest time that ``wait_for`` of OpenVINO takes, in ms."""


class AttachedState:
    """One state of a request of the daemon."""

    def __init__(self, request: MovableRequest, index: int, name: str) -> None:
        self._request = request
        self._index = index
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> Tensor:
        values = self._request.get_state(self._index)
        return Tensor(values, shared_memory=True) if values.size else Tensor(values)

    @state.setter
    def state(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"a state must be an openvino.Tensor, not {type(value).__name__}")
        self._request.set_state(self._index, value.data)

    def reset(self) -> None:
        self._request.reset_state(self._index)

    def __repr__(self) -> str:
        return f"<VariableState: {self.name}>"


def states_of(request: MovableRequest) -> list[AttachedState]:
    names = request.state_names() if request.model.is_stateful else []
    return [AttachedState(request, index, name) for index, name in enumerate(names)]


def _forwarded(name: str, prepare: str) -> Any:
    """Return a method that calls ``prepare`` of the request, and then method ``name`` of its placeholder."""

    @functools.wraps(getattr(InferRequest, name))
    def call(self: AttachedInferRequest, *args: Any, **kwargs: Any) -> Any:
        getattr(self, prepare)()
        return getattr(self._placeholder, name)(*args, **kwargs)

    return call


class _PlaceholderRequest(InferRequest):  # type: ignore[misc]
    """The placeholder of a request, with the same tensors and without the checks of ``AttachedInferRequest``."""

    _inputs_data: Any  # of OpenVINO: the arrays that the input tensors lie over

    def __init__(self, placeholder: Any) -> None:
        super().__init__(placeholder)
        self._has_single_input: bool = super()._is_single_input()

    def _is_single_input(self) -> bool:
        return self._has_single_input  # OpenVINO makes a list of all tensors in each call: 20 us


class _Phase(Enum):
    """The call of a request: none, one that runs, or one that Ctrl-C has interrupted."""

    NONE = auto()
    RUNNING = auto()
    INTERRUPTED = auto()


class CallState:
    """The call of a request, and what is known of the last one. Another thread may take its result meanwhile."""

    def __init__(self, remote: MovableRequest) -> None:
        self._remote = remote
        self._phase = _Phase.NONE
        self.is_cancelled = False
        self.has_run = False
        self.latency = 0.0
        self.error: Exception | None = None

    @property
    def is_running(self) -> bool:
        return self._phase is _Phase.RUNNING

    @property
    def is_open(self) -> bool:
        """Whether there is a call whose result was not taken."""
        return self._phase is not _Phase.NONE

    def lasts(self, seconds: float) -> bool:
        """Wait for the end of the call, at most some seconds; return whether it still runs."""
        return self.is_running and not self._remote.poll(seconds)

    def clear(self) -> None:
        """Forget how the last call ended."""
        self._phase = _Phase.NONE
        self.is_cancelled = False
        self.error = None

    def start(self, inputs: dict[int, Array]) -> None:
        self._remote.start(inputs)
        self._phase = _Phase.RUNNING
        self.has_run = True

    def take_result(self) -> list[Array]:
        """Wait for the end of the running call, and return its outputs.

        Raises:
            Exception: the call failed.
        """
        try:
            result = self._remote.finish()
        except BaseException as error:
            is_over = isinstance(error, Exception)  # after Ctrl-C, the request knows how to go on
            self._phase = _Phase.NONE if is_over else _Phase.INTERRUPTED
            raise
        self._phase = _Phase.NONE
        self.latency = result.device_us / 1000
        return result.outputs

    def forget(self) -> None:
        """Forget a call that runs, without waiting."""
        self._phase = _Phase.NONE
        self._remote.forget_call()


class OutputMemory:
    """The outputs of a request. They are copied into the placeholder's tensors when the program asks for them.

    Once it has a tensor, which natively shows the newest values, they are copied at the end of each call: ``is_given_out``.
    ``has_tensors``: the program may give the outputs other memory.
    """

    def __init__(self, placeholder: _PlaceholderRequest) -> None:
        self._placeholder = placeholder
        self._ports = placeholder.model_outputs
        self._shown: list[Array] = []  # the memory of the output tensors after the last call
        self.newest: list[Array] | None = None  # of the last call, and not in the placeholder's tensors yet
        self.is_given_out = False
        self.has_tensors = False

    def results(self, share: bool) -> OVDict:
        newest = self.newest
        if newest is not None and not share and not self.is_given_out:
            return OVDict({port: array.copy() for port, array in zip(self._ports, newest, strict=True)})
        shown = self.show()
        return OVDict({port: (data if share else data.copy()) for port, data in zip(self._ports, shown, strict=True)})

    def show(self) -> list[Array]:
        """Copy the outputs of the last call into the placeholder's tensors; return the memory of these."""
        self.is_given_out = True
        newest = self.newest
        self.newest = None
        if newest is None:
            return [self._placeholder.get_output_tensor(index).data for index in range(len(self._ports))]
        known = [] if self.has_tensors else self._shown
        if [array.shape for array in known] != [array.shape for array in newest]:
            known = [self._memory(index, array.shape) for index, array in enumerate(newest)]
            self._shown = known
        for target, array in zip(known, newest, strict=True):
            target[...] = array
        return known

    def _memory(self, index: int, shape: tuple[int, ...]) -> Array:
        """Return the memory of an output tensor, which gets this shape."""
        tensor = self._placeholder.get_output_tensor(index)
        memory: Array = tensor.data
        if memory.shape != shape:  # ``tensor.shape`` takes 17 us
            tensor.shape = shape
            memory = tensor.data
        return memory


class AttachedInferRequest(InferRequest):  # type: ignore[misc]
    """An infer request whose calls run in the daemon.

    ``on_end`` is called at the end of each ``start_async``, after the callback, with the exception that was raised or None.
    """

    def __init__(self, placeholder: Any, request: MovableRequest, make_compiled: Callable[[Any], Any]) -> None:
        super().__init__(placeholder)
        self._remote = request
        self._make_compiled = make_compiled
        self._placeholder = _PlaceholderRequest(placeholder)
        self._num_inputs = len(self._placeholder.model_inputs)
        self._dtypes = [port.get_element_type().to_dtype() for port in self._placeholder.model_inputs]
        ports = self._placeholder.model_inputs
        self._input_numbers = {name: index for index, port in enumerate(ports) for name in port.get_names()}
        self._lock = threading.RLock()
        self._call = CallState(request)
        self._outputs = OutputMemory(self._placeholder)
        self._callback: Callable[[Any], object] | None = None
        self._userdata: Any = None
        self._completions: Completions | None = None
        self.on_end: Callable[[Exception | None], object] | None = None
        renew_in_children(self)

    def renew(self) -> None:
        """Make the lock anew in a forked child. A call that another thread was waiting for belongs to the parent.

        One that was only started is run again in the child if that waits for it.
        """
        if not self._lock.acquire(blocking=False):
            self.forget_call()
        self._lock = threading.RLock()
        self._completions = None

    def forget_call(self) -> None:
        """Forget a call that runs, without waiting."""
        self._call.forget()

    def __repr__(self) -> str:
        return str(super().__repr__()).replace(AttachedInferRequest.__name__, InferRequest.__name__, 1)

    # calls

    def infer(
        self,
        inputs: Any = None,
        share_inputs: bool = False,
        share_outputs: bool = False,
        *,
        decode_strings: bool = True,
    ) -> OVDict:
        with self._lock:
            self._start(inputs, share_inputs)
            try:
                self._take_result()
                return self._outputs.results(share_outputs)
            except Exception as error:
                self._call.error = error
                raise

    def start_async(self, inputs: Any = None, userdata: Any = None, share_inputs: bool = False) -> None:
        with self._lock:
            if userdata is not None:
                if self._callback is None:
                    warnings.warn("There is no callback function!", RuntimeWarning, stacklevel=2)
                self._userdata = userdata
            self._start(inputs, share_inputs)
            if self._callback is not None or self.on_end is not None:
                if self._completions is None:
                    self._completions = Completions()
                self._completions.put(self._complete)

    def wait(self) -> None:
        """Wait for the end of the call.

        Raises:
            RuntimeError: the call failed.
        """
        if self._completions is not None and not self._completions.is_current_thread():
            self._completions.join(None)
        with self._lock:
            if self._call.is_open:
                self._finish()
            if self._call.error is not None:
                raise self._call.error

    def wait_for(self, timeout: Any) -> bool:
        """Wait for the end of the call, at most ``timeout`` ms; return whether there is a result.

        Raises:
            RuntimeError: the time is negative, or as for ``wait``.
        """
        if (milliseconds := operator.index(timeout)) > MAX_TIMEOUT:
            raise TypeError(f"wait_for({milliseconds}): must be at most {MAX_TIMEOUT} ms")
        if milliseconds < 0:
            raise RuntimeError(f"wait_for({milliseconds}): must not be negative")
        if self._completions is not None and not self._completions.is_current_thread():
            if not self._completions.join(milliseconds / 1000):
                return False
        elif self._call.lasts(milliseconds / 1000):
            return False
        if not self._call.has_run:
            return False
        self.wait()
        return True

    def cancel(self) -> None:
        self._call.is_cancelled = self._call.is_running

    def set_callback(self, callback: Callable[[Any], object], userdata: Any) -> None:
        self._check_idle()
        self._callback = check_callback(callback)
        self._userdata = userdata

    def reset_state(self) -> None:
        self._check_idle()
        self._remote.reset()

    def query_state(self) -> list[Any]:
        self._check_idle()
        return states_of(self._remote)

    # tensors

    def get_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check_idle()
        key = next(iter((*args, *kwargs.values())), None)
        if not isinstance(key, str) or key not in self._input_numbers:
            self._outputs.has_tensors = True
            self._outputs.show()
        return self._placeholder.get_tensor(*args, **kwargs)

    set_tensor = _forwarded("set_tensor", "_give_out")
    set_tensors = _forwarded("set_tensors", "_give_out")
    set_output_tensor = _forwarded("set_output_tensor", "_give_out")
    set_output_tensors = _forwarded("set_output_tensors", "_give_out")
    set_input_tensor = _forwarded("set_input_tensor", "_check_idle")
    set_input_tensors = _forwarded("set_input_tensors", "_check_idle")
    get_input_tensor = _forwarded("get_input_tensor", "_check_idle")
    get_output_tensor = _forwarded("get_output_tensor", "_give_outputs")

    @property
    def input_tensors(self) -> list[Tensor]:
        self._check_idle()
        tensors: list[Tensor] = self._placeholder.input_tensors
        return tensors

    @property
    def output_tensors(self) -> list[Tensor]:
        self._give_outputs()
        tensors: list[Tensor] = self._placeholder.output_tensors
        return tensors

    @property
    def results(self) -> OVDict:
        self._give_outputs()
        results: OVDict = self._placeholder.results
        return results

    # what is known of the last call

    @property
    def userdata(self) -> Any:
        return self._userdata

    @property
    def latency(self) -> float:
        return self._call.latency

    @property
    def profiling_info(self) -> list[ProfilingInfo]:
        self._check_idle()
        return [_profiling_info(node) for node in self._remote.profile()]

    def get_profiling_info(self) -> list[ProfilingInfo]:
        return self.profiling_info

    def get_compiled_model(self) -> Any:
        return self._make_compiled(self._placeholder.get_compiled_model())

    # the work

    def _give_out(self) -> None:
        """Note that the program has output tensors, which natively show the newest values."""
        self._check_idle()
        self._outputs.is_given_out = True
        self._outputs.has_tensors = True

    def _give_outputs(self) -> None:
        """Copy the outputs of the last call into the tensors that the program gets."""
        self._check_idle()
        self._outputs.has_tensors = True
        self._outputs.show()

    def _check_idle(self) -> None:
        """Take the result of a call that has ended.

        Raises:
            RuntimeError: a call is running.
        """
        if not self._call.is_open:
            return
        by_callback = self._completions is not None and self._completions.is_busy
        if by_callback or self._call.lasts(0):
            raise RuntimeError("Infer Request is busy")
        with self._lock:
            if self._call.is_open:
                self._finish()

    def _start(self, inputs: Any, is_shared: bool) -> None:
        if self._call.is_running:
            self._check_idle()
        placeholder = self._placeholder
        given = self._arrays_as_given(inputs) if is_shared else None
        if given is None:
            given = _data_dispatch(placeholder, inputs, is_shared=is_shared)
        if isinstance(given, Tensor):
            placeholder.set_input_tensor(given)
        else:
            for key, tensor in given.items():
                if isinstance(key, int):
                    placeholder.set_input_tensor(key, tensor)
                else:
                    placeholder.set_tensor(key, tensor)
        self._outputs.newest = None
        self._call.clear()
        self._call.start({index: placeholder.get_input_tensor(index).data for index in range(self._num_inputs)})

    def _arrays_as_given(self, inputs: Any) -> dict[int, Tensor] | None:
        """Return tensors over arrays by the numbers of their inputs, as OpenVINO makes them of arrays that need no conversion.

        None if one needs it, or for other inputs: ``_data_dispatch``, which does the same for all, takes 4 us longer in a loop
        and 17 us after a wait.
        """
        if type(inputs) is dict:
            arrays = {
                key if type(key) is int else self._input_numbers.get(key, -1): array for key, array in inputs.items()
            }
        elif type(inputs) in (list, tuple):
            arrays = dict(enumerate(inputs))
        else:
            return None
        for index, array in arrays.items():
            if type(array) is not np.ndarray or not 0 <= index < self._num_inputs or array.dtype != self._dtypes[index]:
                return None
            if not array.ndim or not array.flags.carray:
                return None
        if len(arrays) != len(inputs):  # two names of one input
            return None
        self._placeholder._inputs_data = arrays  # keeps them, as natively
        return {index: Tensor(array, shared_memory=True) for index, array in arrays.items()}

    def _finish(self) -> None:
        """Wait for the result of the running call, and show it in the tensors that the program has.

        Raises:
            Exception: the call failed; ``wait`` raises it again.
        """
        try:
            self._take_result()
            if self._outputs.is_given_out:
                self._outputs.show()
        except Exception as error:
            self._call.error = error
            raise

    def _take_result(self) -> None:
        self._outputs.newest = self._call.take_result()
        if self._call.is_cancelled:
            raise RuntimeError("Infer Request was canceled")

    def _complete(self) -> None:
        try:
            with self._lock:
                if self._call.is_running:
                    self._finish()
            if self._callback is not None:
                self._callback(self._userdata)
        except Exception as error:
            known = self._call.error
            self._call.error = error if known is error else RuntimeError(f"{type(error).__name__}: {error}")
        if self.on_end is not None:
            self.on_end(self._call.error)


def check_callback(callback: Any) -> Callable[..., object]:
    """Return a callback, which must be a function.

    Raises:
        TypeError: it is not.
    """
    if not callable(callback):
        raise TypeError(f"a callback must be a function, not {type(callback).__name__}")
    function: Callable[..., object] = callback
    return function


def _profiling_info(node: dict[str, Any]) -> ProfilingInfo:
    info = ProfilingInfo()
    for name in ("node_name", "node_type", "exec_type"):
        setattr(info, name, str(node.get(name, "")))
    info.status = getattr(ProfilingInfo.Status, str(node.get("status")), ProfilingInfo.Status.NOT_RUN)
    info.real_time = timedelta(microseconds=int(node.get("real_us", 0)))
    info.cpu_time = timedelta(microseconds=int(node.get("cpu_us", 0)))
    return info


class AttachedCompiledModel(CompiledModel):  # type: ignore[misc]
    """A compiled model that the daemon serves."""

    def __init__(self, placeholder: Any, model: RemoteModel) -> None:
        super().__init__(placeholder)
        self._remote = model

    def __repr__(self) -> str:
        return str(super().__repr__()).replace(AttachedCompiledModel.__name__, CompiledModel.__name__, 1)

    def create_infer_request(self) -> AttachedInferRequest:
        model = self._remote
        base = CompiledModelBase.create_infer_request(self)
        return AttachedInferRequest(
            base, MovableRequest(model), lambda placeholder: AttachedCompiledModel(placeholder, model)
        )

    def get_property(self, property: str) -> Any:
        if not isinstance(property, str):
            return CompiledModelBase.get_property(self, property)  # raises as natively
        return self._remote.get_property(property)

    def set_property(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):  # checks the arguments; the placeholder's own properties mean nothing
            CompiledModelBase.set_property(self, *args, **kwargs)
        given = next(iter((*args, *kwargs.values())))
        self._remote.set_property(dict([given] if isinstance(given, tuple) else given))

    def export_model(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote.native().export_model(*args, **kwargs)

    def get_runtime_model(self) -> Model:
        return self._remote.native().get_runtime_model()

    def release_memory(self) -> None:
        CompiledModelBase.release_memory(self)
