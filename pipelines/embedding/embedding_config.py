"""The options of an embedding pipeline: those of GenAI's class, where None stands for what the model's files say."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import TypeAlias

import openvino_genai as genai

from staticllm.config import as_whole
from staticllm.core import Pooling
from staticllm.errors import ConfigError

PoolingType: TypeAlias = genai.TextEmbeddingPipeline.PoolingType
POOLINGS: dict[object, Pooling] = {
    PoolingType.CLS: "first",
    PoolingType.MEAN: "mean",
    PoolingType.LAST_TOKEN: "last",
}


@dataclass
class EmbeddingConfig:
    """The options of ``openvino_genai.TextEmbeddingPipeline.Config``; None for what the model's files say.

    Attributes:
        max_length: The most tokens of a text; longer ones are truncated.
        pad_to_max_length, batch_size, padding_side: Accepted and ignored: texts are packed, not padded, in any number.
        pooling_type: How the vectors of tokens become one.
        normalize: Whether vectors have length 1.
        query_instruction: The text before each query.
        embed_instruction: The text before each document.
    """

    max_length: int | None = None
    pad_to_max_length: bool | None = None
    batch_size: int | None = None
    pooling_type: PoolingType | None = None
    normalize: bool = True
    query_instruction: str | None = None
    embed_instruction: str | None = None
    padding_side: str | None = None

    def validate(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is impossible.
        """
        for name in ("max_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r}: must be a whole number from 1, or None")
        if not isinstance(self.normalize, bool):
            raise ConfigError(f"normalize={self.normalize!r}: must be True or False")
        for name in ("query_instruction", "embed_instruction"):
            if not isinstance(value := getattr(self, name), (str, NoneType)):
                raise ConfigError(f"{name}={value!r}: must be a str, or None for what the model's files say")
        if self.pooling_type is not None and self.pooling_type not in POOLINGS:
            raise ConfigError(f"pooling_type={self.pooling_type!r}: must be a PoolingType: CLS, MEAN or LAST_TOKEN")


def resolved_config(config: object, own: Mapping[str, object]) -> EmbeddingConfig:
    """Return the config with the keywords in it.

    Raises:
        ConfigError: a value is impossible.
    """
    if isinstance(config, genai.TextEmbeddingPipeline.Config):
        values = {item.name: getattr(config, item.name) for item in fields(EmbeddingConfig)}
        if values["pooling_type"] == PoolingType.CLS:  # its default: GenAI cannot say whether it was given
            values["pooling_type"] = None
            warnings.warn(
                "pooling_type CLS of GenAI's Config is its default: the model's own pooling is used; give "
                "pooling_type=PoolingType.CLS as a keyword if CLS is meant",
                stacklevel=3,
            )
        config = EmbeddingConfig(**values)
    elif config is None:
        config = EmbeddingConfig()
    elif not isinstance(config, EmbeddingConfig):
        raise ConfigError(f"config is a {type(config).__name__}: must be a StaticEmbeddingPipeline.Config")
    found = EmbeddingConfig(**{name: as_whole(value) for name, value in {**vars(config), **own}.items()})
    found.validate()
    return found
