"""staticllm: large language models on devices that only execute graphs of fixed shape."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staticllm.config import StaticLLMConfig
from staticllm.core import FinishReason, ProgressEvent, Variant
from staticllm.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    DeviceError,
    GenerationConfigError,
    ModelError,
    NumericalError,
    PromptError,
    PromptTooLongError,
    SnapshotError,
    StaticLLMError,
    UnsupportedModelError,
)
from staticllm.metrics import PerfMetrics
from staticllm.model_dir import demo_model_path
from staticllm.results import DecodedResults, EncodedResults, GeneratedText

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

_CHECKOUT = Path(__file__).resolve().parent.parent
if __name__ != "staticllm":
    raise ImportError(f"this package is called staticllm, not {__name__}")
if (_CHECKOUT / "pipelines" / "llm_pipeline.py").is_file() and not Path(__file__).with_name("pipelines").is_dir():
    __path__.append(str(_CHECKOUT))  # in a checkout compiler_passes, kvcache and pipelines lie beside this folder

__version__ = "0.1.0"

__all__ = [
    "BusyError",
    "ClosedError",
    "ConfigError",
    "DecodedResults",
    "DeviceError",
    "EncodedResults",
    "FinishReason",
    "GeneratedText",
    "GenerationConfigError",
    "ModelError",
    "NumericalError",
    "PerfMetrics",
    "ProgressEvent",
    "PromptError",
    "PromptTooLongError",
    "SnapshotError",
    "StaticLLMConfig",
    "StaticLLMError",
    "StaticLLMPipeline",
    "UnsupportedModelError",
    "Variant",
    "demo_model_path",
]


def __getattr__(name: str) -> Any:
    """Import the pipeline, and OpenVINO with it, only when it is used."""
    if name == "StaticLLMPipeline":
        return import_module("staticllm.pipelines.llm_pipeline").StaticLLMPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the module, with those that are imported only when they are used."""
    return sorted({*globals(), *__all__})
