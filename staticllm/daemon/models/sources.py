"""Where the model of a client comes from: checked files and properties, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from staticllm.adapters.adapter_set import MAX_ALPHA, AdapterSet
from staticllm.adapters.lora import FILE, LoraAdapter, read_adapter
from staticllm.config import StaticLLMConfig
from staticllm.errors import AdapterError, ConfigError, ModelError
from staticllm.model_dir import check_ir, weights_of, weights_size
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.launch.arguments import Candidate
from staticllm.pipelines.launch.draft_source import DraftSource
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
        return self.weights.stat().st_size if self.weights.is_file() else 0

    def identity(self) -> tuple[object, ...]:
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

    Raises ``ProtocolError`` (a field is missing or of a wrong type), ``ModelError`` (a file is missing or damaged) and
    ``ConfigError`` (a property is not a plain value).
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

    Raises ``ModelError`` (one has changed).
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


MAX_ADAPTERS = 64


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as a client names it: a file or a directory of PEFT, the digest of its numbers, and its alpha."""

    path: Path
    name: str
    alpha: float

    def read(self) -> LoraAdapter:
        """Read the numbers. Raises ``AdapterError``."""
        adapter = read_adapter(self.path)
        if adapter.name != self.name:
            raise AdapterError(
                f"the adapter {str(self.path)!r} has changed since the program read it: load the model again"
            )
        return adapter

    @property
    def num_bytes(self) -> int:
        """The bytes of the file."""
        return (self.path / FILE if self.path.is_dir() else self.path).stat().st_size


@dataclass(frozen=True)
class LanguageSource:
    """A model directory as a client names it, the devices to try, and their configs as JSON types.

    ``text`` is all that the client said about it as JSON, for comparing.
    """

    directory: Path
    candidates: tuple[Candidate, ...]
    text: str
    adapters: tuple[AdapterFile, ...] = ()
    are_adapters_fused: bool = False
    draft: DraftSource | None = None

    @property
    def xml(self) -> Path:
        return self.directory / MODEL_XML

    @property
    def device(self) -> str:
        return ",".join(candidate.device for candidate in self.candidates)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights, of those of the draft model, and of the adapters' matrices in memory."""
        weights = weights_size(self.directory, self.candidates[0].config.weights_path)
        draft = 0 if self.draft is None else weights_size(self.draft.models_path)
        factor = 1 if self.are_adapters_fused else 3  # as AdapterSet.num_bytes
        return weights + draft + factor * sum(adapter.num_bytes for adapter in self.adapters)

    def identity(self) -> tuple[object, ...]:
        stamps = []
        for path in self._files():
            try:
                found = path.stat()
            except OSError as error:
                raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}") from error
            stamps.append((found.st_size, found.st_mtime_ns, found.st_ino))
        return ("language model", str(self.directory), tuple(stamps), self.text)

    def loadable(self) -> list[Candidate]:
        """Return the candidates with the adapters, which are read now. Raises ``AdapterError``."""
        if not self.adapters:
            return list(self.candidates)
        members = [(adapter.read(), adapter.alpha) for adapter in self.adapters]
        adapters = AdapterSet.of(members, self.are_adapters_fused)
        return [replace(each, config=replace(each.config, adapters=adapters)) for each in self.candidates]

    def _files(self) -> Iterator[Path]:
        yield self.xml
        yield weights_of(self.directory, self.candidates[0].config.weights_path)
        if self.draft is not None:
            yield self.draft.models_path / MODEL_XML
            yield weights_of(self.draft.models_path)


def language_source_of(message: Message) -> LanguageSource:
    """Return the checked source that a ``MODEL`` message names. Raises ``ProtocolError`` and ``ConfigError``."""
    directory = _path_of(text_of(message, "directory"))
    given, adapters, draft = (message.body.get(name) for name in ("candidates", "adapters", "draft"))
    if not isinstance(given, list) or not 1 <= len(given) <= 8:
        raise ProtocolError("MODEL: candidates must be a list of at most 8 devices")
    if adapters is None:
        adapters = {"members": [], "is_fused": False}
    if not isinstance(adapters, dict) or type(adapters.get("is_fused")) is not bool:
        raise ProtocolError("MODEL: adapters must have members and is_fused")
    text = json.dumps([given, adapters, draft], sort_keys=True)
    members = _adapter_files(adapters.get("members"))
    return LanguageSource(directory, tuple(map(_candidate, given)), text, members, adapters["is_fused"], _draft(draft))


def _path_of(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ProtocolError(f"MODEL: {text[:200]!r} must be an absolute path")
    return path


def _candidate(values: Any) -> Candidate:
    names = {field.name for field in fields(StaticLLMConfig)} - {"adapters"}
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise ProtocolError("MODEL: a candidate must have a device and a config")
    config = {**values["config"]}
    device = values.get("device")
    if config.pop("adapters", None) is not None or not isinstance(device, str) or not set(config) <= names:
        raise ProtocolError(f"MODEL: a candidate on {device!r} with the fields {sorted(set(values['config']) - names)}")
    explicit = values.get("explicit", [])
    if not isinstance(explicit, list) or not set(map(str, explicit)) <= names | {"adapters"}:
        raise ProtocolError("MODEL: explicit must be a list of fields of the config")
    return Candidate(device, StaticLLMConfig(**config), frozenset(explicit))


def _adapter_files(values: Any) -> tuple[AdapterFile, ...]:
    if not isinstance(values, list) or len(values) > MAX_ADAPTERS:
        raise ProtocolError(f"MODEL: adapters must have a list of at most {MAX_ADAPTERS} members")
    found = []
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or not all(isinstance(text, str) for text in value[:2]):
            raise ProtocolError("MODEL: an adapter must have a path, a name and an alpha")
        path, name, alpha = value
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
            raise ProtocolError(f"MODEL: the alpha {alpha!r:.40} of an adapter must be a number up to {MAX_ALPHA:g}")
        found.append(AdapterFile(_path_of(path), name, float(alpha)))
    return tuple(found)


def _draft(values: Any) -> DraftSource | None:
    if values is None:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("properties"), Mapping):
        raise ProtocolError("MODEL: a draft must have a directory, a device and properties")
    directory = values.get("directory")
    device = values.get("device")
    properties = values["properties"]
    if not isinstance(directory, str) or not isinstance(device, str) or len(properties) > MAX_PROPERTIES:
        raise ProtocolError("MODEL: a draft must have a directory, a device and properties")
    return DraftSource(_path_of(directory), device, properties)
