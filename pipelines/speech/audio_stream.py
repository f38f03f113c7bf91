"""An open recording that ends early once its transcription was cancelled, so that a long one is not read to its end."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO

from staticllm.errors import PromptError, last_line, quoted
from staticllm.system.files import open_regular

from .audio import MAX_SECONDS, Recording, read_recording
from .transcription_watch import Cancellation


class AudioStream(io.BufferedIOBase):
    """A file that has no more bytes once ``cancellation`` was cancelled. Libraries that read it cannot take an exception."""

    def __init__(self, file: IO[bytes], cancellation: Cancellation, name: str) -> None:
        """``name`` is what errors call it."""
        self.name = name
        self._file = file
        self._cancellation = cancellation

    def read(self, size: int | None = -1, /) -> bytes:
        return b"" if self._cancellation.is_cancelled else self._file.read(-1 if size is None else size)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def read_cancellable(
    file: str | os.PathLike[str] | IO[bytes], cancellation: Cancellation, max_seconds: float = MAX_SECONDS
) -> Recording:
    """Return the samples ``[n]`` at 16 kHz of a path or an open file, which is closed, as ``read_recording``.

    Raises:
        PromptError: as for ``read_recording``.
        ConfigError: as for ``read_recording``.
        CancelledError: it was cancelled.
    """
    try:
        if not isinstance(file, (str, os.PathLike)):
            return read_recording(AudioStream(file, cancellation, "the file"), max_seconds)
        return read_recording(AudioStream(_opened(file), cancellation, repr(os.fspath(file))), max_seconds)
    finally:
        cancellation.check()


def _opened(path: str | os.PathLike[str]) -> IO[bytes]:
    try:
        return open_regular(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or last_line(error)
        raise PromptError(f"{quoted(os.fspath(path))} cannot be opened: {reason}") from None
