"""The kinds of models, one row each, with what every layer asks of a kind. What a row names is imported when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_PIPELINES = "staticllm.pipelines"
_SERVED = "staticllm.server.models.kinds"
Named = str | object
"""A class or a value, or ``module:name``: the table lies below all rooms, so its own rows name by text."""


@dataclass(frozen=True)
class FilesInParts:
    """The directory of a model that is exported as several graphs."""

    patterns: tuple[str, ...]
    """For each it has a file whose whole name matches."""
    what: str
    """What such a path holds, for users (``PathKind``)"""
    remedy: str
    """What loads it, for users."""


@dataclass(frozen=True)
class KnownKind:
    """A kind of model."""

    name: str
    """Stands in manifests and messages."""
    pipeline: str
    """What messages advise to load such models with."""
    program: Named | None = None
    """Its ``ProgramKind``: how its graph is recognised, lowered and run; None for a model in parts, each of which is of a kind
    that has one."""
    diagnosis: Named = f"{_PIPELINES}.diagnostics.diagnosis:Diagnosis"
    """Its ``Diagnosis``; the default suits any kind with one graph."""
    served: tuple[Named, ...] = ()
    """Its ``ServedKind``s, none for a kind that no server loads."""
    files: FilesInParts | None = None
    """The files that tell a model in parts."""

    @property
    def program_class(self) -> Any:
        """The class of its ``ProgramKind``; None for a model in parts."""
        return _found(self.program)

    @property
    def diagnosis_class(self) -> Any:
        """The class of its ``Diagnosis``."""
        return _found(self.diagnosis)

    @property
    def served_kinds(self) -> tuple[Any, ...]:
        """Its ``ServedKind``s."""
        return tuple(map(_found, self.served))


KINDS: dict[str, KnownKind] = {}
"""By name. A model is of the first kind whose ``fits``, or whose files, say so."""


def register(kind: KnownKind) -> None:
    """Add a kind of model."""
    KINDS[kind.name] = kind


def kind_of_files(names: Collection[str]) -> KnownKind | None:
    """Return the kind of the model in parts whose files have these names; None if they are of none."""
    for known in KINDS.values():
        patterns = () if known.files is None else known.files.patterns
        if patterns and all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns):
            return known
    return None


def _found(named: Any) -> Any:
    if not isinstance(named, str):
        return named
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


register(
    KnownKind(
        "encoder",
        "StaticEmbeddingPipeline",
        program=f"{_PIPELINES}.embedding.encoder_kind:EncoderKind",
        diagnosis=f"{_PIPELINES}.diagnostics.encoder_diagnosis:EncoderDiagnosis",
        served=(f"{_SERVED}:EMBEDDING", f"{_SERVED}:RERANK"),
    )
)
register(KnownKind("encoder of windows", "StaticWhisperPipeline", f"{_PIPELINES}.loading.window_kind:WindowKind"))
register(KnownKind("alignment of windows", "StaticWhisperPipeline", f"{_PIPELINES}.loading.window_kind:AlignmentKind"))
register(
    KnownKind(
        "decoder",
        "StaticLLMPipeline",
        program=f"{_PIPELINES}.loading.decoder_kind:DecoderKind",
        diagnosis=f"{_PIPELINES}.diagnostics.decoder_diagnosis:DecoderDiagnosis",
        served=(f"{_SERVED}:CHAT",),
    )
)
register(
    KnownKind(
        "speech",
        "StaticWhisperPipeline",
        diagnosis=f"{_PIPELINES}.diagnostics.speech_diagnosis:SpeechDiagnosis",
        served=(f"{_SERVED}:SPEECH",),
        files=FilesInParts(
            (r"openvino_(en|de)coder(_with_past)?_model\.xml", r"preprocessor_config\.json"),
            "holds a speech model (encoder and decoder)",
            "load it with StaticWhisperPipeline, or give it to `staticllm transcribe FILE -m {model}` or "
            "`staticllm serve {model}`",
        ),
    )
)
