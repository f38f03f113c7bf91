"""One connection of a client, served by a thread of its own, so that a client that stalls or lies harms only itself."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from staticllm.core import FinishReason
from staticllm.daemon.language_models import LanguageModel
from staticllm.daemon.language_source import language_source_of
from staticllm.daemon.model_source import source_of
from staticllm.daemon.session import Session
from staticllm.daemon.streams import OutputStream
from staticllm.daemon.timeline import Timeline
from staticllm.errors import BusyError, ConfigError, StaticLLMError, as_ours
from staticllm.pipelines.daemon_client.failures import failed, refused
from staticllm.wire import tensors
from staticllm.wire.blocks import block_size
from staticllm.wire.channel import Channel, NoRoomError
from staticllm.wire.messages import Kind, Message, ProtocolError, text_of, whole_of
from staticllm.wire.properties import encode_value

log = logging.getLogger(__name__)
MAX_PRIORITY = 100
REFUSE_SECONDS = 0.5
"""Seconds in which a client must read why its connection ends."""


class Host(Protocol):
    """What a connection needs of the daemon."""

    @property
    def timeline(self) -> Timeline:
        """The recording of all programs."""
        ...

    def join(self, hello: Message) -> tuple[Session, bool, dict[str, Any]]:
        """Return the client of a ``HELLO``, whether it is a new one, and the body of the answer."""
        ...

    def leave(self, session: Session) -> None:
        """End a client: its first connection has ended."""
        ...

    def set_priority(self, session: Session, priority: int) -> None:
        """Set the priority of the program that a client belongs to."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics as JSON types."""
        ...

    def stop(self) -> None:
        """End the daemon."""
        ...


