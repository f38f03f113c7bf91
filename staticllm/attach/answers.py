"""What the daemon answers, as values and exceptions of the program."""

from __future__ import annotations

from ..wire.messages import Kind, Message, ProtocolError

EXCEPTIONS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (RuntimeError, ValueError, TypeError, KeyError, IndexError, NotImplementedError, MemoryError)
}


class UnavailableError(RuntimeError):
    """The daemon cannot be used, for the reason in the text."""


class RefusedError(UnavailableError):
    """The daemon does not take this program, model or request."""


class DaemonGoneError(RuntimeError):
    """The connection has ended in the middle of a call."""


def checked(answer: Message) -> Message:
    """Return an answer that carries a result.

    Raises:
        RefusedError: the daemon refused.
        ProtocolError: it is not an answer.
        Exception: the one that the call raised in the daemon.
    """
    if answer.kind is Kind.FAILED:
        raise _kind_of(answer)(str(answer.body.get("text", "")))
    if answer.kind is Kind.REFUSED:
        raise RefusedError(str(answer.body.get("reason", "the daemon refused")))
    if answer.kind not in (Kind.OK, Kind.DONE, Kind.WELCOME):
        raise ProtocolError(f"{answer.kind.name} is not an answer")
    return answer


def _kind_of(answer: Message) -> type[Exception]:
    """Return the class of an error, or the nearest base of it, that programs without our package have."""
    bases = answer.body.get("bases")
    names = [answer.body.get("type"), *(bases if isinstance(bases, list) else ())]
    return next((EXCEPTIONS[name] for name in names if isinstance(name, str) and name in EXCEPTIONS), RuntimeError)
