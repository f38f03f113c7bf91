"""Errors as answers of the daemon: what it sends if a call failed or is refused, and what its clients raise."""

from __future__ import annotations

from staticllm.errors import MAX_SENT, DeviceError, StaticLLMError, from_wire, last_line, to_wire
from staticllm.wire.messages import Kind, Message


def failed(error: BaseException) -> Message:
    """Return the answer to a call that raised an error."""
    return Message(Kind.FAILED, body=to_wire(error))


def refused(error: BaseException) -> Message:
    """Return the answer to a client, model or request that the daemon does not take; an attached program runs it natively."""
    return Message(Kind.REFUSED, body={**to_wire(error), "reason": last_line(error)})


def check(answer: Message) -> None:
    """Raise the error that an answer reports, if it does.

    Raises:
        StaticLLMError: it was refused or failed.
    """
    if answer.kind is Kind.REFUSED and "type" not in answer.body:  # a daemon of another protocol says only the reason
        raise StaticLLMError(str(answer.body.get("reason", "the daemon refused"))[:MAX_SENT])
    if answer.kind in (Kind.REFUSED, Kind.FAILED):
        try:
            error = from_wire(answer.body)
        except ValueError as damaged:
            raise DeviceError(f"the daemon's answer is damaged: {damaged}") from damaged
        raise error
