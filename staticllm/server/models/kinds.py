"""The kinds of models that are served: one row each in ``SERVED``, which says how such a model is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import openvino as ov

from staticllm.compiler_passes.model_kind import SCORES, check_kind, kind_of
from staticllm.core import OnProgress
from staticllm.devices import check_device, default_mode, get_core, named_devices
from staticllm.errors import ModelError, StaticLLMError
from staticllm.model_dir import read_model
from staticllm.pipelines.daemon_client.remote_engine import DaemonHome
from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in
from staticllm.pipelines.embedding.encoder_kind import EncoderKind
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.loading.decoder_kind import DecoderKind, job_of
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline

Pipeline: TypeAlias = StaticLLMPipeline | StaticEmbeddingPipeline | StaticRerankPipeline
ENCODER_REQUESTS = 16
"""Requests of an encoder that run at once; each may have many texts."""


@dataclass(frozen=True)
class Wanted:
    """A model to be loaded. ``daemon``: the process in which an engine runs; False for this one.

    ``is_apart``: whether a model without an engine has a worker process.
    """

    path: Path
    device: str
    properties: Mapping[str, object]
    on_progress: OnProgress
    daemon: bool | DaemonHome = False
    is_apart: bool = False


@dataclass(frozen=True)
class ServedKind(ABC):
    """A kind of model by the name that clients see. ``what``: its name with an article."""

    name: str
    what: str
    has_engine: ClassVar[bool] = False
    """Whether an engine runs it, which can be in the daemon; else ``is_apart`` gives it a worker process."""
    needs_tokenizer: ClassVar[bool] = True

    @abstractmethod
    def fits(self, model: ov.Model, directory: Path) -> bool:
        """Return whether the model in a directory is of this kind."""

    @abstractmethod
    def load(self, wanted: Wanted) -> Pipeline:
        """Load a model. Raises ``StaticLLMError`` (it cannot be loaded)."""

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


class ChatKind(ServedKind):
    """Decoders. Only they take the server's properties."""

    has_engine = True

    def fits(self, model: ov.Model, directory: Path) -> bool:
        return DecoderKind.fits(model, directory)

    def load(self, wanted: Wanted) -> StaticLLMPipeline:
        config = dict(wanted.properties)
        return StaticLLMPipeline(
            wanted.path, wanted.device, config=config, on_progress=wanted.on_progress, daemon=wanted.daemon
        )

    def num_seqs(self, pipeline: StaticLLMPipeline, device: str) -> int:
        config = pipeline.config
        mode = default_mode(first_device(device)) if config.programs == "auto" else config.programs
        return config.num_seqs("separate" if mode == "separate" else "shared")

    def job(self, path: Path, device: str, properties: Mapping[str, object]) -> LoadJob[Any]:
        resolved = resolve_candidates(device, dict(properties), {})[0]
        return job_of(path, device, resolved.config, explicit=resolved.explicit)


@dataclass(frozen=True)
class EncoderServed(ServedKind):
    """Encoders whose output is of one sort: scores or vectors. They run on the first device that is present."""

    pipeline: type[StaticEmbeddingPipeline] | type[StaticRerankPipeline]
    has_scores: bool

    def fits(self, model: ov.Model, directory: Path) -> bool:
        return EncoderKind.fits(model, directory) and (kind_of(model) is SCORES) == self.has_scores

    def load(self, wanted: Wanted) -> StaticEmbeddingPipeline | StaticRerankPipeline:
        first = first_device(wanted.device)
        return self.pipeline(wanted.path, first, on_progress=wanted.on_progress, SEPARATE_PROCESS=wanted.is_apart)

    def is_usable(self, pipeline: EncoderPipeline) -> bool:
        return pipeline.is_usable


SERVED: dict[str, ServedKind] = {
    kind.name: kind
    for kind in (
        EncoderServed("embedding", "an embedding model", StaticEmbeddingPipeline, has_scores=False),
        EncoderServed("rerank", "a reranker", StaticRerankPipeline, has_scores=True),
        ChatKind("chat", "a chat model"),
    )
}
"""By name. A model is of the first kind that fits."""


def served_kind(directory: Path) -> str:
    """Return the name of the kind of the model in a directory. Raises ``ModelError`` (none fits, or a file is damaged)."""
    model = read_model(get_core(), directory)
    name = next((kind.name for kind in SERVED.values() if kind.fits(model, directory)), None)
    if name is None:
        check_kind(model, directory, "decoder")
    return name or "chat"


def estimated_size(kind: ServedKind, path: Path, device: str, properties: Mapping[str, object]) -> int:
    """Return the bytes that a model needs on the first of the devices that is present, as ``staticllm plan`` estimates them.

    Raises ``StaticLLMError`` (it cannot be lowered).
    """
    job = kind.job(path, first_device(device), properties)
    return diagnosis_of(job.kind.name).estimate(job).needed


def first_device(device: str) -> str:
    """Return the first of the named devices that is present. Raises ``StaticLLMError`` (none is)."""
    error: StaticLLMError = ModelError("no device")
    for name in named_devices(device, get_core().available_devices):
        try:
            return check_device(get_core(), name)
        except StaticLLMError as found:
            error = found
    raise error
