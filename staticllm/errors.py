"""The tree of exceptions: every user mistake raises one with the value, the limit and the remedy in one line.

``StaticLLMError`` is a ``RuntimeError`` because ``openvino_genai`` raises that: handlers written for GenAI keep working.

    StaticLLMError
    ├── ModelError             the model directory or its files
    │   └── UnsupportedModelError   a graph that a pass cannot lower; names the pass and the node
    ├── ConfigError            a property or an option (also a ValueError)
    │   └── GenerationConfigError
    ├── DeviceError            a device that is missing, or that refused a program
    ├── PromptError            an input that cannot be run (also a ValueError)
    │   └── PromptTooLongError
    ├── AdapterError           a LoRA adapter that is missing or damaged, or does not fit the model
    ├── BlobError              a set of blobs that is damaged, or for another model, machine or layout
    ├── NumericalError         the device computed values that are not finite
    ├── SnapshotError          a snapshot that is damaged, or of another model
    ├── BusyError              more than ``MAX_WAITING`` waiting requests, or no device in time for a text
    └── ClosedError            the pipeline was closed
        └── ProcessLostError   the other process in which the model runs has ended

A class declares its fields as annotations (``stage: str``): with them, ``to_wire`` and ``from_wire`` carry an error from one
process to another as the error that it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_type_hints

MAX_LEN = 1 << 20
"""The most tokens of a prompt or an answer that a model can be loaded for."""
MAX_SHOWN = 300
"""The most characters of a value in a message."""
MAX_SENT = 8192
"""The most characters of each text of an error that is sent to another process."""
MAX_BASES = 32
"""The most base classes of an error that another process sends."""


class StaticLLMError(RuntimeError):
    """Base of every error that staticllm raises on purpose."""


class ModelError(StaticLLMError):
    """A model directory that is missing, half-written or not a language model."""


class UnsupportedModelError(ModelError):
    """A model that a pass cannot lower. Raised before anything is compiled."""

    stage: str
    reason: str

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.stage, self.reason)


class ConfigError(StaticLLMError, ValueError):
    """A property with an unknown name or an impossible value."""


class GenerationConfigError(ConfigError):
    """A generation option with an unknown name or an impossible value."""


class DeviceError(StaticLLMError):
    """A device that is not on this machine, or that refused a program."""


class PromptError(StaticLLMError, ValueError):
    """An input that cannot be run: empty, of a wrong type, or with ids outside the vocabulary."""


class PromptTooLongError(PromptError):
    """A prompt, or a conversation, with more tokens than ``MAX_PROMPT_LEN``."""

    num_tokens: int
    limit: int
    _is_chat: bool

    def __init__(self, num_tokens: int, limit: int, is_chat: bool = False) -> None:
        what = "prompt"
        remedy = "shorten the prompt"
        if is_chat:
            what = "conversation"
            remedy = "begin a new one (start_chat), bound its answers (max_new_tokens)"
        longer = f" or load the model with MAX_PROMPT_LEN={num_tokens} or more"
        if num_tokens > MAX_LEN:
            longer = f"; no model can be loaded with more than MAX_PROMPT_LEN={MAX_LEN}"
        super().__init__(f"the {what} has {num_tokens} tokens, MAX_PROMPT_LEN is {limit}: {remedy}{longer}")
        self.num_tokens = num_tokens
        self.limit = limit
        self._is_chat = is_chat

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_tokens, self.limit, self._is_chat)


class NumericalError(StaticLLMError):
    """Logits that are not finite. The request's KV slots are discarded, and the pipeline stays usable."""


class AdapterError(StaticLLMError):
    """A LoRA adapter whose file is missing or damaged, that does not fit the model, or that the pipeline was not loaded with."""


class BlobError(StaticLLMError):
    """A set of blobs that is damaged, cut short, or made for another model, machine or layout; the message names it."""


