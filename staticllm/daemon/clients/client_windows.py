"""The windows of a connection: windows of recordings that speech models encode for it, and the texts about them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.children.answers import failed
from staticllm.daemon import bodies
from staticllm.daemon.bodies import read_body
from staticllm.daemon.clients.session import Session
from staticllm.daemon.clients.streams import LateAnswer, OutputStream
from staticllm.daemon.models.speech_service import SpeechService
from staticllm.errors import BusyError, ClosedError, PromptError
from staticllm.wire.channel import Channel
from staticllm.wire.messages import Kind, Message, ProtocolError


@dataclass(eq=False)
class ClientWindow:
    """A window of a client: the features that have come, ``num_bands`` of them, and what the model makes of them."""

    model: SpeechService
    features: NDArray[np.float32]
    num_bands: int = 0
    encoded: Future[int] | None = None

    @property
    def number(self) -> int:
        """Its number in the engine.

        Raises:
            PromptError: it was not encoded yet.
        """
        if self.encoded is None or not self.encoded.done():
            raise PromptError("the window was not encoded yet: wait for the answer")
        return self.encoded.result()


class WindowHandlers:
    """The windows of a connection by the client's numbers; nobody else can name them. They end with it.

    ``stream`` returns what sends answers that come later than the next question. Runs on the connection's thread.
    """

    def __init__(self, session: Session, channel: Channel, stream: Callable[[], OutputStream]) -> None:
        self._session = session
        self._channel = channel
        self._stream = stream
        self._windows: dict[int, ClientWindow] = {}
        self._aligned: Future[NDArray[np.float32]] | None = None
        self.handlers = {Kind.ENCODE: self._encode, Kind.ALIGN: self._align, Kind.RELEASE_WINDOW: self._release}

    def number_of(self, window: int, model: object) -> int:
        """Return the engine's number of a window of the client; 0 for 0.

        Raises:
            PromptError: ``model`` has none such.
        """
        return self._of_model(window, model).number if window else 0

    def close(self) -> None:
        for number in tuple(self._windows):
            self._remove(number)
        if self._aligned is not None:
            self._aligned.cancel()
            self._aligned = None  # it holds the model

    def _of_model(self, window: int, model: object) -> ClientWindow:
        found = self._windows.get(window)
        if found is None or found.model is not model:
            raise PromptError("the request has no window, or its window was removed")
        return found

    def _encode(self, message: Message) -> Message | None:
        asked = read_body(message, bodies.Encode)
        model = self._session.speech_model(message.handle)
        for number in asked.released:
            self._remove(number)
        if asked.first == 0:
            self._begin(asked.window, model)
        window = self._of_model(asked.window, model)
        try:
            self._take(window, asked.first, message)
            if window.num_bands < len(window.features):
                return Message(Kind.OK)
            priority = asked.priority + self._session.priority
            window.encoded = model.encode(window.features, priority, self._session.client.number)
        except BaseException:
            self._remove(asked.window)
            raise
        stream = self._stream()
        question = message.number
        window.encoded.add_done_callback(lambda encoded: stream.answer(_encoded(question, encoded, model)))
        return None

    def _begin(self, number: int, model: SpeechService) -> None:
        """Make a window without features.

        Raises:
            BusyError: there is one, or the client has too many.
        """
        if number in self._windows:
            raise BusyError(f"window {number} is there already: release it first")
        self._session.count_window(model.id, 1, model.num_cross_windows)
        self._windows[number] = ClientWindow(model, np.empty(model.features_shape, np.float32))

    def _take(self, window: ClientWindow, first: int, message: Message) -> None:
        """Add the bands of a message to a window. Raises ``ProtocolError`` (there is no one tensor) and ``PromptError``."""
        tensors = self._channel.tensors_of(message)
        if len(tensors) != 1:
            raise ProtocolError(f"ENCODE: {len(tensors)} tensors, must be one")
        part = tensors[0][1]
        num_bands, columns = window.features.shape
        fits = (
            part.dtype == np.float32
            and part.ndim == 2
            and part.shape[1] == columns
            and 0 < len(part) <= num_bands - first
        )
        if not fits or first != window.num_bands or window.encoded is not None:
            raise PromptError(
                f"features {part.dtype} {list(part.shape)} from band {first} on: must be float32 [n, {columns}] of "
                f"{num_bands} bands, in their order"
            )
        window.features[first : first + len(part)] = part
        window.num_bands += len(part)

    def _align(self, message: Message) -> None:
        asked = read_body(message, bodies.Align)
        model = self._session.speech_model(message.handle)
        window = self._of_model(asked.window, model)
        if self._aligned is not None and not self._aligned.done():
            raise BusyError("a text of this program is being aligned: wait for it")
        stream = self._stream()
        number = message.number
        priority = asked.priority + self._session.priority
        self._aligned = model.align(window.number, asked.tokens, priority, self._session.client.number)
        self._aligned.add_done_callback(lambda found: stream.answer(_weights(number, found)))

    def _release(self, message: Message) -> Message:
        self._remove(read_body(message, bodies.ReleaseWindow).window)
        return Message(Kind.OK)

    def _remove(self, number: int) -> None:
        """End the requests about a window, and give its place back; an unknown number is ignored."""
        window = self._windows.pop(number, None)
        if window is None:
            return
        self._session.count_window(window.model.id, -1, window.model.num_cross_windows)
        if window.encoded is not None:
            self._stream().cancel_about(number)
            window.model.give_up(window.encoded)


def _encoded(number: int, encoded: Future[Any], model: SpeechService) -> LateAnswer:
    """Return the answer to a window that was encoded, or could not be."""
    error = _error_of(encoded)
    return LateAnswer(Message(Kind.OK, number=number, time=model.seconds) if error is None else _failed(number, error))


def _weights(number: int, found: Future[NDArray[np.float32]]) -> LateAnswer:
    """Return the answer to a text that was aligned, or could not be."""
    error = _error_of(found)
    return (
        LateAnswer(Message(Kind.DONE, number=number), (found.result(),))
        if error is None
        else LateAnswer(_failed(number, error))
    )


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError:
        return ClosedError("the window was released")


def _failed(number: int, error: BaseException) -> Message:
    answer = failed(error)
    answer.number = number
    return answer
