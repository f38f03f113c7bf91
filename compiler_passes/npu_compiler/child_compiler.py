"""The NPU compiler in a child process, which may crash, hang or refuse a model."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openvino as ov

from staticllm.children.child import ChildLostError
from staticllm.children.line_child import LineChild
from staticllm.errors import ConfigError, DeviceError, last_line, shown
from staticllm.system.files import read_regular
from staticllm.system.scratch_folder import ScratchFolder
from staticllm.system.threads import close_when_collected

from ..compiling.npu_compiler import DEFAULT_SECONDS, NPUProgram
from ..compiling.npu_platform import Platform, platform_of
from .refusal import Log, lost_text, refused_text
from .schedule import MAX_TRACE, read_schedule

START_SECONDS = 120.0
"""How long a child may take to start: Wine's first start on a busy machine takes a minute."""
END_SECONDS = 5.0
_LOOK_SECONDS = 0.05
"""How often a closing thread looks whether the one that compiles has noticed."""
MARK = "staticllm-npu "
"""Begins each answer of a child; other lines come from the compiler."""
MAX_NOISE = 16 << 20
"""The most characters of other lines before an answer."""
MAX_PROPERTIES = 64
MAX_REQUEST = 60_000
"""The most bytes of a request, within the buffer of ``npu_compile.c``."""
MAX_BLOB = 16 << 30
MAX_TEXT = 1000
"""The most characters of a text in an answer."""
MODEL = "model.xml"
BLOB = "program.blob"
TRACE = "compileTimeScheduleTrace.json"
"""What the compiler names its schedule, in the working directory."""
_PARAMS = "NPU_COMPILATION_MODE_PARAMS"
_SCHEDULE_PARAM = "enable-schedule-trace="
_NO_LIBRARY = "Cannot load library"
"""What OpenVINO says if the compiler's library is missing or damaged."""
_KEY = re.compile(r"[A-Z][A-Z0-9_]{0,99}")


@dataclass(frozen=True)
class Launch:
    """How a child is started."""

    command: Sequence[str]
    """Runs in a private folder."""
    environment: Mapping[str, str]
    """Added to that of this process."""
    what: str
    """What could not be started, for errors."""
    remedy: str
    """What helps, for errors."""


class ChildCompiler:
    """The ``NPUCompiler`` that runs the compiler in a child process, which is started when it is needed."""

    def __init__(self, launch: Launch, start_seconds: float = START_SECONDS) -> None:
        self.launch = launch
        self._start_seconds = start_seconds
        self._lock = threading.RLock()
        self.session: _Session | None = None
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]
        self._version: str | None = None

    def __enter__(self) -> ChildCompiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def version(self) -> str:
        with self._lock:
            if self._version is None:
                self._running()
            assert self._version is not None, "a child that runs has said it"
            return self._version

    def compile(
        self,
        model: ov.Model,
        platform: str,
        properties: Mapping[str, str] | None = None,
        *,
        name: str = "",
        seconds: float = DEFAULT_SECONDS,
        with_schedule: bool = True,
    ) -> NPUProgram:
        found = platform_of(platform)
        line = "\t".join([MODEL, BLOB, *_settings(found, properties or {}, with_schedule)])
        if len(line.encode()) > MAX_REQUEST:
            raise ConfigError(
                f"the properties have {len(line.encode())} bytes, at most {MAX_REQUEST} are sent: shorten them"
            )
        if not seconds > 0:  # NaN is not either
            raise ConfigError(f"seconds is {shown(seconds)}: must be more than 0")
        job = f"{name or model.get_friendly_name()} for platform {found}"
        with self._lock:
            session = self._running()
            try:
                session.save(model, job)
                compiled = session.compile(line, job, seconds)
                return session.program(found, job, compiled, with_schedule)
            except BaseException:
                if not session.is_usable:
                    self._drop()
                raise

    def close(self) -> None:
        while not self._lock.acquire(timeout=_LOOK_SECONDS):  # another thread compiles
            session = self.session
            if session is not None:
                session.kill()
        try:
            self._drop()
        finally:
            self._lock.release()

    def _running(self) -> _Session:
        """Return the child, which is started if there is none.

        Raises:
            DeviceError: it does not start.
        """
        if self.session is not None and not self.session.is_usable:
            self._drop()
        if self.session is None:
            session = _Session(self.launch)
            self.session = session
            self._end = close_when_collected(self, session.close)
            try:
                self._version = session.start(self._start_seconds)
            except BaseException:
                session.kill()
                self._drop()
                raise
        return self.session

    def _drop(self) -> None:
        if self.session is not None:
            if self._end is not None:
                self._end.detach()
            self.session.close()
            self.session = None