class BusyError(StaticLLMError):
    """Too many requests or texts wait already. The call had no effect: try again, or load with a larger limit."""

    retry_after: float | None
    """The predicted seconds after which a call like this one would succeed; infinite if it never would, None if nothing is
    predicted."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.retry_after)


class ClosedError(StaticLLMError):
    """The pipeline was closed; requests that had not ended were cancelled."""


class ProcessLostError(ClosedError):
    """The daemon or worker process in which the model runs has ended; the next request starts another one."""


class SnapshotError(StaticLLMError):
    """A snapshot that cannot be saved or loaded: no cached sequence begins with the prompt, or the file does not fit."""


def pipeline_closed() -> ClosedError:
    """Return the error of a call of a pipeline that was closed."""
    return ClosedError("the pipeline is closed: load the model again")


@contextmanager
def enough_memory(kind: type[StaticLLMError], what: str) -> Iterator[None]:
    """Raise a ``kind`` of error, which says for ``what`` memory is missing, in place of a ``MemoryError`` of a block."""
    try:
        yield
    except MemoryError as error:
        raise kind(
            f"there is not enough memory for {what}: close other models or programs, or raise the limit of this process"
        ) from error


@contextmanager
def encoding(what: str) -> Iterator[None]:
    """Raise a ``ModelError`` in place of what a tokenizer raises in a block that encodes a text."""
    try:
        yield
    except StaticLLMError:
        raise
    except RuntimeError as error:
        raise ModelError(
            f"the tokenizer cannot encode {what} ({last_line(error)}): it was converted wrongly if `staticllm "
            "verify` says so; export the model with another version of openvino-tokenizers, or use its GGUF file"
        ) from error


def as_ours(error: BaseException) -> Exception:
    """Return the exception that a reader receives: ours and failed assertions as they are, else a ``DeviceError``."""
    if isinstance(error, (StaticLLMError, AssertionError)):
        return error
    raised = DeviceError(f"the device failed: {last_line(error)}")
    raised.__cause__ = error
    return raised


def shown(value: object) -> str:
    """Return the repr of a value for a message: one line of at most ``MAX_SHOWN`` characters, whatever the value is.

    Python has no repr of whole numbers with more than 4300 digits, and none of values that are nested too deeply.
    """
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # that of a caller's class may raise anything
        return f"a {type(value).__name__} that Python cannot show"
    text = " ".join(text.splitlines())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 20]} … {text[-17:]}"


def quoted(path: object) -> str:
    """Return a path or a name in quotes, as it is typed: ``repr`` would double the backslashes of Windows.

    What cannot be printed is escaped, so that a hostile name cannot end the line or move the cursor.
    """
    return repr(str(path)).replace("\\\\", "\\")


def missing_runtime(error: ImportError) -> str | None:
    """Return what a library of OpenVINO needs that a new Windows does not have; None if the import failed for another reason."""
    if sys.platform != "win32" or "DLL load failed" not in str(error):
        return None
    return (
        f"{error} Microsoft's C++ runtime is not complete on this computer, and no package of OpenVINO brings it: run "
        "`python -m pip install msvc-runtime`, or install Microsoft's Visual C++ Redistributable (vc_redist.x64.exe)"
    )


def last_line(error: BaseException) -> str:
    """Return the last line of a message: OpenVINO puts its own source files and lines before it."""
    lines = [line.strip() for line in _text_of(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def to_wire(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON types, for another process: ``type`` and its ``bases``, nearest first, ``text`` and ``fields``.

    Texts are cut to ``MAX_SENT`` characters.
    """
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    fields = _fields_of(_nearest(names))
    sent = {name: _sent(getattr(error, name)) for name in fields if hasattr(error, name)}
    return {"type": names[0], "bases": names[1 : MAX_BASES + 1], "text": _text_of(error)[:MAX_SENT], "fields": sent}


def from_wire(values: object, prefix: str = "") -> StaticLLMError:
    """Return the error that ``to_wire`` described in another process, with ``prefix`` before its text.

    Of a class that this process does not know, it is the nearest base that it knows, at last a ``StaticLLMError``.

    Raises:
        ValueError: ``values`` describe no error; the message is one line.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"an error is {shown(values)}: must be an object")
    text = _checked_text("text", values.get("text"))
    bases = values.get("bases")
    if not isinstance(bases, list) or len(bases) > MAX_BASES:
        raise ValueError(f"bases of an error are {shown(bases)}: must be a list of at most {MAX_BASES} names")
    names = [_checked_text("type", values.get("type")), *(_checked_text("bases", name) for name in bases)]
    sent = values.get("fields")
    if not isinstance(sent, Mapping):
        raise ValueError(f"fields of an error are {shown(sent)}: must be an object")
    kind = _nearest(names, sent)
    error = kind.__new__(kind, f"{prefix}{text}")  # without its constructor, which would write the text again
    for name, hint in _fields_of(kind).items():
        setattr(error, name, _received(name, sent[name], hint))
    return error


def _nearest(names: list[str], has: Mapping[str, object] | None = None) -> type[StaticLLMError]:
    """Return the first of these classes that is one of ours; with ``has``, the first whose fields are all there."""
    table = {StaticLLMError.__name__: StaticLLMError}
    rest = [StaticLLMError]
    while rest:
        for kind in rest.pop().__subclasses__():
            if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:  # another may have the name of ours
                table[kind.__name__] = kind
                rest.append(kind)
    found = (table[name] for name in names if name in table)
    return next((kind for kind in found if has is None or _fields_of(kind).keys() <= has.keys()), StaticLLMError)


def _fields_of(kind: type[StaticLLMError]) -> dict[str, Any]:
    """Return the fields of a class, with their types."""
    return get_type_hints(kind)


def _sent(value: object) -> object:
    """Return a field as a value of JSON, which has no infinite numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value[:MAX_SENT] if isinstance(value, str) else value


def _received(name: str, value: object, hint: Any) -> object:
    """Return a field as its class has it.

    Raises:
        ValueError: it is something else.
    """
    is_whole = type(value) is int and value.bit_length() < 64
    if hint in (float, float | None) and (is_whole or value in ("inf", "-inf", "nan")):
        return float(value)  # type: ignore[arg-type]
    if hint is str:
        return _checked_text(name, value)
    if not isinstance(value, hint) or (isinstance(value, int) and not is_whole and hint is not bool):
        raise ValueError(f"{name} of an error is {shown(value)}: must be of the type {getattr(hint, '__name__', hint)}")
    return value


def _checked_text(name: str, value: object) -> str:
    """Return a text of an error.

    Raises:
        ValueError: it is something else, or too long.
    """
    if not isinstance(value, str) or len(value) > MAX_SENT:
        raise ValueError(f"{name} of an error is {shown(value)}: must be a text of at most {MAX_SENT} characters")
    return value


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of a user may have any __str__
        return ""
