"""How models of each kind are loaded and shown by the server. The rows of ``staticllm/kinds.py`` name these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

import openvino as ov

from staticllm.compiler_passes.model_kind import SCORES, check_kind, kind_of
from staticllm.core import OnProgress
from staticllm.devices import check_device, default_mode, get_core, is_present, known_properties, named_devices
from staticllm.errors import ModelError, StaticLLMError, quoted
from staticllm.kinds import KINDS
from staticllm.model_dir import read_model
from staticllm.model_files.hub import located
from staticllm.model_files.model_at import check_model_dir
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.daemon_client.remote_engine import DaemonHome
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in
from staticllm.pipelines.embedding.embedding_config import resolved_config
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.embedding.encoder_job import OF_DECODERS, encoder_config
from staticllm.pipelines.embedding.encoder_job import OPTIONS as ENCODER_OPTIONS
from staticllm.pipelines.embedding.encoder_kind import EncoderKind
from staticllm.pipelines.embedding.pool.pool_plan import POOL_PROPERTIES, PoolOptions, take_options
from staticllm.pipelines.embedding.pool.served_encoder import ServingOptions
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.loading.decoder_kind import DecoderKind, job_of
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.loading.window_kind import WindowKind
from staticllm.pipelines.speech.speech_files import DECODER, ENCODER, speech_files
from staticllm.pipelines.speech.speech_jobs import (
    MAX_WINDOWS,
    OF_TEXT,
    WORD_TIMESTAMPS,
    check_speech_config,
    take_fall_back,
    take_has_words,
    take_num_windows,
    with_fall_back,
)
from staticllm.pipelines.speech.whisper_config import FALL_BACK
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline
from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline
from staticllm.properties import DECODER_OPTIONS
from staticllm.server.models.device_engines import DeviceEngines


class Pipeline(Protocol):
    """A model that is loaded."""

    def close(self) -> None:
        """Release its memory."""


ENCODER_REQUESTS = 16
"""Requests of an encoder that run at once; each may have many texts."""
LIMITED_REQUESTS = 4096
"""The same with a latency limit: a request queued here would silently miss its deadline."""


@dataclass(frozen=True)
class Wanted:
    """A model to be loaded. ``daemon``: the process in which an engine runs; False for this one.

    ``is_apart``: whether a model without an engine has a worker process. ``name``: that of the model. ``engines``: those of the
    devices of the server, which its models share; None for a device of its own.
    """

    path: Path
    device: str
    properties: Mapping[str, object]
    on_progress: OnProgress
    daemon: bool | DaemonHome = False
    is_apart: bool = False
    name: str = ""
    engines: DeviceEngines | None = None


@dataclass(frozen=True)
class ServedKind(ABC):
    """A kind of model by the name that clients see. ``what``: its name with an article.

    ``capability``: what it can do, in Ollama's words; its name without one. ``lm_studio_type``: LM Studio's name of it; without
    one it is not in LM Studio's list, which clients refuse with types that they do not know.
    """

    name: str
    what: str
    capability: str = field(default="", kw_only=True)
    lm_studio_type: str = field(default="", kw_only=True)
    has_engine: ClassVar[bool] = False
    """Whether an engine runs it, which can be in the daemon; else ``is_apart`` gives it a worker process."""
    needs_tokenizer: ClassVar[bool] = True
    model_files: ClassVar[tuple[str, ...]] = (MODEL_XML,)
    """The IRs in the directory of such a model."""
    has_chats: ClassVar[bool] = False
    """Whether it has a template of chats, and options of sampling."""
    runs_in_clusters: ClassVar[bool] = True

    def posts(self) -> Sequence[tuple[str, type[Any], Callable[..., Any]]]:
        """Return the endpoints that it needs beside those of the APIs: path, fields of the body, handler."""
        return ()

    def described(self, pipeline: Any) -> dict[str, Any]:
        """Return its own fields in ``/v1/models``. ``pipeline``: None unless it is loaded."""
        del pipeline
        return {}

    def max_len(self, pipeline: Any) -> int | None:
        """Return the most tokens of a prompt with its answer, or of a text; None if that has no limit that clients know."""
        del pipeline
        return None

    def planned_len(self, path: Path, device: str, properties: Mapping[str, object]) -> int | None:
        """Return the same for a model that is not loaded.

        Raises:
            StaticLLMError: its files are gone or damaged.
        """
        del path, device, properties
        return None

    def check(self, directory: Path) -> Path:
        """Return the directory of a model of this kind.

        Raises:
            ModelError: a file is missing or damaged.
        """
        return check_model_dir(directory, self.needs_tokenizer)

    def has_files(self, directory: Path) -> bool:
        """Return whether the IRs are still there."""
        files = [directory / name for name in self.model_files]
        return all(file.is_file() and file.with_suffix(".bin").is_file() for file in files)

    @abstractmethod
    def fits(self, model: ov.Model, directory: Path) -> bool:
        """Return whether the model in a directory is of this kind."""

    @abstractmethod
    def load(self, wanted: Wanted) -> Pipeline:
        """Load a model.

        Raises:
            StaticLLMError: it cannot be loaded.
        """

    @abstractmethod
    def option_names(self, device: str) -> frozenset[str]:
        """Return the names of the options that such a model knows on a device, or on several."""

    @abstractmethod
    def check_options(self, device: str, properties: Mapping[str, object]) -> None:
        """Check the options of a model before it is loaded.

        Raises:
            ConfigError: one is unknown or impossible.
            DeviceError: the device is not on this machine.
        """

    def num_seqs(self, pipeline: Any, device: str) -> int:
        """Return the answers that run at once. ``device``: what it was loaded on, if its config does not say more."""
        del pipeline, device
        return ENCODER_REQUESTS

    def is_usable(self, pipeline: Any) -> bool:
        """Return whether a loaded model can be used, or will be again by itself."""
        del pipeline
        return True

    def job(self, path: Path, device: str, properties: Mapping[str, object]) -> LoadJob[Any]:
        """Return the job of which the bytes are estimated."""
        del properties
        return job_in(path, device, {})

    def estimate(self, path: Path, device: str, properties: Mapping[str, object]) -> int:
        """Return the bytes that a model needs on a device, by estimate.

        Raises:
            StaticLLMError: it cannot be lowered.
        """
        job = self.job(path, device, properties)
        return diagnosis_of(job.kind.name).estimate(job).needed


class ChatKind(ServedKind):
    """Decoders."""

    has_engine = True
    has_chats = True

    def described(self, pipeline: StaticLLMPipeline | None) -> dict[str, Any]:
        return {} if pipeline is None else {"max_model_len": pipeline.config.max_seq_len}

    def max_len(self, pipeline: StaticLLMPipeline) -> int | None:
        return pipeline.config.max_seq_len

    def planned_len(self, path: Path, device: str, properties: Mapping[str, object]) -> int | None:
        first = resolve_candidates(device, dict(properties), {})[0]
        if not (path / MODEL_XML).is_file():  # what a file is converted to says how long a text may be
            return None
        return job_of(path, first.device, first.config, explicit=first.explicit).config.max_seq_len

    def fits(self, model: ov.Model, directory: Path) -> bool:
        return DecoderKind.fits(model, directory)

    def load(self, wanted: Wanted) -> StaticLLMPipeline:
        config = dict(wanted.properties)
        pipeline = StaticLLMPipeline(
            wanted.path, wanted.device, config=config, on_progress=wanted.on_progress, daemon=wanted.daemon
        )
        if wanted.engines is not None and not wanted.daemon:
            wanted.engines.join(wanted.name, pipeline)
        return pipeline

    def option_names(self, device: str) -> frozenset[str]:
        return frozenset(DECODER_OPTIONS) | _names_of(device)

    def check_options(self, device: str, properties: Mapping[str, object]) -> None:
        resolve_candidates(device, dict(properties), {})

    def num_seqs(self, pipeline: StaticLLMPipeline, device: str) -> int:
        config = pipeline.config
        mode = default_mode(first_device(device)) if config.programs == "auto" else config.programs
        return config.num_seqs("separate" if mode == "separate" else "shared")

    def job(self, path: Path, device: str, properties: Mapping[str, object]) -> LoadJob[Any]:
        resolved = resolve_candidates(device, dict(properties), {})[0]
        return job_of(path, device, resolved.config, explicit=resolved.explicit)


class SpeechKind(ServedKind):
    """Speech models. In the server's process, their calls are jobs of the engine of their device, like those of encoders."""

    has_engine = True
    model_files = (ENCODER, DECODER)
    runs_in_clusters = False

    def described(self, pipeline: object) -> dict[str, Any]:
        """Return whether it can be sent recordings, which other packages read."""
        del pipeline
        return {"reads_files": can_read_files()}

    def check(self, directory: Path) -> Path:
        found = speech_files(directory).directory
        if not self.fits(read_model(get_core(), found, model_file=ENCODER), found):
            raise ModelError(
                f"{quoted(found)} is no speech model: {ENCODER} reads no features of sound; export it again"
            )
        return found

    def fits(self, model: ov.Model, directory: Path) -> bool:
        """Return whether the model is an encoder of sounds, with a decoder beside it that sees its output."""
        return WindowKind.fits(model, directory)

    def load(self, wanted: Wanted) -> StaticWhisperPipeline:
        engines = None if wanted.daemon else wanted.engines
        engine = None if engines is None else engines.of(wanted.device.partition(",")[0])
        return StaticWhisperPipeline(
            wanted.path, wanted.device, config=with_fall_back(wanted.properties), engine=engine, daemon=wanted.daemon,
            on_progress=wanted.on_progress,
        )  # fmt: skip

    def option_names(self, device: str) -> frozenset[str]:
        of_speech = {MAX_WINDOWS, WORD_TIMESTAMPS, *(name.upper() for name in FALL_BACK)}
        own = {*DECODER_OPTIONS, *of_speech} - {name.upper() for name in OF_TEXT}
        return frozenset(own) | _names_of(device)

    def check_options(self, device: str, properties: Mapping[str, object]) -> None:
        rest = dict(properties)
        take_num_windows(rest, None)
        take_has_words(rest, None)
        take_fall_back(rest, None)
        for candidate in resolve_candidates(device, rest, {}):
            check_speech_config(candidate.config)

    def num_seqs(self, pipeline: StaticWhisperPipeline, device: str) -> int:
        del device
        return pipeline.num_windows

    def estimate(self, path: Path, device: str, properties: Mapping[str, object]) -> int:
        """Return the bytes of the weights: those of keys and values are few beside them."""
        del device, properties
        return sum((path / name).with_suffix(".bin").stat().st_size for name in self.model_files)


