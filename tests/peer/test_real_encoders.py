"""Tests published encoders with real weights: the vectors are those of transformers in f32, and neighbours are found.

They need the model's files (`python scripts/real_models.py minilm`) and the environment that STATICLLM_EXPORT_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from staticllm import StaticEmbeddingPipeline

PYTHON = os.environ.get("STATICLLM_EXPORT_PYTHON")
REFERENCE = Path(__file__).resolve().parents[1] / "support" / "export" / "mean_vectors.py"
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
PAIRS = [
    ("The capital of France is Paris.", "Paris is where the French government sits."),
    ("My cat sleeps on the sofa all day.", "The kitten naps on the couch."),
    ("Stock markets fell sharply on Monday.", "Share prices dropped at the start of the week."),
    ("Water boils at one hundred degrees Celsius.", "At 100 °C, water turns into steam."),
    ("She plays the violin in an orchestra.", "The musician performs with a symphony on her fiddle."),
    ("The train to Berlin is delayed by an hour.", "Our rail journey to Germany's capital starts late."),
    ("A virus can spread through contaminated water.", "Infections are often caught by drinking dirty water."),
    ("He forgot the password of his email account.", "I cannot log in to my mailbox any more."),
    ("Python lists can be sorted with the sort method.", "How do I order the elements of an array in code?"),
    ("Heavy rain flooded the streets of the village.", "The town's roads were under water after the storm."),
]
TEXTS = [text for pair in PAIRS for text in pair]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one"
    ),
]


@pytest.fixture(scope="module")
def expected(minilm, tmp_path_factory):
    """The vectors that transformers computes in f32, averaged and normalised by numpy, one text at a time."""
    target = tmp_path_factory.mktemp("reference") / "vectors.npy"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, str(REFERENCE), str(minilm), str(target)], input=json.dumps(TEXTS), text=True, check=True, timeout=300,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return np.load(target)


def test_vectors_are_those_of_transformers(exported_minilm, expected):
    with StaticEmbeddingPipeline(exported_minilm, "CPU", **F32) as pipe:
        found = pipe.encode(TEXTS)
    assert found.shape == expected.shape == (len(TEXTS), 384)
    differences = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert differences.max() < 1e-4


@pytest.mark.parametrize("properties", [{}, F32])
def test_the_nearest_of_20_sentences_is_the_other_of_its_pair(properties, exported_minilm):
    """Also at the device's own precision, in which users run it."""
    with StaticEmbeddingPipeline(exported_minilm, "CPU", **properties) as pipe:
        vectors = pipe.encode(TEXTS)
    similarities = vectors @ vectors.T
    np.fill_diagonal(similarities, -1)
    assert similarities.argmax(axis=1).tolist() == [place ^ 1 for place in range(len(TEXTS))]