def _settings(platform: Platform, properties: Mapping[str, str], with_schedule: bool) -> list[str]:
    """Return ``KEY=VALUE`` of all properties.

    Raises:
        ConfigError: one is impossible, or contradicts the platform.
    """
    given = {"NPU_COMPILER_TYPE": "PLUGIN", "NPU_PLATFORM": platform.number}
    for key, value in properties.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f"{shown(key)} is no property: its name has capitals, digits and underscores")
        if not isinstance(value, str) or not (value.isprintable() and len(value) <= MAX_REQUEST):
            raise ConfigError(f"{key} is {shown(value)}: must be a text of one line")
        if given.get(key, value) != value:
            raise ConfigError(f"{key} is {shown(value)}, and must be {given[key]} here: leave it out")
        given[key] = value
    if len(given) > MAX_PROPERTIES:
        raise ConfigError(
            f"{len(properties)} properties are given, at most {MAX_PROPERTIES - 2} are possible: leave some out"
        )
    if with_schedule:
        others = [each for each in given.get(_PARAMS, "").split() if not each.startswith(_SCHEDULE_PARAM)]
        given[_PARAMS] = " ".join([*others, f"{_SCHEDULE_PARAM}true"])
    return [f"{key}={value}" for key, value in given.items()]


@dataclass(frozen=True)
class _Compiled:
    """What a child says of a program that it has compiled."""

    seconds: float
    requirements: str