@dataclass(frozen=True)
class EncoderServed(ServedKind):
    """Encoders whose output is of one sort: scores or vectors.

    They run on the first device that is present, and with ``HETEROGENEOUS`` or groups of cores on all. Their first device is that
    of the engine which all models on it share.

    ``options``: what the constructor of the pipeline takes beside the fields of its config and the properties.
    """

    pipeline: type[StaticEmbeddingPipeline] | type[StaticRerankPipeline]
    has_scores: bool
    options: tuple[str, ...] = ("overflow", "max_waiting")

    def max_len(self, pipeline: EncoderPipeline) -> int | None:
        return pipeline.max_length

    def planned_len(self, path: Path, device: str, properties: Mapping[str, object]) -> int | None:
        del device
        longest = properties.get("max_length")
        return longest if type(longest) is int else read_encoder_files(path).max_length

    def fits(self, model: ov.Model, directory: Path) -> bool:
        return EncoderKind.fits(model, directory) and (kind_of(model) is SCORES) == self.has_scores

    def load(self, wanted: Wanted) -> StaticEmbeddingPipeline | StaticRerankPipeline:
        given: dict[str, Any] = dict(wanted.properties)
        if wanted.is_apart:
            given["SEPARATE_PROCESS"] = True
        options = take_options(dict(given))
        devices = devices_of(wanted.device, options)
        if wanted.engines is not None and not options.is_apart:
            given["engine"] = wanted.engines.of(devices.partition(",")[0])
        return self.pipeline(wanted.path, devices, on_progress=wanted.on_progress, **given)

    def num_seqs(self, pipeline: Any, device: str) -> int:
        """As many as the queue of texts takes, if it answers itself that a text would be late."""
        is_limited = getattr(pipeline, "latency_limit", None) is not None
        return LIMITED_REQUESTS if is_limited else super().num_seqs(pipeline, device)

    def option_names(self, device: str) -> frozenset[str]:
        own = frozenset((*self._own_names, *map(str.upper, ENCODER_OPTIONS)))
        return (own | _names_of(device)) - OF_DECODERS

    def check_options(self, device: str, properties: Mapping[str, object]) -> None:
        rest = dict(properties)
        take_options(rest)
        config: type[Any] = self.pipeline.Config
        resolved_config(config, None, rest)
        own = {name: rest.pop(name) for name in self.options if name in rest}
        ServingOptions(None, **{"overflow": "truncate", "max_waiting": 1, "on_progress": None, **_of_serving(own)})
        encoder_config(first_device(device.partition("#")[0]), rest, self._own_names)

    @property
    def _own_names(self) -> tuple[str, ...]:
        return (*self.options, *POOL_PROPERTIES, *(item.name for item in fields(self.pipeline.Config)))

    def is_usable(self, pipeline: EncoderPipeline) -> bool:
        return pipeline.is_usable


