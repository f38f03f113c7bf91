"""Where the model of a client comes from: checked files and properties, and what makes two of them the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticllm.errors import ConfigError, ModelError
from staticllm.model_dir import check_ir
from staticllm.wire.messages import Message, ProtocolError, text_of

MAX_PROPERTIES = 64
Value = str | int | float | bool


@dataclass(frozen=True)
class ModelSource:
    """A model as a client names it: an IR's files, a device, and the properties of its compilation.

    ``mode`` is ``auto``, or ``exact`` for the original model without packing. ``is_spool`` means that the client wrote the files
    for the daemon only; then they are compared by content, and otherwise by path, size and time of change.
    """

    xml: Path
    weights: Path
    device: str
    config: tuple[tuple[str, Value], ...]
    mode: str
    is_spool: bool

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights file; 0 without one."""
        return self.weights.stat().st_size if self.weights.is_file() else 0

    def identity(self) -> tuple[object, ...]:
        """Return a value that is equal for two sources of which one compiled model serves both.

        Raises:
            ModelError: a file is missing.
        """
        try:
            files = tuple(self._identity_of(path) for path in (self.xml, self.weights) if path.is_file())
        except OSError as error:
            raise ModelError(f"the model {self.xml} cannot be read: {error.strerror}") from error
        return (*files, self.device, self.config, self.mode)

    def _identity_of(self, path: Path) -> tuple[object, ...]:
        if self.is_spool:
            return ("content", _digest(path))
        found = path.stat()
        return (str(path), found.st_size, found.st_mtime_ns, found.st_ino)


def source_of(message: Message) -> ModelSource:
    """Return the checked source that a ``MODEL`` message names.

    Raises:
        ProtocolError: a field is missing or of a wrong type.
        ModelError: a file is missing or damaged.
        ConfigError: a property is not a plain value.
    """
    mode = text_of(message, "mode")
    if mode not in ("auto", "exact"):
        raise ProtocolError(f"MODEL: mode {mode!r}, must be auto or exact")
    is_spool = "spool" in message.body
    xml = Path(text_of(message, "spool" if is_spool else "path"))
    weights = Path(text_of(message, "weights")) if message.body.get("weights") else xml.with_suffix(".bin")
    if not xml.is_absolute() or not weights.is_absolute() or xml.suffix != ".xml" or not xml.is_file():
        raise ModelError(f"the model {str(xml)!r} is not an absolute path of an IR (.xml) that exists")
    check_ir(xml, weights if weights.is_file() else None)
    _check_stamp(message, xml, weights)
    return ModelSource(xml, weights, text_of(message, "device", 128), _config(message), mode, is_spool)


def _check_stamp(message: Message, xml: Path, weights: Path) -> None:
    """Check that the files are those that the client read: their sizes and times of change, if it says them.

    Raises:
        ModelError: one has changed.
    """
    stamp = message.body.get("stamp") or []
    found = [[each.st_size, each.st_mtime_ns] for each in (path.stat() for path in (xml, weights) if path.is_file())]
    if stamp and stamp != found:
        raise ModelError(f"the files of {xml} have changed since the program read them: read the model again")


def _config(message: Message) -> tuple[tuple[str, Value], ...]:
    config: Any = message.body.get("config", {})
    if not isinstance(config, dict) or len(config) > MAX_PROPERTIES:
        raise ProtocolError(f"MODEL: config must be an object with at most {MAX_PROPERTIES} properties")
    for name, value in config.items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"{name}={value!r}: the daemon takes properties that are text, a number or a bool")
    return tuple(sorted(config.items()))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
