"""staticllm: large language models on devices that only execute graphs of fixed shape."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticllm.version import __version__ as __version__

if TYPE_CHECKING:
    from staticllm.config import StaticLLMConfig
    from staticllm.core import FinishReason, ProgressEvent, Variant
    from staticllm.errors import (
        AdapterError,
        BlobError,
        BusyError,
        ClosedError,
        ConfigError,
        DeviceError,
        GenerationConfigError,
        ModelError,
        NumericalError,
        ProcessLostError,
        PromptError,
        PromptTooLongError,
        SnapshotError,
        StaticLLMError,
        UnsupportedModelError,
    )
    from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, CallEnd, ContentDelta, ReasoningDelta
    from staticllm.metrics import PerfMetrics
    from staticllm.model_dir import demo_model_path
    from staticllm.pipelines.decisions.answers import Decision
    from staticllm.pipelines.decisions.calibration import Calibration
    from staticllm.pipelines.decisions.handle import DecisionHandle
    from staticllm.pipelines.decisions.questions import Choice, Level, Option, Predicate, QuestionError, Score
    from staticllm.pipelines.decisions.tree import DecisionCancelledError
    from staticllm.pipelines.embedding.embedding_config import EmbeddingConfig, RerankConfig
    from staticllm.pipelines.generation.genai_adapters import Adapter, AdapterConfig
    from staticllm.pipelines.generation.logits_processors import LogitsProcessor
    from staticllm.pipelines.launch.draft_origin import draft_model
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.pipelines.profiling.stats import Stats
    from staticllm.pipelines.profiling.trace import Trace
    from staticllm.pipelines.programs.variant_index import VariantIndex
    from staticllm.pipelines.scheduling.interface import Device, Plan, Policy, RequestStatus, RequestView, View
    from staticllm.pipelines.speech.results import (
        WhisperDecodedResultChunk,
        WhisperDecodedResults,
        WhisperPerfMetrics,
        WhisperWordTiming,
    )
    from staticllm.pipelines.speech.whisper_config import WhisperGenerationConfig
    from staticllm.pipelines.text.handle import GenerationHandle
    from staticllm.pipelines.text_embedding_pipeline import EmbeddingHandle, StaticEmbeddingPipeline
    from staticllm.pipelines.text_rerank_pipeline import RerankHandle, StaticRerankPipeline
    from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline
    from staticllm.results import AssistantMessage, DecodedResults, EncodedResults, GeneratedText, ToolCall

if __name__ != "staticllm":
    raise ImportError(f"this package is called staticllm, not {__name__}")
_CHECKOUT = Path(__file__).resolve().parent.parent
if not Path(__file__).with_name("pipelines").is_dir() and find_spec("staticllm.pipelines") is None:
    # in a checkout three packages lie beside this folder, and the installation says where
    raise ImportError(
        f"the checkout {_CHECKOUT} is not installed in this environment: run `python -m pip install -e {_CHECKOUT}`, "
        "or work in another folder if staticllm was installed without -e"
    )


__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterError",
    "ArgumentsDelta",
    "AssistantMessage",
    "BlobError",
    "BusyError",
    "Calibration",
    "CallBegin",
    "CallBroken",
    "CallEnd",
    "Choice",
    "ClosedError",
    "ConfigError",
    "ContentDelta",
    "Decision",
    "DecisionCancelledError",
    "DecisionHandle",
    "DecodedResults",
    "Device",
    "DeviceError",
    "EmbeddingConfig",
    "EmbeddingHandle",
    "EncodedResults",
    "FinishReason",
    "GeneratedText",
    "GenerationConfigError",
    "GenerationHandle",
    "Level",
    "LogitsProcessor",
    "ModelError",
    "NumericalError",
    "Option",
    "PerfMetrics",
    "Plan",
    "Policy",
    "Predicate",
    "ProcessLostError",
    "ProgressEvent",
    "PromptError",
    "PromptTooLongError",
    "QuestionError",
    "ReasoningDelta",
    "RequestStatus",
    "RequestView",
    "RerankConfig",
    "RerankHandle",
    "Score",
    "SnapshotError",
    "StaticEmbeddingPipeline",
    "StaticLLMConfig",
    "StaticLLMError",
    "StaticLLMPipeline",
    "StaticRerankPipeline",
    "StaticWhisperPipeline",
    "Stats",
    "ToolCall",
    "Trace",
    "UnsupportedModelError",
    "Variant",
    "VariantIndex",
    "View",
    "WhisperDecodedResultChunk",
    "WhisperDecodedResults",
    "WhisperGenerationConfig",
    "WhisperPerfMetrics",
    "WhisperWordTiming",
    "demo_model_path",
    "draft_model",
]


_LAZY = {
    "StaticLLMConfig": "config",
    **dict.fromkeys(("FinishReason", "ProgressEvent", "Variant"), "core"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
    "Calibration": "pipelines.decisions.calibration",
    "Decision": "pipelines.decisions.answers",
    "DecisionCancelledError": "pipelines.decisions.tree",
    "DecisionHandle": "pipelines.decisions.handle",
    **dict.fromkeys(
        ("Choice", "Level", "Option", "Predicate", "QuestionError", "Score"), "pipelines.decisions.questions"
    ),
    "PerfMetrics": "metrics",
    "demo_model_path": "model_dir",
    **dict.fromkeys(("AssistantMessage", "DecodedResults", "EncodedResults", "GeneratedText", "ToolCall"), "results"),
    "draft_model": "pipelines.launch.draft_origin",
    **dict.fromkeys(("Adapter", "AdapterConfig"), "pipelines.generation.genai_adapters"),
    "GenerationHandle": "pipelines.text.handle",
    "LogitsProcessor": "pipelines.generation.logits_processors",
    "StaticLLMPipeline": "pipelines.llm_pipeline",
    "Stats": "pipelines.profiling.stats",
    "Trace": "pipelines.profiling.trace",
    "VariantIndex": "pipelines.programs.variant_index",
    **dict.fromkeys(
        ("ArgumentsDelta", "CallBegin", "CallBroken", "CallEnd", "ContentDelta", "ReasoningDelta"),
        "events",
    ),
    **dict.fromkeys(("RerankHandle", "StaticRerankPipeline"), "pipelines.text_rerank_pipeline"),
    **dict.fromkeys(("EmbeddingConfig", "RerankConfig"), "pipelines.embedding.embedding_config"),
    **dict.fromkeys(("EmbeddingHandle", "StaticEmbeddingPipeline"), "pipelines.text_embedding_pipeline"),
    **dict.fromkeys(
        ("Device", "Plan", "Policy", "RequestStatus", "RequestView", "View"), "pipelines.scheduling.interface"
    ),
    **dict.fromkeys(
        ("WhisperDecodedResultChunk", "WhisperDecodedResults", "WhisperPerfMetrics", "WhisperWordTiming"),
        "pipelines.speech.results",
    ),
    "WhisperGenerationConfig": "pipelines.speech.whisper_config",
    "StaticWhisperPipeline": "pipelines.whisper_pipeline",
}
"""Names that are imported only when they are used, and their modules."""


def __getattr__(name: str) -> Any:
    """Import what is used: all of it takes a second, in which Ctrl-C could print a traceback (``__main__``)."""
    if name in _LAZY:
        return getattr(_imported(_LAZY[name]), name)
    if name in _LAZY.values():  # a module
        return _imported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(name: str) -> Any:
    try:
        return import_module(f"staticllm.{name}")
    except ImportError as error:
        from staticllm.errors import missing_runtime

        if (text := missing_runtime(error)) is None:
            raise
        raise ImportError(text, name=error.name) from error


def __dir__() -> list[str]:
    """The names of the module, with those that are imported only when they are used."""
    return sorted({*globals(), *__all__})
