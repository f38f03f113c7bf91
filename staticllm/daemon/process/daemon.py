"""The daemon's process: it listens, joins connections to clients, and ends when no program uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openvino as ov
import psutil

from staticllm.compiler_passes.artifacts.crashes import note_set
from staticllm.core import OnProgress, ProgressEvent
from staticllm.daemon.bodies import Hello, Version, read_body
from staticllm.daemon.clients.connection import Connection, Greeting
from staticllm.daemon.clients.session import Session
from staticllm.daemon.limits import DaemonLimits, default_limits
from staticllm.daemon.models.client_models import LanguageOrigin, ModelOrigin, SpeechOrigin
from staticllm.daemon.models.compiling import compile_model, read
from staticllm.daemon.models.language_model import LanguageModel, compile_language_model
from staticllm.daemon.models.plain import PlainModel
from staticllm.daemon.models.speech_service import compile_speech_model
from staticllm.daemon.models.table import Compile, ModelTable, SharedModel
from staticllm.daemon.packed.model import PackedModel
from staticllm.daemon.sharing.devices import Devices, Timeline, is_virtual
from staticllm.devices import check_device, get_core
from staticllm.errors import BusyError, ClosedError, ConfigError
from staticllm.system.long_calls import attended, unless
from staticllm.system.threads import start_thread
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel
from staticllm.wire.endpoint import EndpointError
from staticllm.wire.messages import MAX_PRIORITY, PROTOCOL, Message

log = logging.getLogger(__name__)
HELLO_SECONDS = 5.0
"""Seconds in which a new connection must send ``HELLO``."""
TICK_SECONDS = 1.0
SWITCH_SECONDS = 0.0005
"""Python's default of 5 ms between two threads would be added to calls that take microseconds."""