EMBEDDING = EncoderServed(
    "embedding", "an embedding model", StaticEmbeddingPipeline, has_scores=False, lm_studio_type="embeddings"
)
RERANK = EncoderServed(
    "rerank", "a reranker", StaticRerankPipeline, True, (*EncoderServed.options, "activation", "score_words")
)
CHAT = ChatKind("chat", "a chat model", capability="completion", lm_studio_type="llm")
SPEECH = SpeechKind("speech", "a speech model", capability="transcription")


def served_kinds() -> dict[str, ServedKind]:
    """Return the kinds that are served, by name. A model is of the first kind that fits."""
    return {kind.name: kind for known in KINDS.values() for kind in known.served_kinds}


def found_model(path: str) -> tuple[Path, str]:
    """Return the directory of the model at a path, or of a name in the cache of Hugging Face, and the name of its kind.

    Raises:
        ModelError: there is none, none of the kinds fits, or a file is missing or damaged.
    """
    found = located(path)
    if found.kind.has_parts and (in_parts := KINDS[found.kind.name].served_kinds):
        return in_parts[0].check(found.directory), in_parts[0].name
    directory = check_model_dir(path, False)
    name = served_kind(directory)
    return served_kinds()[name].check(directory), name


def served_kind(directory: Path) -> str:
    """Return the name of the kind of the model in a directory.

    Raises:
        ModelError: none fits, or a file is damaged.
    """
    model = read_model(get_core(), directory)
    name = next((kind.name for kind in served_kinds().values() if kind.fits(model, directory)), None)
    if name is None:
        check_kind(model, directory, "decoder")
    return name or "chat"


