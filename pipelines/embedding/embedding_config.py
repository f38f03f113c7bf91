"""The options of the pipelines of encoders: those of GenAI's classes, where None stands for what the model's files say."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import TypeAlias, TypeVar

import openvino_genai as genai

from staticllm.config import as_whole, is_whole
from staticllm.core import Pooling
from staticllm.errors import ConfigError, shown

PoolingType: TypeAlias = genai.TextEmbeddingPipeline.PoolingType
POOLINGS: dict[object, Pooling] = {
    PoolingType.CLS: "first",
    PoolingType.MEAN: "mean",
    PoolingType.LAST_TOKEN: "last",
}


@dataclass
class EmbeddingConfig:
    """The options of ``openvino_genai.TextEmbeddingPipeline.Config``; None for what the model's files say."""

    max_length: int | None = None
    """The most tokens of a text; longer ones are truncated."""
    pad_to_max_length: bool | None = None
    """Accepted and ignored: texts are packed, not padded."""
    batch_size: int | None = None
    """Accepted and ignored: a call takes any number of texts."""
    pooling_type: PoolingType | None = None
    """How the vectors of tokens become one."""
    normalize: bool = True
    """Whether vectors have length 1."""
    query_instruction: str | None = None
    """The text before each query."""
    embed_instruction: str | None = None
    """The text before each document."""
    padding_side: str | None = None
    """Accepted and ignored, like ``pad_to_max_length``."""

    def validate(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is impossible.
        """
        for name in ("max_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1):
                raise ConfigError(f"{name}={shown(value)}: must be a whole number from 1, or None")
        if not isinstance(self.normalize, bool):
            raise ConfigError(f"normalize={shown(self.normalize)}: must be True or False")
        for name in ("query_instruction", "embed_instruction"):
            if not isinstance(value := getattr(self, name), (str, NoneType)):
                raise ConfigError(f"{name}={shown(value)}: must be a str, or None for what the model's files say")
        if type(self.pooling_type) not in (type(PoolingType.CLS), NoneType):
            raise ConfigError(
                f"pooling_type={shown(self.pooling_type)}: must be a PoolingType: CLS, MEAN or LAST_TOKEN"
            )


@dataclass
class RerankConfig:
    """The options of ``openvino_genai.TextRerankPipeline.Config``; None for what the model's files say."""

    top_n: int = 3
    """The number of texts that ``rerank`` returns."""
    max_length: int | None = None
    """The most tokens of a query with a text; longer texts are truncated."""
    pad_to_max_length: bool | None = None
    """Accepted and ignored: texts are packed, not padded."""
    padding_side: str | None = None
    """Accepted and ignored, like ``pad_to_max_length``."""

    def validate(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is impossible.
        """
        if not is_whole(self.top_n, 1):
            raise ConfigError(f"top_n={shown(self.top_n)}: must be a whole number from 1")
        if self.max_length is not None and not is_whole(self.max_length, 1):
            raise ConfigError(f"max_length={shown(self.max_length)}: must be a whole number from 1, or None")


WITHOUT_EFFECT: Mapping[str, str] = {
    "pad_to_max_length": "texts are packed, not padded",
    "padding_side": "texts are packed, not padded",
    "batch_size": "a call has any number of texts",
}
"""The fields of GenAI's configs that are taken and change nothing, and why; docs/reference/options.md lists them."""


def markdown() -> str:
    """Return the fields without effect, as a table of ``docs/reference/options.md``."""
    configs = {"StaticEmbeddingPipeline": EmbeddingConfig, "StaticRerankPipeline": RerankConfig}
    lines = ["| option | of | why |", "|---|---|---|"]
    for name, reason in WITHOUT_EFFECT.items():
        having = [f"`{pipeline}`" for pipeline, kind in configs.items() if name in {item.name for item in fields(kind)}]
        lines.append(f"| `{name}` | {', '.join(having)} | {reason[0].upper()}{reason[1:]}. |")
    return "\n".join(lines)


AnyConfig = TypeVar("AnyConfig", EmbeddingConfig, RerankConfig)


def resolved_config(kind: type[AnyConfig], given: object, properties: dict[str, object]) -> AnyConfig:
    """Return the config with the keywords among ``properties`` in it, which are removed from these.

    Raises:
        ConfigError: a value is impossible.
    """
    names = [item.name for item in fields(kind)]
    own = {name: properties.pop(name) for name in names if name in properties}
    if isinstance(given, _GENAI[kind]):
        values = {name: getattr(given, name) for name in names}
        if values.get("pooling_type") == PoolingType.CLS:  # its default: GenAI cannot say whether it was given
            values["pooling_type"] = None
            warnings.warn(
                "pooling_type CLS of GenAI's Config is its default: the model's own pooling is used; give "
                "pooling_type=PoolingType.CLS as a keyword if CLS is meant",
                stacklevel=3,
            )
    elif given is None or isinstance(given, kind):
        values = {} if given is None else vars(given)
    else:
        pipeline = "StaticEmbeddingPipeline" if kind is EmbeddingConfig else "StaticRerankPipeline"
        raise ConfigError(f"config is a {type(given).__name__}: must be a {pipeline}.Config")
    found = kind(**{name: as_whole(value) for name, value in {**values, **own}.items()})
    found.validate()
    return found


_GENAI = {EmbeddingConfig: genai.TextEmbeddingPipeline.Config, RerankConfig: genai.TextRerankPipeline.Config}
