"""`openvino.AsyncInferQueue` for models of the daemon: a pool of requests with one callback."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from openvino._ov_api import AsyncInferQueue

from ..wire.channel import renew_in_children
from .proxies import AttachedCompiledModel, AttachedInferRequest, check_callback

MAX_JOBS = 1024


class AttachedInferQueue(AsyncInferQueue):  # type: ignore[misc]
    """A pool of requests whose calls run in the daemon."""

    def __init__(self, model: AttachedCompiledModel, jobs: int = 0) -> None:
        count = int(operator.index(jobs) or model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        super().__init__(model, min(count, 1))  # OpenVINO's pool stays empty; it checks the arguments
        self._requests = [model.create_infer_request() for _ in range(min(count, MAX_JOBS))]
        self._userdata: list[Any] = [None] * len(self._requests)
        self._callback: Callable[[Any, Any], object] | None = None
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Have no call running, in a new queue or in a forked child: the calls of the parent end there."""
        self._lock = threading.RLock()
        self._change = threading.Condition(self._lock)
        self._idle = deque(range(len(self._requests)))
        self._errors: list[BaseException] = []
        for index, request in enumerate(self._requests):
            request.forget_call()
            self._let_go(index)

    def start_async(self, inputs: Any = None, userdata: Any = None, share_inputs: bool = False) -> None:
        index = self.get_idle_request_id()
        request = self._requests[index]
        with self._lock:
            self._idle.remove(index)
            self._userdata[index] = userdata
        request.on_end = partial(self._end, index)  # the queue lives until its calls have ended
        try:
            request.start_async(inputs, None, share_inputs)
        except BaseException:
            self._let_go(index)
            with self._lock:
                self._idle.append(index)
                self._change.notify_all()
            raise

    def wait_all(self) -> None:
        with self._lock:
            self._change.wait_for(lambda: len(self._idle) == len(self._requests))
            errors = self._errors
            self._errors = []
        if errors:
            raise errors[0]

    def is_ready(self) -> bool:
        return bool(self._idle)

    def get_idle_request_id(self) -> int:
        with self._lock:
            self._change.wait_for(lambda: self._idle or self._errors)
            if self._errors:
                raise self._errors.pop(0)
            return self._idle[0]

    def set_callback(self, arg0: Callable[[Any, Any], object]) -> None:
        self._callback = check_callback(arg0)

    @property
    def userdata(self) -> list[Any]:
        return list(self._userdata)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[AttachedInferRequest]:
        return iter(self._requests)

    def __getitem__(self, i: int) -> AttachedInferRequest:
        if (number := operator.index(i)) < 0:
            raise TypeError(f"request {number} of a queue: must be from 0 to {len(self) - 1}")
        return self._requests[number]

    def _let_go(self, index: int) -> None:
        """Refer weakly from an idle request to the queue, or the garbage collector would have to free both."""
        self._requests[index].on_end = partial(_end_if_alive, weakref.ref(self), index)

    def _end(self, index: int, error: BaseException | None) -> None:
        """Call the callback after a call; runs on the thread of the request."""
        if error is None and self._callback is not None:
            try:
                self._callback(self._requests[index], self._userdata[index])
            except Exception as raised:
                error = raised
        self._let_go(index)
        with self._lock:
            if error is not None:
                self._errors.append(error)
            self._idle.append(index)
            self._change.notify_all()


def _end_if_alive(queue: weakref.ref[AttachedInferQueue], index: int, error: BaseException | None) -> None:
    """End a call that the program started on a request of a queue."""
    if (found := queue()) is not None:
        found._end(index, error)
