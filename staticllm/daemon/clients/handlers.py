"""What a connection does with each kind of message: models, infer requests, requests to language models, and the daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from staticllm.children.answers import failed, refused
from staticllm.daemon import bodies
from staticllm.daemon.bodies import read_body
from staticllm.daemon.clients.blocks import TensorSender
from staticllm.daemon.clients.client_windows import WindowHandlers
from staticllm.daemon.clients.session import Session
from staticllm.daemon.clients.streams import OutputStream, WindowNumbers
from staticllm.daemon.infer_request import Array, InferRequest
from staticllm.daemon.models.client_models import directory_origin_of, origin_of
from staticllm.daemon.sharing.devices import Timeline
from staticllm.errors import BusyError, ConfigError, as_ours
from staticllm.wire.channel import Channel
from staticllm.wire.messages import MAX_PRIORITY, Kind, Message, ProtocolError, encode_value

Handlers = Mapping[Kind, Callable[[Message], Message | None]]
"""The answers to messages by kind; None is not sent."""


class ModelHandlers:
    """The models of a client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._unsent: int | None = None  # a model of which the client does not know yet
        self.handlers: Handlers = {
            Kind.MODEL: self._hold, Kind.GET_PROPERTY: self._get_property, Kind.SET_PROPERTY: self._set_property,
            Kind.EXPORT: self._export,
        }  # fmt: skip

    def note_sent(self) -> None:
        """Note that the client has got the last answer."""
        self._unsent = None

    def close(self) -> None:
        """Release a model of which the client does not know."""
        if self._unsent is not None:
            self._session.release(self._unsent)

    def _hold(self, message: Message) -> Message:
        is_language = "directory" in message.body
        try:
            handle, model = self._session.hold(directory_origin_of(message) if is_language else origin_of(message))
        except (ProtocolError, BusyError):
            raise
        except Exception as error:
            return failed(as_ours(error)) if is_language else refused(error)  # attached programs run the model natively
        self._unsent = handle
        return Message(Kind.OK, body={"model": handle, "mode": model.mode, **model.describe()})

    def _get_property(self, message: Message) -> Message:
        value = self._session.model(message.handle).get_property(read_body(message, bodies.Property).name)
        return Message(Kind.OK, body={"value": encode_value(value)})

    def _set_property(self, message: Message) -> Message:
        self._session.model(message.handle)
        raise RuntimeError("other programs may share this model: set its properties when it is compiled")

    def _export(self, message: Message) -> Message:
        raise RuntimeError(f"model {message.handle} is shared by programs: export it without the daemon")


class InferHandlers:
    """The infer request of a connection, if it has one, and the block of shared memory for its tensors."""

    def __init__(self, session: Session, channel: Channel, lock: threading.Lock) -> None:
        self._session = session
        self._channel = channel
        self._tensors = TensorSender(session, channel, lock)
        self._request: InferRequest | None = None
        self.handlers: Handlers = {
            Kind.REQUEST: self._open, Kind.INFER: self._infer, Kind.RESET: self._reset, Kind.PROFILE: self._profile,
            Kind.STATES: self._states, Kind.GET_STATE: self._get_state, Kind.SET_STATE: self._set_state,
            Kind.RESET_STATE: self._reset_state,
        }  # fmt: skip

    def cancel(self) -> None:
        """End a call that runs. Any thread may call."""
        if (request := self._request) is not None:
            request.cancel()

    def close(self) -> bool:
        """Close the request; return False if there is none."""
        request = self._request
        self._request = None
        if request is None:
            return False
        self._session.follow(self, None)
        request.close()
        self._session.count_request(-1)
        return True

    def _open(self, message: Message) -> Message:
        """Open the connection's infer request, or enlarge its block."""
        wanted = read_body(message, bodies.Request).block
        if self._request is None:
            self._session.count_request(1)
            try:
                self._request = self._session.infer_model(message.handle).open(self._session.client)
                self._session.follow(self, self._request.set_priority)
            except BaseException:
                self._session.count_request(-1)
                raise
        if wanted > self._channel.block_bytes:
            self._tensors.grow(wanted)
        return Message(Kind.OK, body={"request": 1})

    def _own(self) -> InferRequest:
        if self._request is None:
            raise ConfigError("this connection has no infer request")
        return self._request

    def _infer(self, message: Message) -> None:
        session = self._session
        request = self._own()
        inputs: dict[int, Array] = {}
        for index, array in self._channel.tensors_of(message):
            if not isinstance(index, int):
                raise ProtocolError(f"INFER: the input {index!r}, must be a number")
            inputs[index] = array
        result = request.call(inputs, session.priority, message.body.get("wanted") == "last")
        session.usage.add_calls(1, result.times.queued, sum(array.nbytes for array in result.outputs))
        self._tensors.send(Message(Kind.DONE, number=message.number, time=result.times.taken), result.outputs)

    def _reset(self, _: Message) -> Message:
        self._own().reset()
        return Message(Kind.OK)

    def _states(self, _: Message) -> Message:
        return Message(Kind.OK, body={"names": self._own().state_names()})

    def _get_state(self, message: Message) -> None:
        self._tensors.send(
            Message(Kind.DONE), [np.asarray(self._own().get_state(read_body(message, bodies.State).index))]
        )

    def _set_state(self, message: Message) -> Message:
        ((_, values),) = self._channel.tensors_of(message)
        state = read_body(message, bodies.State)
        request = self._own()
        change = request.write_state if state.in_place else request.set_state
        change(state.index, values)
        return Message(Kind.OK)

    def _reset_state(self, message: Message) -> Message:
        self._own().reset_state(read_body(message, bodies.State).index)
        return Message(Kind.OK)

    def _profile(self, _: Message) -> Message:
        return Message(Kind.OK, body={"nodes": self._own().profile()})


