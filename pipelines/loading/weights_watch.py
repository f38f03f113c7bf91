"""Watches a mapped weights file, because overwriting it in place would change the tokens of a running pipeline."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.errors import ModelError, quoted
from staticllm.model_dir import model_in_memory, weights_of
from staticllm.system.files import open_regular
from staticllm.wire.file_stamp import Stamp, stamp_of

PAGES, PAGE_BYTES = 64, 4096


class WeightsWatch:
    """Detects that a weights file was overwritten. A check takes one ``stat``; pages of the file are read only if that differs.

    A file that is replaced by renaming another one over it does no harm, because the old file stays mapped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stat()
        self._sample = self._sampled()

    def check(self) -> None:
        """Check that the file is still the one that was loaded.

        Raises:
            ModelError: it was overwritten.
        """
        seen = self._stat()
        if seen == self._seen or seen is None or self._seen is None or seen[-1] != self._seen[-1]:
            return
        if self._sampled() != self._sample:
            raise ModelError(
                f"{quoted(self._path)} was overwritten while it is in use: its weights are mapped, so answers could be wrong; "
                "load the model again, and replace such a file by renaming another file over it"
            )
        self._seen = seen

    def _stat(self) -> Stamp | None:
        try:
            return stamp_of(self._path)
        except OSError:
            return None

    def _sampled(self) -> bytes:
        """Return a digest of ``PAGES`` pages that are spread over the file."""
        digest = hashlib.blake2b()
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(size.to_bytes(8, "little"))
                for index in range(PAGES):
                    file.seek(index * max(size - PAGE_BYTES, 0) // (PAGES - 1))
                    digest.update(file.read(PAGE_BYTES))
        except OSError:
            return b""
        return digest.digest()


def watch_of(model_path: Path, config: StaticLLMConfig, is_mapped: bool) -> WeightsWatch | None:
    """Watch the weights of a model if they are mapped from a file; None if they are in memory, encrypted, or in the blobs."""
    is_plain = model_in_memory(model_path) is None and config.weights_decryption_callback is None
    return WeightsWatch(weights_of(model_path, config.weights_path)) if is_plain and is_mapped else None
