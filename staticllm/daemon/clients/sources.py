"""The sources of a connection: windows of recordings that speech models hear for it, and the texts about them."""

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
from staticllm.daemon.clients.streams import Answer, OutputStream
from staticllm.daemon.models.speech_service import SpeechService
from staticllm.errors import BusyError, ClosedError, PromptError
from staticllm.wire.channel import Channel
from staticllm.wire.messages import Kind, Message, ProtocolError


@dataclass(eq=False)
class ClientSource:
    """A window of a client: the features that have come, ``num_bands`` of them, and what the model makes of them."""

    model: SpeechService
    features: NDArray[np.float32]
    num_bands: int = 0
    heard: Future[int] | None = None

    @property
    def number(self) -> int:
        """Its number in the engine.

        Raises:
            PromptError: it was not heard yet.
        """
        if self.heard is None or not self.heard.done():
            raise PromptError("the source was not heard yet: wait for the answer")
        return self.heard.result()


class SourceHandlers:
    """The sources of a connection by the client's numbers; nobody else can name them. They end with it.

    ``stream`` returns what sends answers that come later than the next question. Runs on the connection's thread.
    """

    def __init__(self, session: Session, channel: Channel, stream: Callable[[], OutputStream]) -> None:
        self._session = session
        self._channel = channel
        self._stream = stream
        self._sources: dict[int, ClientSource] = {}
        self._aligned: Future[NDArray[np.float32]] | None = None
        self.handlers = {Kind.HEAR: self._hear, Kind.ALIGN: self._align, Kind.FORGET: self._forget}

    def number_of(self, source: int, model: object) -> int:
        """Return the engine's number of a source of the client; 0 for 0.

        Raises:
            PromptError: ``model`` has none such.
        """
        return self._of_model(source, model).number if source else 0

    def close(self) -> None:
        for number in tuple(self._sources):
            self._remove(number)
        if self._aligned is not None:
            self._aligned.cancel()
            self._aligned = None  # it holds the model

    def _of_model(self, source: int, model: object) -> ClientSource:
        found = self._sources.get(source)
        if found is None or found.model is not model:
            raise PromptError("the request has no source, or its source was removed")
        return found

    def _hear(self, message: Message) -> Message | None:
        asked = read_body(message, bodies.Hear)
        model = self._session.speech_model(message.handle)
        for number in asked.forget:
            self._remove(number)
        if asked.first == 0:
            self._begin(asked.source, model)
        source = self._of_model(asked.source, model)
        try:
            self._take(source, asked.first, message)
            if source.num_bands < len(source.features):
                return Message(Kind.OK)
            priority = asked.priority + self._session.priority
            source.heard = model.hear(source.features, priority, self._session.client.number)
        except BaseException:
            self._remove(asked.source)
            raise
        stream = self._stream()
        question = message.number
        source.heard.add_done_callback(lambda heard: stream.answer(_heard(question, heard, model)))
        return None

    def _begin(self, number: int, model: SpeechService) -> None:
        """Make a source without features.

        Raises:
            BusyError: there is one, or the client has too many.
        """
        if number in self._sources:
            raise BusyError(f"source {number} is there already: forget it first")
        self._session.count_source(model.id, 1, model.num_sources)
        self._sources[number] = ClientSource(model, np.empty(model.features_shape, np.float32))

    def _take(self, source: ClientSource, first: int, message: Message) -> None:
        """Add the bands of a message to a source. Raises ``ProtocolError`` (there is no one tensor) and ``PromptError``."""
        tensors = self._channel.tensors_of(message)
        if len(tensors) != 1:
            raise ProtocolError(f"HEAR: {len(tensors)} tensors, must be one")
        part = tensors[0][1]
        num_bands, columns = source.features.shape
        fits = (
            part.dtype == np.float32
            and part.ndim == 2
            and part.shape[1] == columns
            and 0 < len(part) <= num_bands - first
        )
        if not fits or first != source.num_bands or source.heard is not None:
            raise PromptError(
                f"features {part.dtype} {list(part.shape)} from band {first} on: must be float32 [n, {columns}] of "
                f"{num_bands} bands, in their order"
            )
        source.features[first : first + len(part)] = part
        source.num_bands += len(part)

    def _align(self, message: Message) -> None:
        asked = read_body(message, bodies.Align)
        model = self._session.speech_model(message.handle)
        source = self._of_model(asked.source, model)
        if self._aligned is not None and not self._aligned.done():
            raise BusyError("a text of this program is being aligned: wait for it")
        stream = self._stream()
        number = message.number
        priority = asked.priority + self._session.priority
        self._aligned = model.align(source.number, asked.tokens, priority, self._session.client.number)
        self._aligned.add_done_callback(lambda found: stream.answer(_weights(number, found)))

    def _forget(self, message: Message) -> Message:
        self._remove(read_body(message, bodies.Forget).source)
        return Message(Kind.OK)

    def _remove(self, number: int) -> None:
        """End the requests about a source, and give its place back; an unknown number is ignored."""
        source = self._sources.pop(number, None)
        if source is None:
            return
        self._session.count_source(source.model.id, -1, source.model.num_sources)
        if source.heard is not None:
            self._stream().cancel_about(number)
            source.model.give_up(source.heard)


def _heard(number: int, heard: Future[Any], model: SpeechService) -> Answer:
    """Return the answer to a window that was heard, or could not be."""
    error = _error_of(heard)
    return Answer(Message(Kind.OK, number=number, time=model.seconds) if error is None else _failed(number, error))


def _weights(number: int, found: Future[NDArray[np.float32]]) -> Answer:
    """Return the answer to a text that was aligned, or could not be."""
    error = _error_of(found)
    return (
        Answer(Message(Kind.DONE, number=number), (found.result(),))
        if error is None
        else Answer(_failed(number, error))
    )


def _error_of(future: Future[Any]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError:
        return ClosedError("the source was forgotten")


def _failed(number: int, error: BaseException) -> Message:
    answer = failed(error)
    answer.number = number
    return answer
