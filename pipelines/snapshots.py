"""Writes the keys and values of conversations to files, and reads them in another process with the same model."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from staticllm.errors import SnapshotError
from staticllm.model_dir import weights_of

from ..compiler_passes.artifacts.fingerprint import fingerprint_model
from .daemon_client.remote_launch import RemoteLaunched
from .engine.client import SnapshotTarget
from .launch.engine import Launched
from .text.input_processor import InputProcessor


class ModelSnapshots:
    """The snapshots of one model that was launched. Any thread may call the methods."""

    def __init__(self, directory: Path, launched: Launched | RemoteLaunched, input_processor: InputProcessor) -> None:
        self._directory = directory
        self._launched = launched
        self._input_processor = input_processor
        self._key = launched.config.integrity_key or b""
        self._model_identity = ""

    def save(self, ids: list[int], path: str | os.PathLike[str]) -> int:
        """Write the keys and values of the longest cached prefix of ``ids``, and return its number of tokens.

        Raises:
            SnapshotError: no cached sequence begins with these tokens, or the file cannot be written.
            ClosedError: the engine was closed.
        """
        return self._launched.engine.save_snapshot(ids, self._target(path))

    def load(self, path: str | os.PathLike[str]) -> int:
        """Read a file that ``save`` wrote, and return its number of tokens.

        Raises:
            SnapshotError: the file is missing, damaged or of another model, or there is no room for its tokens.
            ClosedError: the engine was closed.
        """
        return self._launched.engine.load_snapshot(self._target(path))

    def _target(self, path: str | os.PathLike[str]) -> SnapshotTarget:
        try:
            place = Path(os.fsdecode(path))
        except Exception:  # it is of another type, or of a caller's class
            raise SnapshotError(f"path is a {type(path).__name__}: must be the path of a file") from None
        return SnapshotTarget(place, self._identity(), self._key, self._input_processor.adapter_scales)

    def _identity(self) -> dict[str, str]:
        """Return the values that a snapshot's reader must share; the digest of the weights is computed on first use."""
        if not self._model_identity:
            weights = weights_of(self._directory, self._launched.config.weights_path)
            self._model_identity = " ".join(asdict(fingerprint_model(self._directory, weights)).values())
        identity = {"model": self._model_identity, "KV type": self._launched.kv_type}
        return identity | self._input_processor.adapter_identity()