@cache
def can_read_files() -> bool:
    """Return whether the packages are there with which recordings arrive and are read."""
    return all(find_spec(name) is not None for name in ("python_multipart", "soxr")) and any(
        find_spec(name) is not None for name in ("soundfile", "av")
    )


def estimated_size(kind: ServedKind, path: Path, device: str, properties: Mapping[str, object]) -> int:
    """Return the bytes that a model needs on the first of the devices that is present, as ``staticllm plan`` estimates them.

    Raises:
        StaticLLMError: it cannot be lowered.
    """
    return kind.estimate(path, first_device(device.partition("#")[0]), properties)


def devices_of(device: str, options: PoolOptions) -> str:
    """Return the devices of an encoder: all of them if they embed together, else the first one that is present.

    Raises:
        StaticLLMError: none is.
    """
    if "#" in device:
        return device
    core = get_core()
    present = [name for name in named_devices(device, core.available_devices) if is_present(core, name)]
    return ",".join(present) if options.is_heterogeneous and present else first_device(device)


def first_device(device: str) -> str:
    """Return the first of the named devices that is present.

    Raises:
        StaticLLMError: none is.
    """
    error: StaticLLMError = ModelError("no device")
    for name in named_devices(device, get_core().available_devices):
        try:
            return check_device(get_core(), name)
        except StaticLLMError as found:
            error = found
    raise error


def _names_of(device: str) -> frozenset[str]:
    """Return the names of the properties that the devices know; those of a group of cores are those of the CPU."""
    core = get_core()
    names = [name.partition("#")[0] for name in named_devices(device, core.available_devices)]
    return frozenset[str]().union(*(known_properties(core, name) for name in names))


def _of_serving(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in EncoderServed.options}