class Daemon:
    """Serves the clients of one user. ``run`` serves on the calling thread; any thread may call the other methods."""

    def __init__(
        self,
        folder: Path,
        limits: DaemonLimits | None = None,
        compile_model: Compile | None = None,
        is_worker: bool = False,
    ) -> None:
        self.limits = limits or default_limits()
        self.devices = Devices()
        self.models = ModelTable(compile_model or self._compile, self.limits, self.devices.compiling)
        self._folder = folder
        self._is_worker = is_worker
        self.sessions: dict[str, Session] = {}
        self.greetings: set[Greeting] = set()
        self.connections: set[Connection] = set()
        self._lock = threading.Lock()
        self.is_stopping = threading.Event()
        self._started = time.monotonic()
        self._idle_since = self._started
        endpoint.forget_stop(folder)
        self._key = endpoint.make_key(folder)
        self._listener = endpoint.listen(folder, TICK_SECONDS)
        self._place = endpoint.identity(folder)
        self.owns_folder = True

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Accept connections until ``stop`` is called or no program has been connected for ``DaemonLimits.idle_seconds``."""
        old = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        keeper = start_thread(self._keep_house, "staticllm-housekeeper")
        on_ready()
        try:
            while not self.is_stopping.is_set():
                self._accept()
        finally:
            self.stop()
            keeper.join()
            self._close()
            sys.setswitchinterval(old)

    def stop(self) -> None:
        """Let ``run`` return."""
        if not self.is_stopping.is_set():
            self.is_stopping.set()
            with contextlib.suppress(EndpointError, OSError):  # accept() wakes for a connection only
                endpoint.knock(self._folder)

    def join(self, hello: Message, channel: Channel) -> tuple[Connection, dict[str, Any]]:
        """Add a connection to the client of a ``HELLO``, or to a new one.

        Raises:
            BusyError: the client has as many connections as it may, or there are too many clients.
            ConfigError: it speaks another protocol, has another OpenVINO, or its first connection has ended.
        """
        theirs = read_body(hello, Version)
        ours = ov.get_version()
        if theirs.protocol != PROTOCOL:
            raise ConfigError(
                f"this program speaks protocol {theirs.protocol}, the daemon {PROTOCOL}: restart the older one "
                "(staticllm daemon stop ends the daemon)"
            )
        client = read_body(hello, Hello)
        if (
            theirs.openvino.split(".")[:2] != ours.split(".")[:2] and not client.watches
        ):  # it may be there to stop this one
            raise ConfigError(
                f"this program has OpenVINO {theirs.openvino[:40]}, the daemon has {ours}: use the same release, or end the "
                "daemon (staticllm daemon stop)"
            )
        with self._lock:
            session = self._find(client.session)
            is_new = session is None
            count = sum(each.session is session for each in self.connections)
            if count >= self.limits.connections:
                raise BusyError(
                    f"this program has {count} connections, the limit is {self.limits.connections}: drop infer requests"
                )
            session = session or self._new_session(client)
            try:
                connection = Connection(channel, self, session, is_first=is_new)
            except BaseException:
                if is_new:
                    del self.sessions[session.token]
                    session.close()
                raise
            self.connections.add(connection)
        body = {"session": session.token, "openvino": ours, "limits": self.limits.to_dict(), "pid": os.getpid()}
        return connection, body

    def leave(self, session: Session) -> None:
        with self._lock:
            self.sessions.pop(session.token, None)
            others = [connection for connection in self.connections if connection.session is session]
            self._idle_since = time.monotonic()
        for connection in others:
            connection.shut()
        session.close()
        if not session.watches:
            log.info("program %d (%s) has left", session.pid, session.program)

    def set_priority(self, session: Session, priority: int) -> None:
        """Set the priority of a client, and of the others of its process: pipelines of GenAI are clients of their own."""
        with self._lock:
            same = [
                each
                for each in self.sessions.values()
                if each is session or (each.pid, each.program) == (session.pid, session.program)
            ]
        for each in same:
            each.set_priority(priority)

    @property
    def timeline(self) -> Timeline:
        """The recording of all programs."""
        return self.devices.timeline

    def stats(self) -> dict[str, Any]:
        with self._lock:
            sessions = list(self.sessions.values())
        models = [
            {"id": model.id, "path": str(slot.origin.xml), "device": model.device, "mode": model.mode,
             "bytes": slot.num_bytes, "users": slot.num_users}
            for slot, model in self.models.served()
        ]  # fmt: skip
        clients = [session.describe() for session in sessions if not session.watches]
        since = time.time() - (time.monotonic() - self._started)  # the clock may have been set meanwhile
        return {
            "pid": os.getpid(), "since": since, "openvino": ov.get_version(), "models": models,
            "clients": clients, "memory": psutil.Process().memory_info().rss,
        }  # fmt: skip

    def _compile(self, origin: ModelOrigin | LanguageOrigin | SpeechOrigin, id: int) -> SharedModel:
        """Compile the model of a client, until the daemon stops. Raises as ``compile_client_model``, and ``ClosedError``."""
        compile_ours = partial(compile_client_model, origin, id, self.devices, self._note_progress)
        with unless(self.is_stopping.is_set, "the daemon is stopping"):
            return attended(compile_ours, drop=lambda model: model.close())

    def _note_progress(self, event: ProgressEvent) -> None:
        """Note which blob set is used, for the process that started this one and counts its crashes."""
        if self.is_stopping.is_set():
            raise ClosedError("the daemon is stopping")
        if self._is_worker and event.stage == "import" and event.message:
            note_set(self._folder, event.message)

    def _find(self, token: str | None) -> Session | None:
        if token is None:
            return None
        session = self.sessions.get(token)
        if session is None:
            raise ConfigError("the program's first connection has ended: connect again")
        return session

    def _new_session(self, client: Hello) -> Session:
        count = sum(not session.watches for session in self.sessions.values())
        if count >= self.limits.clients and not client.watches:
            raise BusyError(f"{count} programs use the daemon, the limit is {self.limits.clients}: end one")
        program = "".join(each if each.isprintable() else "?" for each in client.program)  # logs and terminals show it
        session = Session(
            client.pid, program, client.priority - MAX_PRIORITY, self.models, self.devices, self.limits,
            watches=client.watches,
        )  # fmt: skip
        self.sessions[session.token] = session
        if not client.watches:
            log.info("program %d (%s) has come", client.pid, program)
        return session

    def _accept(self) -> None:
        try:
            raw = self._listener.accept()
        except TimeoutError:
            return
        except OSError as error:
            log.warning("a connection could not be accepted: %s", error)
            time.sleep(0.05)  # out of descriptors: the others must go on
            return
        with self._lock:
            is_full = self._num_connections > self.limits.clients * (self.limits.requests + 1)
        if self.is_stopping.is_set() or is_full:
            raw.close()
            return
        greeting = Greeting(Channel(raw, takes_blocks=False), self)
        with self._lock:
            self.greetings.add(greeting)
        try:
            start_thread(lambda: self._serve(raw, greeting), "staticllm-client")
        except Exception as error:
            log.warning("%s", error)
            self._forget(greeting)
            raw.close()

    @property
    def _num_connections(self) -> int:
        return len(self.greetings) + len(self.connections)

    def _serve(self, raw: Any, greeting: Greeting) -> None:
        try:
            endpoint.welcome(raw, self._key)
            connection = greeting.wait()
            self._forget(greeting)
            if connection is not None:
                connection.run()
        except (EndpointError, OSError) as error:
            log.warning("a connection is refused: %s", error)
            raw.close()
        finally:
            self._forget(greeting, greeting.joined)

    def _forget(self, greeting: Greeting, connection: Connection | None = None) -> None:
        with self._lock:
            self.greetings.discard(greeting)
            if connection is not None:
                self.connections.discard(connection)

    def _keep_house(self) -> None:
        """Drop unused models and connections without ``HELLO``, and stop an idle daemon."""
        while not self.is_stopping.wait(TICK_SECONDS):
            now = time.monotonic()
            try:
                self.models.drop_idle(self.limits.idle_model_seconds)
            except Exception:  # the thread also ends silent connections, and the daemon when it is idle
                log.exception("an idle model could not be dropped")
            with self._lock:
                silent = [each for each in self.greetings if now - each.started > HELLO_SECONDS]
                is_idle = not self.sessions and now - self._idle_since > self.limits.idle_seconds
            for greeting in silent:
                greeting.shut()
            if not self.sessions and not self._is_found():
                log.info("the folder %s is gone or another daemon's: the daemon ends", self._folder)
                self.stop()
            if is_idle:
                log.info("no program has been connected for %g s: the daemon ends", self.limits.idle_seconds)
                self.stop()

    def _is_found(self) -> bool:
        """Return whether new clients find this daemon: its folder may have been deleted, and made anew by another one."""
        found = endpoint.identity(self._folder)
        return self._place is None or (found is not None and os.path.samestat(self._place, found))

    def _close(self) -> None:
        self.owns_folder = self._is_found()
        if self.owns_folder:
            endpoint.note_stop(self._folder)
        with contextlib.suppress(OSError):  # the folder may have gone
            endpoint.close_listener(self._listener, leaves_socket=not self.owns_folder)
        with self._lock:
            connections: list[Greeting | Connection] = [*self.greetings, *self.connections]
        for connection in connections:
            connection.shut()
        moment = time.monotonic() + HELLO_SECONDS
        while self._num_connections and time.monotonic() < moment:
            time.sleep(0.01)
        self.models.close()


def compile_client_model(
    origin: ModelOrigin | LanguageOrigin | SpeechOrigin, id: int, devices: Devices, on_progress: OnProgress
) -> LanguageModel | PackedModel | PlainModel:
    """Compile the model of a client, with the number ``id``; only engines report progress.

    Raises:
        StaticLLMError: it cannot be read, or the device is missing or refuses it.
        RuntimeError: OpenVINO refuses it.
    """
    if isinstance(origin, SpeechOrigin):
        return compile_speech_model(origin, id, devices, on_progress)
    if isinstance(origin, LanguageOrigin):
        return compile_language_model(origin, id, devices, on_progress)
    if origin.mode == "auto" and read(origin.xml, origin.weights).get_variables():
        packed = PackedModel(origin.xml, origin.device, dict(origin.config), origin.weights, id=id, devices=devices)
        if packed.reason is None:
            return packed
        packed.close()
    if not is_virtual(origin.device):
        check_device(get_core(), origin.device)
    return PlainModel(id, compile_model(origin), origin.device, devices, origin.num_bytes)
