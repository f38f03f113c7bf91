"""The TOML file of a server: what a desktop application ships with its models."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from staticllm.errors import ConfigError, quoted, shown
from staticllm.model_paths.arguments import expanded
from staticllm.server.answers.asks import sampling_of
from staticllm.server.models.served import ModelSpec, kind_of, model_spec
from staticllm.server.settings import ApiClient
from staticllm.system.files import read_regular
from staticllm.system.typed import typed

MAX_BYTES = 1 << 20
Line = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
"""A text without control characters, which paths cannot have and names would bring into logs and terminals."""
SystemText = Annotated[str, Meta(min_length=1, max_length=100_000)]
ModelName = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^=\x00-\x1f\x7f]*\Z")]
"""As a ``Line``; ``=`` would end it in ``NAME=PATH``."""


@dataclass(frozen=True)
class ModelEntry:
    """A table ``[[models]]``. ``path``: a directory, from the folder of the file on, or what the command line takes as PATH.

    ``system`` and ``sampling``: what requests to a chat model have unless they say something else.
    """

    path: Line
    name: ModelName | None = None
    device: Line | None = None
    options: dict[str, Any] = field(default_factory=dict)
    system: SystemText | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def argument(self) -> str:
        """The model as an argument of the command line: ``NAME=PATH`` or ``PATH``."""
        return self.path if self.name is None else f"{self.name}={self.path}"

    def spec(self) -> ModelSpec:
        """Return the model.

        Raises:
            ModelError, ConfigError: as for ``model_spec``; ``system`` or ``sampling`` of another kind of model; an option of
                ``sampling`` is unknown or impossible.
        """
        spec = replace(model_spec(self.argument), device=self.device, properties=self.options)
        own = [name for name in ("system", "sampling") if getattr(self, name)]
        if own and not kind_of(spec).has_chats:
            raise ConfigError(f"{own[0]} of {spec.name!r}: it is no chat model, leave {own[0]} out")
        return replace(spec, system=self.system, sampling=sampling_of(self.sampling))


@dataclass(frozen=True)
class ClientEntry:
    """A table ``[[clients]]``: a client with a key of its own, and the fields of ``ApiClient``."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    key: Annotated[str, Meta(min_length=1, max_length=1000)]
    work_class: Literal["reactive", "proactive"] | None = None
    share: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0

    def client(self) -> ApiClient:
        return ApiClient(self.name, self.key, self.work_class, self.share)


@dataclass(frozen=True)
class ServerConfig:
    """What the file says; None for what it leaves to the command line. ``options`` are those of all models that know them."""

    models: list[ModelEntry] = field(default_factory=list)
    clients: Annotated[list[ClientEntry], Meta(max_length=1000)] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    device: Line | None = None
    host: str | None = None
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None


def read_config_file(path: str) -> ServerConfig:
    """Read the file.

    Raises:
        ConfigError: it cannot be read, is no TOML, has an unknown key, or a value of another type.
    """
    try:
        found = tomllib.loads(read_regular(Path(path), MAX_BYTES).decode())
        _check_keys(found, ServerConfig, "")
        for name, kind in (("models", ModelEntry), ("clients", ClientEntry)):
            for number, entry in enumerate(found[name] if isinstance(found.get(name), list) else ()):
                _check_keys(entry, kind, f"{name}[{number}].")
        config = typed(found, ServerConfig)
    except OSError as error:
        raise ConfigError(f"--config {quoted(path)} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"--config {quoted(path)}: it is nested too deeply") from None
    except ValueError as error:  # also of TOML and UTF-8
        raise ConfigError(f"--config {quoted(path)}: {error}") from None
    return replace(config, models=[_from_folder(entry, Path(path).parent) for entry in config.models])


def _from_folder(entry: ModelEntry, folder: Path) -> ModelEntry:
    """Return an entry whose path, if it is there beside the file, is independent of the current folder."""
    beside = folder / expanded(entry.path)
    try:
        is_there = beside.exists()
    except OSError:  # as for a name that is too long
        is_there = False
    return replace(entry, path=str(beside)) if is_there else entry


def _check_keys(table: object, kind: type[Any], place: str) -> None:
    known = [item.name for item in fields(kind)]
    for name in table if isinstance(table, Mapping) else ():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
            raise ValueError(f"unknown key {place}{shown(name)}: {remedy}")
