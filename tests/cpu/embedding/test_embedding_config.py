"""Tests that the whole numbers of encoders' options may be those of numpy, and become plain ones, which can be sent."""

from __future__ import annotations

import numpy as np
import pytest

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.embedding_config import EmbeddingConfig, RerankConfig, resolved_config

FIELDS = [
    (EmbeddingConfig, "max_length"),
    (EmbeddingConfig, "batch_size"),
    (RerankConfig, "max_length"),
    (RerankConfig, "top_n"),
]


@pytest.mark.parametrize("value", [np.int64(32), np.uint8(32), np.float64(32), 32.0])
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_whole_number_of_numpy_becomes_a_plain_one(kind, name, value):
    for given, keywords in ((None, {name: value}), (kind(**{name: value}), {})):
        found = getattr(resolved_config(kind, given, keywords), name)
        assert found == 32
        assert type(found) is int


@pytest.mark.parametrize("value", [np.int64(0), np.bool_(True), True, np.float32(1.5), 1.5])
@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_other_values_are_refused(kind, name, value):
    for given, keywords in ((None, {name: value}), (kind(**{name: value}), {})):
        with pytest.raises(ConfigError, match=f"{name}=.*: must be a whole number from 1"):
            resolved_config(kind, given, keywords)
