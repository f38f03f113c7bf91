"""One model that the server can load: its name, what kind it is, and its pipeline while it is loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from staticllm.compiler_passes.model_kind import SCORES, check_kind, is_lowered_as, kind_of
from staticllm.core import OnProgress, ProgressEvent
from staticllm.devices import check_device, default_mode, get_core, named_devices
from staticllm.errors import ClosedError, ConfigError, ModelError, StaticLLMError
from staticllm.model_dir import check_model_dir, demo_model_path, read_model
from staticllm.model_paths.arguments import expanded
from staticllm.model_paths.path_kind import path_kind
from staticllm.pipelines.daemon_client.remote_engine import DaemonHome
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.loading.decoder_kind import job_of
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline
from staticllm.server.models.admission import Admission
from staticllm.server.models.homes import ModelHome

Kind = Literal["chat", "embedding", "rerank"]
Pipeline: TypeAlias = StaticLLMPipeline | StaticEmbeddingPipeline | StaticRerankPipeline
DEMO_NAME = "demo"
ENCODER_REQUESTS = 16
"""Requests of an encoder that run at once; each may have many texts."""


@dataclass(frozen=True)
class ModelSpec:
    """A model that is served: the name that clients use, its directory, and its kind."""

    name: str
    path: Path
    kind: Kind


def model_spec(argument: str) -> ModelSpec:
    """Return the model of ``NAME=PATH`` or ``PATH``; of a path alone, the name is that of the folder.

    Raises:
        ModelError: the directory is missing, half-written, or holds no model that can be served.
        ConfigError: the name is empty.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        path = argument
        name = path_kind(expanded(path)).directory.resolve().name
    if not name.strip():
        raise ConfigError(f"{argument!r}: a model is NAME=PATH or PATH")
    directory = check_model_dir(expanded(path))  # shells leave the ~ of NAME=~/folder as it is
    return ModelSpec(name, directory, _kind_in(directory))


def demo_spec() -> ModelSpec:
    """Return the embedded model."""
    return ModelSpec(DEMO_NAME, demo_model_path(), "chat")


def _kind_in(directory: Path) -> Kind:
    model = read_model(get_core(), directory)
    can_embed = read_encoder_files(directory).pooling is not None
    found = kind_of(model)
    if found is not None and is_lowered_as(found, "encoder", can_embed):
        return "rerank" if found is SCORES else "embedding"
    check_kind(model, directory, "decoder")
    return "chat"


