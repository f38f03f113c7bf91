"""Speech models in the daemon: programs send windows of recordings, and share the calls of their decoder."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import OnProgress
from staticllm.daemon.bodies import Claim, Snapshot
from staticllm.daemon.models.client_models import SpeechOrigin
from staticllm.daemon.models.language_model import LanguageModel
from staticllm.daemon.sharing.devices import Devices
from staticllm.errors import ConfigError, PromptError
from staticllm.pipelines.engine.window_jobs import AlignmentJobs, WindowJobs
from staticllm.pipelines.launch.engine import Launched
from staticllm.pipelines.scheduling.interface import SHARED_BOUND
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.pipelines.speech.speech_files import speech_files
from staticllm.pipelines.speech.speech_model import SpeechModel, load_speech, remove_late


class SpeechService(LanguageModel):
    """A speech model whose decoder runs in an engine of the daemon; the encoder's windows are jobs of that engine."""

    def __init__(self, id: int, model: SpeechModel, devices: Devices, num_bytes: int = 0) -> None:
        assert isinstance(model.launched, Launched), "it was loaded in this process"
        assert isinstance(model.windows, WindowJobs)
        super().__init__(id, model.launched, devices, num_bytes)
        self._model = model
        self.windows = model.windows

    @property
    def features_shape(self) -> tuple[int, int]:
        """Bands and columns of a window."""
        return self._model.features_shape

    @property
    def seconds(self) -> float:
        """The seconds of device time that a window takes."""
        return self.windows.seconds

    @property
    def num_cross_windows(self) -> int:
        """The number of windows that one client may have: all but one, so that other clients have a place."""
        windows = self.launched.config.cross_windows
        assert windows is not None, "load_speech sets them"
        return max(1, windows.num_cross_windows - 1)

    def describe(self) -> dict[str, Any]:
        bands, columns = self.features_shape
        return {**super().describe(), "num_cross_windows": self.num_cross_windows, "bands": bands, "columns": columns}

    def check_window(self, window: int) -> None:
        if not window:
            raise PromptError("the request has no window, or its window was removed")

    def encode(self, features: NDArray[np.float32], priority: int, owner: int) -> Future[int]:
        """Return the future number of a window, for which a client pays; ``give_up`` must follow.

        Raises ``PromptError`` (the features are not finite) and ``ClosedError``.
        """
        if not np.isfinite(features).all():
            raise PromptError("the features of a window are not finite: check the sound")
        encoded = self.windows.encode(features, priority, owner=owner)
        self.engine.hurry(priority, owner)
        return encoded

    def give_up(self, encoded: Future[int]) -> None:
        """Remove a window, or give it up if it is not there yet."""
        if not encoded.cancel():
            encoded.add_done_callback(lambda future: remove_late(self.windows, future))

    def align(self, window: int, tokens: Sequence[int], priority: int, owner: int) -> Future[NDArray[np.float32]]:
        """Return the future weights ``[heads, tokens, cross_window_len]`` of a text about a window, for which a client pays.

        Raises ``ConfigError`` (the model was loaded without heads), ``PromptError`` (tokens are wrong) and ``ClosedError``.
        """
        alignment = self._model.alignment
        if not isinstance(alignment, AlignmentJobs):
            raise ConfigError("the model was loaded without alignment heads: load it with word_timestamps=True")
        most = self._model.files.max_positions
        if not 0 < len(tokens) <= most or not self.are_tokens(tokens):
            last = self.launched.vocab_size - 1
            raise PromptError(f"a text of {len(tokens)} ids: must be 1 to {most} ids from 0 to {last}")
        found = alignment.align(window, tokens, priority, owner)
        self.engine.hurry(priority, owner)
        return found

    def snapshot(self, asked: Snapshot) -> int:
        """Raise an error: keys and values of a speech model are about a window. Raises ``ConfigError``."""
        raise ConfigError("a speech model has no snapshots")

    def claim(self, client: str, asked: Claim) -> None:
        """Raise an error: windows are no conversations. Raises ``ConfigError``."""
        raise ConfigError("a speech model has no conversations")

    def close(self) -> None:
        self._model.close()


def compile_speech_model(
    origin: SpeechOrigin, id: int, devices: Devices, on_progress: OnProgress = lambda event: None
) -> SpeechService:
    """Load a speech model on the first of its devices that can run it, and start the engine of its decoder.

    Raises as ``StaticWhisperPipeline``.
    """
    policy = make_policy(origin.candidates[0].config.scheduler)
    files = speech_files(origin.directory)
    model = load_speech(
        files, origin.candidates, origin.num_windows, origin.heads, policy, on_progress, shared_bound=SHARED_BOUND
    )
    return SpeechService(id, model, devices, origin.num_bytes)