class ClientConnection:
    """Serves one connection until it ends: questions and answers alternate."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel, self._host = channel, host
        self.session: Session | None = None
        self._is_first = False
        self._request: Any = None  # an infer request, if the connection belongs to one
        self._model_id = 0
        self._unsent: int | None = None  # a model of which the client does not know yet
        self._stream: OutputStream | None = None
        self._is_recording = False
        self._send_lock = threading.Lock()  # the stream's thread sends too
        self.started = time.monotonic()
        self._handlers = self._all_handlers()

    def run(self) -> None:
        """Serve the connection; returns when it has ended, with everything given back that belongs to it."""
        try:
            while self._answer(self._channel.receive()):
                pass
        except (EOFError, OSError):
            pass
        except ProtocolError as error:
            log.warning("a client sent something else than a message: %s", error)
            self._refuse(error)
        finally:
            self._end()

    def shut(self) -> None:
        """Let ``run`` return soon, from another thread."""
        self._channel.shut()
        if (request := self._request) is not None:
            request.cancel()  # its call may need many more device calls

    def _refuse(self, error: ProtocolError) -> None:
        """Say why the connection ends. A client that does not read, so that a send waits, is not told."""
        if self._stream is not None:
            self._stream.stop()
        timer = threading.Timer(REFUSE_SECONDS, self._channel.shut)
        timer.daemon = True
        with contextlib.suppress(OSError, RuntimeError):  # the client has gone; there can be no more threads
            timer.start()
            try:
                with self._send_lock:
                    self._channel.send(refused(error))
            finally:
                timer.cancel()
                timer.join()  # or it could shut another connection with the number of this one

    def _answer(self, message: Message) -> bool:
        """Answer one message. Return False if the connection ends with it."""
        if self.session is None:
            return self._greet(message)
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise ProtocolError(f"{message.kind.name} is not for the daemon")
        try:
            answer = handler(message)
        except (ProtocolError, EOFError, BrokenPipeError, ConnectionError):
            raise
        except BusyError as error:
            answer = refused(error)
        except Exception as error:
            answer = failed(error)
        if answer is not None:
            with self._send_lock:
                self._channel.send(replace(answer, number=message.number))
        self._unsent = None
        return True

    def _greet(self, message: Message) -> bool:
        if message.kind is not Kind.HELLO:
            raise ProtocolError(f"the first message is {message.kind.name}, not HELLO")
        try:
            self.session, self._is_first, body = self._host.join(message)
        except StaticLLMError as error:
            self._channel.send(refused(error))
            return False
        self._channel.send(Message(Kind.WELCOME, body=body))
        return True

    def _end(self) -> None:
        session = self.session
        if self._is_recording:
            self._host.timeline.cancel()
        if self._stream is not None:
            if session is not None:
                session.follow(self._stream, None)
            self._stream.close()
        if self._request is not None:
            self._drop_request()
        if session is not None:
            if self._unsent is not None:
                session.release(self._unsent)
            session.count_block(-self._channel.block_bytes)
            if self._is_first:
                self._host.leave(session)
        self._channel.close()

    def _all_handlers(self) -> dict[Kind, Callable[[Message], Message | None]]:
        return {
            Kind.MODEL: self._hold, Kind.RELEASE: self._release, Kind.GET_PROPERTY: self._get_property,
            Kind.SET_PROPERTY: self._set_property, Kind.EXPORT: self._export,
            Kind.REQUEST: self._open, Kind.INFER: self._infer, Kind.RESET: self._reset, Kind.PROFILE: self._profile,
            Kind.STATES: self._states, Kind.GET_STATE: self._get_state, Kind.SET_STATE: self._set_state,
            Kind.RESET_STATE: self._reset_state,
            Kind.SUBMIT: self._submit, Kind.CANCEL: self._cancel, Kind.SNAPSHOT: self._snapshot,
            Kind.TRACE: self._trace, Kind.HINT: self._hint, Kind.STATS: self._stats, Kind.STOP: self._stop,
            Kind.PING: lambda _: Message(Kind.OK),
        }  # fmt: skip

    # models

    def _hold(self, message: Message) -> Message:
        assert self.session is not None
        is_language = "directory" in message.body
        try:
            handle, model = self.session.hold(language_source_of(message) if is_language else source_of(message))
        except (ProtocolError, BusyError):
            raise
        except Exception as error:
            return failed(as_ours(error)) if is_language else refused(error)  # attached programs run the model natively
        self._unsent = handle
        more = model.describe() if isinstance(model, LanguageModel) else {}
        return Message(Kind.OK, body={"model": handle, "mode": model.mode, **more})

    def _release(self, message: Message) -> Message:
        assert self.session is not None
        if self._request is not None:
            self._drop_request()
        else:
            self.session.release(message.handle)
        return Message(Kind.OK)

    def _get_property(self, message: Message) -> Message:
        assert self.session is not None
        value = self.session.model(message.handle).get_property(text_of(message, "name", 128))
        return Message(Kind.OK, body={"value": encode_value(value)})

    def _set_property(self, message: Message) -> Message:
        assert self.session is not None
        self.session.model(message.handle)
        raise RuntimeError("other programs may share this model: set its properties when it is compiled")

    def _export(self, message: Message) -> Message:
        assert self.session is not None
        raise RuntimeError(f"model {message.handle} is shared by programs: export it without the daemon")

    # infer requests

    def _open(self, message: Message) -> Message | None:
        """Open the connection's infer request, or enlarge its block."""
        session, wanted = self.session, whole_of(message, "block", 1 << 40, 0)
        assert session is not None
        is_new = self._request is None
        if is_new:
            session.count_request(1)
            try:
                model = session.model(message.handle)
                self._request, self._model_id = model.open(session.owner), model.id
                session.follow(self, self._request.set_priority)
            except BaseException:
                session.count_request(-1)
                raise
        if wanted > self._channel.block_bytes:
            self._grow(wanted)
        return Message(Kind.OK, body={"request": 1})

    def _grow(self, wanted: int) -> None:
        assert self.session is not None
        old, new = self._channel.block_bytes, block_size(wanted)
        self.session.count_block(new - old)
        try:
            self._channel.grow(wanted)
        finally:
            self.session.count_block(self._channel.block_bytes - new)

    def _drop_request(self) -> None:
        assert self.session is not None
        request, self._request = self._request, None
        self.session.follow(self, None)
        request.close()
        self.session.count_request(-1)

    def _own(self) -> Any:
        if self._request is None:
            raise ConfigError("this connection has no infer request")
        return self._request

    def _infer(self, message: Message) -> None:
        session, request = self.session, self._own()
        assert session is not None
        inputs: dict[int, tensors.Array] = {}
        for index, array in self._channel.tensors_of(message):
            if not isinstance(index, int):
                raise ProtocolError(f"INFER: the input {index!r}, must be a number")
            inputs[index] = array
        outputs, call = request.infer(inputs, session.priority, message.body.get("wanted") == "last")
        session.usage.add_calls(1, call.queued, sum(array.nbytes for array in outputs))
        self._send(Message(Kind.DONE, number=message.number, time=call.taken), outputs)

    def _send(self, message: Message, arrays: list[tensors.Array]) -> None:
        """Send arrays, in a larger block if they need one."""
        with self._send_lock:
            try:
                self._channel.send_tensors(message, arrays, range(len(arrays)))
            except NoRoomError as error:
                self._grow(error.size)
                self._channel.send_tensors(message, arrays, range(len(arrays)))

    def _reset(self, _: Message) -> Message:
        self._own().reset()
        return Message(Kind.OK)

    def _states(self, _: Message) -> Message:
        return Message(Kind.OK, body={"names": self._own().state_names()})

    def _get_state(self, message: Message) -> None:
        self._send(Message(Kind.DONE), [np.asarray(self._own().get_state(whole_of(message, "index", 1 << 20)))])

    def _set_state(self, message: Message) -> Message:
        ((_, values),) = self._channel.tensors_of(message)
        index, request = whole_of(message, "index", 1 << 20), self._own()
        if message.body.get("in_place"):
            request.write_state(index, values)
        else:
            request.set_state(index, values)
        return Message(Kind.OK)

    def _reset_state(self, message: Message) -> Message:
        self._own().reset_state(whole_of(message, "index", 1 << 20))
        return Message(Kind.OK)

    def _profile(self, _: Message) -> Message:
        return Message(Kind.OK, body={"nodes": self._own().profile()})

    # requests to language models

    def _language_model(self, handle: int) -> LanguageModel:
        assert self.session is not None
        model = self.session.model(handle)
        if not isinstance(model, LanguageModel):
            raise ConfigError(f"model {handle} takes no requests: it was not loaded as a language model")
        return model

    def _submit(self, message: Message) -> Message:
        values = message.body.get("request")
        if not isinstance(values, dict):
            raise ProtocolError("SUBMIT: request must be an object")
        model = self._language_model(message.handle)
        assert self.session is not None
        if self._stream is None:
            self._stream = OutputStream(self._channel, self._send_lock, self.session)
            self.session.follow(self._stream, self._stream.set_priority)
        times = self._stream.submit(model, message.number, values)
        return Message(Kind.OK, body={"grammar": None if times is None else asdict(times)})

    def _cancel(self, message: Message) -> Message:
        index, reason = message.body.get("index"), text_of(message, "reason", 16)
        if reason not in {str(each) for each in FinishReason} or not (index is None or type(index) is int):
            raise ProtocolError(f"CANCEL: index {index!r}, reason {reason!r}")
        if self._stream is not None:
            self._stream.cancel(whole_of(message, "request", 1 << 62), index, FinishReason(reason))
        return Message(Kind.OK)

    def _snapshot(self, message: Message) -> Message:
        model = self._language_model(message.handle)
        return Message(Kind.OK, body={"tokens": model.snapshot(message)})

    # the client and the daemon

    def _hint(self, message: Message) -> Message:
        assert self.session is not None
        self._host.set_priority(self.session, whole_of(message, "priority", 2 * MAX_PRIORITY) - MAX_PRIORITY)
        return Message(Kind.OK)

    def _trace(self, message: Message) -> Message:
        timeline = self._host.timeline
        if text_of(message, "action", 8) == "begin":
            timeline.begin()
            self._is_recording = True
            return Message(Kind.OK)
        path = Path(text_of(message, "path"))
        if not path.is_absolute():
            raise ProtocolError("TRACE: path must be absolute")
        self._is_recording = False
        return Message(Kind.OK, body={"events": timeline.end(path)})

    def _stats(self, message: Message) -> Message:
        if message.body.get("of") == "engine":
            return Message(Kind.OK, body=asdict(self._language_model(message.handle).engine.stats()))
        if message.body.get("of") == "calls":
            calls = self._language_model(message.handle).calls
            return Message(Kind.OK, body=calls.after(whole_of(message, "after", 1 << 62)))
        return Message(Kind.OK, body=self._host.stats())

    def _stop(self, _: Message) -> Message:
        self._host.stop()
        return Message(Kind.OK)