class RequestHandlers:
    """The requests of a connection to language models; their outputs are sent as they come."""

    def __init__(self, session: Session, channel: Channel, lock: threading.Lock) -> None:
        self._session = session
        self._channel = channel
        self._send_lock = lock
        self._stream: OutputStream | None = None
        self._windows = WindowHandlers(session, channel, self._opened)
        self.handlers: Handlers = {
            Kind.SUBMIT: self._submit, Kind.CANCEL: self._cancel, Kind.SNAPSHOT: self._snapshot, Kind.CLAIM: self._claim,
            **self._windows.handlers,
        }  # fmt: skip

    def stop(self) -> None:
        """Cancel all requests, and send no further outputs."""
        if self._stream is not None:
            self._stream.stop()

    def close(self) -> None:
        """Cancel all requests, give their windows back, and end the thread of their outputs."""
        self._windows.close()
        if self._stream is not None:
            self._session.follow(self._stream, None)
            self._stream.close()

    def _submit(self, message: Message) -> Message:
        asked = read_body(message, bodies.Submit)
        model = self._session.language_model(message.handle)
        model.check_window(asked.window)
        window = WindowNumbers(asked.window, self._windows.number_of(asked.window, model))
        times = self._opened().submit(model, message.number, asked.request, window)
        return Message(Kind.OK, body={"grammar": None if times is None else asdict(times)})

    def _opened(self) -> OutputStream:
        """Return the stream of the connection, which begins with its first request."""
        if self._stream is None:
            self._stream = OutputStream(self._channel, self._send_lock, self._session)
            self._session.follow(self._stream, self._stream.set_priority)
        return self._stream

    def _cancel(self, message: Message) -> Message:
        asked = read_body(message, bodies.Cancel)
        if self._stream is not None:
            self._stream.cancel(asked.request, asked.index, asked.reason)
        return Message(Kind.OK)

    def _snapshot(self, message: Message) -> Message:
        model = self._session.language_model(message.handle)
        return Message(Kind.OK, body={"tokens": model.snapshot(read_body(message, bodies.Snapshot))})

    def _claim(self, message: Message) -> Message:
        self._session.claim(message.handle, read_body(message, bodies.Claim))
        return Message(Kind.OK)


class DaemonControl(Protocol):
    """What clients may ask of the daemon as a whole."""

    @property
    def timeline(self) -> Timeline:
        """The recording of all programs."""
        ...

    def set_priority(self, session: Session, priority: int) -> None:
        """Set the priority of the program that a client belongs to."""
        ...

    def stats(self) -> dict[str, Any]: ...

    def stop(self) -> None: ...


class DaemonHandlers:
    """The client itself, and the daemon: priority, statistics, recordings, and its end."""

    def __init__(self, session: Session, daemon: DaemonControl) -> None:
        self._session = session
        self._daemon = daemon
        self._is_recording = False
        self.handlers: Handlers = {
            Kind.TRACE: self._trace, Kind.HINT: self._hint, Kind.STATS: self._stats, Kind.STOP: self._stop,
            Kind.PING: lambda _: Message(Kind.OK),
        }  # fmt: skip

    def close(self) -> None:
        """End a recording that the client has begun."""
        if self._is_recording:
            self._daemon.timeline.cancel()

    def _hint(self, message: Message) -> Message:
        self._daemon.set_priority(self._session, read_body(message, bodies.Hint).priority - MAX_PRIORITY)
        return Message(Kind.OK)

    def _trace(self, message: Message) -> Message:
        asked = read_body(message, bodies.AskedTrace)
        timeline = self._daemon.timeline
        if asked.action == "begin":
            timeline.begin()
            self._is_recording = True
            return Message(Kind.OK)
        path = Path(asked.path)
        if not path.is_absolute():
            raise ProtocolError("TRACE: path must be absolute")
        self._is_recording = False
        return Message(Kind.OK, body={"events": timeline.end(path)})

    def _stats(self, message: Message) -> Message:
        asked = read_body(message, bodies.AskedStats)
        if asked.of == "engine":
            return Message(Kind.OK, body=asdict(self._session.language_model(message.handle).engine.stats()))
        if asked.of == "calls":
            return Message(Kind.OK, body=self._session.language_model(message.handle).engine.calls_after(asked.after))
        return Message(Kind.OK, body=self._daemon.stats())

    def _stop(self, _: Message) -> Message:
        self._daemon.stop()
        return Message(Kind.OK)
