"""Where the model of a client comes from: checked files and properties, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.adapters.lora import FILE, LoraAdapter, read_adapter
from staticllm.config import StaticLLMConfig
from staticllm.daemon import bodies
from staticllm.daemon.bodies import read_body
from staticllm.errors import AdapterError, ConfigError, ModelError, quoted
from staticllm.model_dir import check_ir, weights_of, weights_size
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.launch.arguments import Candidate
from staticllm.pipelines.launch.draft_origin import DraftOrigin
from staticllm.pipelines.speech.speech_files import DECODER, DECODER_WITH_PAST, ENCODER
from staticllm.wire.file_stamp import Stamp, stamp_of
from staticllm.wire.messages import Message, ProtocolError

Value = str | int | float | bool


@dataclass(frozen=True)
class ModelOrigin:
    """A model as a client names it: an IR's files, a device, and the properties of its compilation.

    ``mode`` is ``auto``, or ``exact`` for the original model without packing. ``is_spool`` means that the client wrote the files
    for the daemon only; then they are compared by content, and otherwise by path, size and times.
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
        return (str(path), *stamp_of(path))


def origin_of(message: Message) -> ModelOrigin:
    """Return the checked origin that a ``MODEL`` message names.

    Raises:
        ProtocolError: a field is missing or of a wrong type.
        ModelError: a file is missing or damaged.
        ConfigError: a property is not a plain value.
    """
    asked = read_body(message, bodies.Model)
    xml = Path(asked.path if asked.spool is None else asked.spool)
    weights = Path(asked.weights) if asked.weights else xml.with_suffix(".bin")
    if not xml.is_absolute() or not weights.is_absolute() or xml.suffix != ".xml" or not xml.is_file():
        raise ModelError(f"the model {quoted(xml)} is not an absolute path of an IR (.xml) that exists")
    check_ir(xml, weights if weights.is_file() else None)
    found = [list(stamp_of(path)) for path in (xml, weights) if path.is_file()]
    if asked.stamp and asked.stamp != found:
        raise ModelError(f"the files of {xml} have changed since the program read them: read the model again")
    for name, value in asked.config.items():
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"{name}={value!r}: the daemon takes properties that are text, a number or a bool")
    config = tuple(sorted(asked.config.items()))
    return ModelOrigin(xml, weights, asked.device, config, asked.mode, asked.spool is not None)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as a client names it: a file or a directory of PEFT, the digest of its numbers, and its alpha."""

    path: Path
    name: str
    alpha: float

    def read(self) -> LoraAdapter:
        adapter = read_adapter(self.path)
        if adapter.name != self.name:
            raise AdapterError(
                f"the adapter {quoted(self.path)} has changed since the program read it: load the model again"
            )
        return adapter

    @property
    def num_bytes(self) -> int:
        return (self.path / FILE if self.path.is_dir() else self.path).stat().st_size


@dataclass(frozen=True)
class LanguageOrigin:
    """A model directory as a client names it, the devices to try, and their configs as JSON types.

    ``text`` is all that the client said about it as JSON, for comparing.
    """

    directory: Path
    candidates: tuple[Candidate, ...]
    text: str
    adapters: tuple[AdapterFile, ...] = ()
    are_adapters_fused: bool = False
    draft: DraftOrigin | None = None

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
        stamps = [_stamp_of(path) for path in self._files()]
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


@dataclass(frozen=True)
class SpeechOrigin:
    """The directory of a speech model as a client names it, the devices to try, and their configs as JSON types.

    ``text`` is all that the client said about it as JSON, for comparing. ``num_windows``: the windows that are decoded together.
    ``heads``: layer and head of the attentions that find words.
    """

    directory: Path
    candidates: tuple[Candidate, ...]
    text: str
    num_windows: int
    heads: tuple[tuple[int, int], ...]

    @property
    def xml(self) -> Path:
        return self.directory / ENCODER

    @property
    def device(self) -> str:
        return ",".join(candidate.device for candidate in self.candidates)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._files() if path.suffix == ".bin")

    def identity(self) -> tuple[object, ...]:
        stamps = [_stamp_of(path) for path in self._files()]
        return ("speech model", str(self.directory), tuple(stamps), self.text)

    def _files(self) -> Iterator[Path]:
        """Yield the files of the encoder and the decoder, and those that describe them."""
        for name in (ENCODER, DECODER, DECODER_WITH_PAST):
            if (self.directory / name).is_file():
                yield self.directory / name
                yield (self.directory / name).with_suffix(".bin")
        yield self.directory / "config.json"


def directory_origin_of(message: Message) -> LanguageOrigin | SpeechOrigin:
    """Return the checked origin that a ``MODEL`` message names. Raises ``ProtocolError`` and ``ConfigError``."""
    asked = read_body(message, bodies.Language)
    if asked.speech is not None:
        if asked.adapters is not None or asked.draft is not None:
            raise ConfigError("a speech model takes no adapters and no draft model: leave them out")
        text = json.dumps(msgspec.to_builtins([asked.candidates, asked.speech]), sort_keys=True)
        candidates = tuple(map(_candidate, asked.candidates))
        heads = tuple(asked.speech.heads)
        return SpeechOrigin(_path_of(asked.directory), candidates, text, asked.speech.num_windows, heads)
    adapters = asked.adapters or bodies.Adapters()
    draft = asked.draft
    return LanguageOrigin(
        _path_of(asked.directory),
        tuple(map(_candidate, asked.candidates)),
        json.dumps(msgspec.to_builtins([asked.candidates, adapters, draft]), sort_keys=True),
        tuple(AdapterFile(_path_of(path), name, alpha) for path, name, alpha in adapters.members),
        adapters.is_fused,
        None if draft is None else DraftOrigin(_path_of(draft.directory), draft.device, draft.properties),
    )


def _stamp_of(path: Path) -> Stamp:
    """Return what changes with a file.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return stamp_of(path)
    except OSError as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error.strerror}") from error


def _path_of(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ProtocolError(f"MODEL: {text[:200]!r} must be an absolute path")
    return path


def _candidate(asked: bodies.AskedCandidate) -> Candidate:
    names = {field.name for field in fields(StaticLLMConfig)} - {"adapters"}
    config = dict(asked.config)
    if config.pop("adapters", None) is not None or not set(config) <= names:
        raise ProtocolError(
            f"MODEL: a candidate on {asked.device!r} with the fields {sorted(set(asked.config) - names)}"
        )
    if not set(asked.explicit) <= names | {"adapters"}:
        raise ProtocolError("MODEL: explicit must be a list of fields of the config")
    return Candidate(asked.device, StaticLLMConfig(**config), frozenset(asked.explicit))
