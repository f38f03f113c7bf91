"""Errors as answers of another process: what it sends if a call failed or is refused, and what its clients raise."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from staticllm.children.child import take_pipes
from staticllm.errors import MAX_SENT, DeviceError, StaticLLMError, from_wire, last_line, to_wire
from staticllm.wire.messages import Kind, Message, ProtocolError, read_message, write_message


def failed(error: BaseException) -> Message:
    """Return the answer to a call that raised an error."""
    return Message(Kind.FAILED, body=to_wire(error))


def refused(error: BaseException) -> Message:
    """Return the answer to a client, model or request that the daemon does not take; an attached program runs it natively."""
    return Message(Kind.REFUSED, body={**to_wire(error), "reason": last_line(error)})


def check(answer: Message) -> None:
    """Check that an answer reports no error.

    Raises:
        StaticLLMError: the error that it reports, or the answer is damaged.
    """
    try:
        error = error_of(answer)
    except ValueError as damaged:
        raise DeviceError(f"the daemon's answer is damaged: {damaged}") from damaged
    if error is not None:
        raise error


def error_of(answer: Message, prefix: str = "") -> StaticLLMError | None:
    """Return the error that an answer reports, with ``prefix`` before its text; None for a result.

    Raises:
        ValueError: the error is damaged.
    """
    if answer.kind is Kind.REFUSED and "type" not in answer.body:  # a daemon of another protocol says only the reason
        return StaticLLMError(str(answer.body.get("reason", "the daemon refused"))[:MAX_SENT])
    return from_wire(answer.body, prefix) if answer.kind in (Kind.REFUSED, Kind.FAILED) else None


def answer_all(
    answer: Callable[[Mapping[str, Any]], dict[str, Any]],
    failure: Callable[[Exception, Mapping[str, Any]], StaticLLMError],
) -> None:
    """Answer the parent's questions until it closes the pipe: what a child process does. It ends then, within an answer too.

    Errors of ours are answers as they are; of others, ``failure`` makes one of ours, which says what helps.
    """
    questions, answers = take_pipes()
    waiting = SimpleQueue[Message]()
    Thread(target=_read, args=(questions, waiting), name="staticllm-questions", daemon=True).start()
    while True:
        message = waiting.get()
        try:
            found = Message(Kind.OK, body=answer(message.body))
        except StaticLLMError as error:
            found = failed(error)
        except Exception as error:
            found = failed(failure(error, message.body))
        write_message(answers, found)


def _read(questions: BinaryIO, waiting: SimpleQueue[Message]) -> None:
    """Read questions while another is answered, to notice the end of the parent at once."""
    try:
        while (message := read_message(questions)) is not None:
            waiting.put(message)
    except (ProtocolError, OSError):
        pass
    finally:
        os._exit(0)
