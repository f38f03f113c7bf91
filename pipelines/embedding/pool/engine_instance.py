"""An instance whose calls are jobs of an engine, because a chat model or another encoder owns its device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError

import numpy as np

from staticllm.errors import DeviceError, NumericalError, as_ours

from ...engine.jobs import JobHost
from ..embedding_request import EmbeddingRequest
from ..encoder_runner import EncoderRunner
from ..packing.encoder_buffers import Vectors
from ..packing.tokenized_text import TokenizedText
from ..queue.drivers import JobDriver
from ..queue.loads import Costs
from .instances import EncoderInfo, costs_of

UNLIMITED = 1 << 62
"""``max_waiting`` of the driver: the queue of the pool has limited the batch already."""


class EngineInstance:
    """An instance on the device of an engine. The scheduler of the engine decides when each call of a batch runs.

    The thread of the pool passes a batch to a ``JobDriver`` and waits for it. It measures the duration, including other work
    between the calls. The queue uses it to predict later batches, and moves texts to other devices while the engine is busy.
    """

    def __init__(self, name: str, runner: EncoderRunner, info: EncoderInfo, host: JobHost) -> None:
        """Add the calls of this instance to the jobs of ``host``.

        Raises:
            ClosedError: it was closed.
        """
        self.name = name
        self.info = info
        self._runner = runner
        self._host = host
        self._driver = JobDriver(runner, UNLIMITED, name)
        self._request: EmbeddingRequest | None = None
        self.device_seconds = 0.0
        host.add_jobs(self._driver)

    @property
    def costs(self) -> Costs:
        """Seconds per call of each variant."""
        return costs_of(self._runner)

    def embed(self, texts: Sequence[TokenizedText], priority: int = 0) -> Vectors:
        """Return the vectors ``[n, width]`` of the texts. One that is not finite belongs to a text that fails alone, too.

        Raises:
            ClosedError: the engine was closed.
            StaticLLMError: the device failed.
        """
        try:
            return self._run(texts, priority)
        except NumericalError:
            if len(texts) == 1:
                return np.full((1, self.info.width), np.nan, np.float32)
        return np.concatenate([self.embed([text], priority) for text in texts])

    def _run(self, texts: Sequence[TokenizedText], priority: int) -> Vectors:
        request = EmbeddingRequest(texts, self.info.width, priority)
        self._request = request
        try:
            self._driver.submit(request)
            return request.future.result()
        except CancelledError:
            raise DeviceError(f"{self.name}: its engine has not run a batch in time") from None
        finally:
            self._request = None
            self.device_seconds += request.device_seconds

    def interrupt(self) -> bool:
        """Cancel the batch that waits for the engine; its thread gets a ``DeviceError``. Return False if none waits."""
        request = self._request
        return request is not None and request.future.cancel()

    def recover(self) -> None:
        """Embed a text of one token.

        Raises:
            StaticLLMError: the device fails for it, too, or the engine was closed.
        """
        try:
            self._run([TokenizedText(np.zeros(1, np.int64))], 0)
        except Exception as error:
            raise as_ours(error) from error

    def close(self) -> None:
        """Remove the calls from the engine, which keeps running, and drop the programs."""
        self._host.remove_jobs(self._driver)