class _Session:
    """A child process and the private folder in which it works. Errors of the compiler itself leave it usable."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.child: LineChild | None = None
        try:
            self._scratch = ScratchFolder("staticllm-npu-")
        except OSError as error:
            raise DeviceError(
                f"no temporary folder can be made for the NPU compiler ({error.strerror or error}): set TMPDIR to a writable one"
            ) from None
        self._work = self._scratch.path / "work"
        self._log = Log(self._scratch.path / "stderr.txt")

    @property
    def is_usable(self) -> bool:
        return self.child is not None and self.child.is_usable

    def start(self, seconds: float) -> str:
        """Start the child, and return the versions that it says."""
        launch = self.launch
        work = self._work
        try:
            work.mkdir()
            self.child = LineChild(launch.command, environment=launch.environment, folder=work, errors=self._log.path)
        except OSError as error:
            raise DeviceError(f"{launch.what} cannot be started ({error.strerror or error}): {launch.remedy}") from None
        try:
            answer = self._answer(time.monotonic() + seconds)
        except TimeoutError:
            raise DeviceError(f"{launch.what} did not start in {seconds:g} s: {launch.remedy}") from None
        except ChildLostError as error:
            raise DeviceError(
                lost_text(f"{launch.what} ended when it started", error, self._log, launch.remedy)
            ) from None
        if not answer["ok"]:
            raise DeviceError(f"{launch.what} cannot be used ({_said(answer)}): {launch.remedy}")
        return f"openvino {_text(answer, 'openvino')}, NPU compiler {_compiler_version(_text(answer, 'compiler'))}"

    def save(self, model: ov.Model, job: str) -> None:
        """Write the model where the child reads it.

        Raises:
            DeviceError: it cannot be written.
        """
        work = self._work
        needed = sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")
        remedy = "free space there, or set TMPDIR to a folder of a larger disk"
        try:
            for path in work.iterdir():  # of a program that was refused
                path.unlink()
            free = shutil.disk_usage(work).free
            if needed > free:
                raise DeviceError(
                    f"{job} has {needed / 1e6:.1f} MB of weights, {work} has room for {free / 1e6:.1f} MB: {remedy}"
                )
            ov.save_model(model, work / MODEL, compress_to_fp16=False)
        except DeviceError:
            raise
        except (OSError, RuntimeError) as error:
            raise DeviceError(f"{job} cannot be written to {work} ({last_line(error)}): {remedy}") from None

    def compile(self, line: str, job: str, seconds: float) -> _Compiled:
        """Let the child compile the model, and return what it says of the program."""
        assert self.child is not None, "it was started"
        self._log.begin()
        try:
            self.child.tell(line)
            answer = self._answer(time.monotonic() + seconds)
        except TimeoutError:
            raise DeviceError(
                f"{job} was not compiled in {seconds:g} s, the limit: raise it, or compile fewer rows or layers at once"
            ) from None
        except ChildLostError as error:
            remedy = "compile it in smaller parts or another form, and report the crash to OpenVINO"
            raise DeviceError(lost_text(f"the NPU compiler crashed on {job}", error, self._log, remedy)) from None
        except BaseException:  # Ctrl-C: the process must not go on
            self.child.kill()
            self.child.end(END_SECONDS)
            raise
        if not answer["ok"]:
            raise DeviceError(self._refusal(job, _said(answer)))
        took = answer.get("seconds")
        return _Compiled(float(took) if isinstance(took, (int, float)) else 0.0, _text(answer, "requirements"))

    def _refusal(self, job: str, said: str) -> str:
        """Return the message about a program that was not compiled."""
        if _NO_LIBRARY in said:
            return f"{self.launch.what} cannot be used ({said}): {self.launch.remedy}"
        return refused_text(job, said, self._log)

    def program(self, platform: Platform, job: str, compiled: _Compiled, with_schedule: bool) -> NPUProgram:
        """Read what the child has written.

        Raises:
            DeviceError: it is missing, or damaged.
        """
        work = self._work
        try:
            blob = read_regular(work / BLOB, MAX_BLOB, follow=False)
            trace = read_regular(work / TRACE, MAX_TRACE, follow=False) if with_schedule else None
        except OSError as error:
            raise DeviceError(
                f"the program of {job} cannot be read ({error.strerror or error}): free space in {work}, or compile it without "
                "a schedule"
            ) from None
        if not blob:
            raise DeviceError(f"the program of {job} is empty: free space in {work}, or set TMPDIR to a larger disk")
        schedule = None if trace is None else read_schedule(trace, platform)
        for path in (work / BLOB, work / TRACE, work / MODEL, (work / MODEL).with_suffix(".bin")):
            path.unlink(missing_ok=True)
        return NPUProgram(blob, schedule, compiled.seconds, compiled.requirements, trace)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def close(self) -> None:
        """End the child, and remove its folder."""
        if self.child is not None:
            self.child.end(END_SECONDS)
        self._scratch.remove()

    def _answer(self, moment: float) -> dict[str, Any]:
        """Return the child's next answer. Raises ``TimeoutError`` and ``ChildLostError``, and the child has ended."""
        assert self.child is not None, "it was started"
        noise = 0
        while True:
            line = self.child.next_line(moment)
            if line.startswith(MARK):
                break
            self._log.add(line)
            noise += len(line) + 1
            if noise > MAX_NOISE:
                raise self._ended(f"it wrote more than {MAX_NOISE} characters that are no answer")
        try:
            answer = json.loads(line.removeprefix(MARK))
        except (ValueError, RecursionError):
            raise self._ended(f"it answered {shown(line[:200])}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise self._ended(f"it answered {shown(line[:200])}")
        return answer

    def _ended(self, reason: str) -> ChildLostError:
        """End the child, which does not keep to the protocol."""
        assert self.child is not None, "it was started"
        self.child.kill()
        code = self.child.end(END_SECONDS)
        return ChildLostError(f"because {reason}", code)


def _text(answer: Mapping[str, Any], key: str) -> str:
    """Return a text of an answer as one line, cut to ``MAX_TEXT`` characters."""
    value = answer.get(key)
    text = value[:MAX_TEXT] if isinstance(value, str) else ""
    return "".join(each if each.isprintable() else " " for each in text).strip()


def _said(answer: Mapping[str, Any]) -> str:
    """Return the last line of an answer's error, which is the reason; the lines before it are OpenVINO's source files."""
    lines = [line.strip() for line in str(answer.get("error", "")).splitlines() if line.strip()]
    return _text({"line": lines[-1]}, "line") if lines else "no reason"


def _compiler_version(number: str) -> str:
    """Return ``8.4`` for OpenVINO's 524292: the major version is in the upper 16 bits."""
    if not (number.isascii() and number.isdecimal()):
        return number or "unknown"
    return f"{int(number) >> 16}.{int(number) & 0xFFFF}"
