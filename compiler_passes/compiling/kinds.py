"""The kinds of models, one row each. A kind's classes are imported when a model or a blob set of it is met."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

_ROOM = "staticllm.pipelines"
Named = str | type[Any]
"""A class, or ``module:class``."""


@dataclass(frozen=True)
class KnownKind:
    """A kind of model: its ``ProgramKind``, the pipeline that loads such models, and its ``Diagnosis``."""

    program: Named
    pipeline: str
    diagnosis: Named

    @property
    def program_class(self) -> Any:
        """The class of its ``ProgramKind``."""
        return _class(self.program)

    @property
    def diagnosis_class(self) -> Any:
        """The class of its ``Diagnosis``."""
        return _class(self.diagnosis)


KINDS: dict[str, KnownKind] = {}
"""By name. A model is of the first kind whose ``fits`` says so."""


def register(
    name: str,
    program: Named,
    pipeline: str,
    diagnosis: Named = f"{_ROOM}.diagnostics.diagnosis:Diagnosis",
) -> None:
    """Add a kind of model. ``program``: its ``ProgramKind``; ``pipeline``: what messages advise to load such models with.

    The default ``diagnosis`` suits any kind.
    """
    KINDS[name] = KnownKind(program, pipeline, diagnosis)


def _class(named: Named) -> Any:
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


register(
    "encoder",
    f"{_ROOM}.embedding.encoder_kind:EncoderKind",
    "StaticEmbeddingPipeline",
    f"{_ROOM}.diagnostics.encoder_diagnosis:EncoderDiagnosis",
)
register("encoder of sources", f"{_ROOM}.loading.source_kind:SourceKind", "StaticWhisperPipeline")
register("alignment of sources", f"{_ROOM}.loading.source_kind:AlignmentKind", "StaticWhisperPipeline")
register(
    "decoder",
    f"{_ROOM}.loading.decoder_kind:DecoderKind",
    "StaticLLMPipeline",
    f"{_ROOM}.diagnostics.decoder_diagnosis:DecoderDiagnosis",
)