class ServedModel:
    """A model and its pipeline, which is None unless it is loaded. Belongs to the event loop, except ``load`` and ``estimate``.

    ``num_users`` counts requests that use it or wait for it, ``last_used`` is a moment of ``time.monotonic``, and ``progress``
    the last part of loading, which ``is_given_up`` ends. ``keep_alive``: seconds without a request after which it is unloaded,
    as its last client said; None for the server's own. ``home``: the other process in which it runs, if it does; ``revived``:
    the moment at which it was last loaded again because that had ended. ``admission`` and ``size`` (bytes, by estimate, with a
    memory limit) are known once it is loaded. ``is_apart``: whether an encoder is loaded in a worker process of its own.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.pipeline: Pipeline | None = None
        self.admission: Admission | None = None
        self.progress: ProgressEvent | None = None
        self.is_given_up = False
        self.home: ModelHome | None = None
        self.is_apart = False
        self.revived = -math.inf
        self.num_users = 0
        self.last_used = time.monotonic()
        self.keep_alive: float | None = None
        self.created = int(time.time())
        self.size: int | None = None

    @property
    def chat(self) -> StaticLLMPipeline:
        """The pipeline of a chat model that is loaded."""
        return cast(StaticLLMPipeline, self._loaded())

    @property
    def local_engine(self) -> Engine | None:
        """The engine of a chat model that is loaded; None if it is in another process."""
        try:
            return self.chat.engine
        except ConfigError:
            return None

    @property
    def embedding(self) -> StaticEmbeddingPipeline:
        """The pipeline of an embedding model that is loaded."""
        return cast(StaticEmbeddingPipeline, self._loaded())

    @property
    def rerank(self) -> StaticRerankPipeline:
        """The pipeline of a reranker that is loaded."""
        return cast(StaticRerankPipeline, self._loaded())

    def _loaded(self) -> Pipeline:
        assert self.pipeline is not None, "it is not loaded"
        return self.pipeline

    def num_seqs(self, device: str) -> int:
        """Return the number of answers that run at once. ``device``: what it was loaded on, if its config does not say more."""
        if not isinstance(self.pipeline, StaticLLMPipeline):
            return ENCODER_REQUESTS
        config = self.pipeline.config
        mode = default_mode(_first_device(device)) if config.programs == "auto" else config.programs
        return config.num_seqs("separate" if mode == "separate" else "shared")

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded and can be used now."""
        return self.pipeline is not None and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether it was loaded in another process that has ended, and is not started again by itself."""
        if self.home is not None:
            return self.home.is_lost
        return self.is_apart and isinstance(self.pipeline, EncoderPipeline) and not self.pipeline.is_usable

    def take_progress(self, event: ProgressEvent) -> None:
        """Note a part of loading. Runs on the thread that loads, and ends it if the server stops.

        Raises:
            ClosedError: ``is_given_up`` is set.
        """
        if self.is_given_up:
            raise ClosedError("the server is stopping")
        self.progress = event

    def load(self, device: str, properties: Mapping[str, object]) -> Pipeline:
        """Return a new pipeline. Takes seconds to minutes.

        Raises:
            StaticLLMError: the model cannot be loaded.
        """
        return load_pipeline(self.spec, device, properties, self.take_progress, self.home or False, self.is_apart)

    def estimate(self, device: str, properties: Mapping[str, object]) -> int:
        """Return the bytes that the model will need, by estimate. Takes seconds.

        Raises:
            StaticLLMError: the model cannot be lowered for the device.
        """
        return estimated_size(self.spec, device, properties)


def load_pipeline(
    spec: ModelSpec,
    device: str,
    properties: Mapping[str, object],
    on_progress: OnProgress,
    daemon: bool | DaemonHome = False,
    is_apart: bool = False,
) -> Pipeline:
    """Load a model. The properties are those of chat models; encoders use the device's own.

    ``daemon``: the process in which a chat model runs; False for this one. ``is_apart``: whether an encoder
    has a worker process.

    Raises:
        StaticLLMError: the model cannot be loaded.
    """
    if spec.kind == "chat":
        return StaticLLMPipeline(spec.path, device, config=dict(properties), on_progress=on_progress, daemon=daemon)
    first = _first_device(device)
    if spec.kind == "embedding":
        return StaticEmbeddingPipeline(spec.path, first, on_progress=on_progress, SEPARATE_PROCESS=is_apart)
    return StaticRerankPipeline(spec.path, first, on_progress=on_progress, SEPARATE_PROCESS=is_apart)


def estimated_size(spec: ModelSpec, device: str, properties: Mapping[str, object]) -> int:
    """Return the bytes that a model needs on the first of the devices that is present, as ``staticllm plan`` estimates them.

    Raises:
        StaticLLMError: it cannot be lowered.
    """
    first = _first_device(device)
    if spec.kind != "chat":
        job: LoadJob[Any] = job_in(spec.path, first, {})
    else:
        resolved = resolve_candidates(first, dict(properties), {})[0]
        job = job_of(spec.path, first, resolved.config, explicit=resolved.explicit)
    return diagnosis_of(job.kind.name).estimate(job).needed


def _first_device(device: str) -> str:
    error: StaticLLMError = ModelError("no device")
    for name in named_devices(device, get_core().available_devices):
        try:
            return check_device(get_core(), name)
        except StaticLLMError as found:
            error = found
    raise error
