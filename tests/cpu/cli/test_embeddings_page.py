"""Tests the snippets of docs/embeddings.md and the examples for embeddings, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from support.encoders.encoder_models import encoder_directory, unpack

SNIPPETS = [
    ("numpy", r"An NPU is a neural processing unit\.\n"),
    ("numpy", r"\(200, 16\) \(200, 4\) int8\n5 vectors of handles\n"),
    ("numpy", r"(0\.\d\d (a fox is an animal|the sun is hot|the moon is not)\n){2}"),
    ("numpy", r"\(32,\) \(2, 32\)\n"),
    ("numpy", r"\(32,\) \(2, 32\)\n"),
    ("langchain_core", r"Rain is water that falls from clouds\.\n"),
    ("llama_index", r"Rain is water that falls from clouds\.\n"),
]
"""What each snippet needs, and what it prints."""
FIRST_ADAPTER = 3
ADAPTERS = ("sentence_transformers", "langchain", "llama_index")
CHECKS = [
    """
import numpy as np
texts = ["One text.", "Two of them.", "One text."]
with StaticEmbeddingPipeline("my_encoder", "CPU") as pipe, Encoder("my_encoder", "CPU") as encoder:
    raw, query = pipe.encode(texts, prompt=""), pipe.encode(texts, prompt=pipe.prompts["query"])
    assert np.abs(raw - query).max() > 0.01
    same = lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    same(encoder.encode(texts, batch_size=1), raw)
    same(encoder.encode(texts[1]), raw[1])
    same(encoder.encode(texts, prompt_name="query"), query)
    same(encoder.encode(texts, truncate_dim=8), pipe.encode(texts, dimensions=8))
    same(encoder.encode(texts, prompt="x: ", prompt_name="query"), pipe.encode(["x: " + text for text in texts], prompt=""))
    assert np.array_equal(encoder.encode(texts, precision="ubinary"), np.packbits(raw > 0, axis=1))
    same(encoder.embed_query("a"), pipe.embed_query("a"))
""",
    """
with StaticEmbeddingPipeline("my_encoder", "CPU", normalize=False) as pipe:
    encoder, texts = Encoder("my_encoder", normalize=False, device="CPU"), ["One text.", "Two of them.", "One text."]
    raw = pipe.encode(texts, prompt="")
    query = pipe.encode(texts, prompt=pipe.prompts["query"])
    unit = query / np.linalg.norm(query, axis=1, keepdims=True)
    assert pipe.prompts["query"] and np.abs(np.linalg.norm(raw, axis=1) - 1).max() > 0.01
    same = lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    same(encoder.encode(texts, batch_size=1, show_progress_bar=True), raw)
    same(encoder.encode(texts[1]), raw[1])
    same(encoder.encode(texts, prompt_name="query", normalize_embeddings=True), unit)
    same(encoder.encode(texts, prompt_name="query", truncate_dim=8), query[:, :8])
    same(encoder.encode(texts, prompt="x: "), pipe.encode(["x: " + text for text in texts], prompt=""))
    assert isinstance(encoder.encode(texts, convert_to_numpy=False), list)
    assert np.array_equal(encoder.encode(texts, precision="ubinary"), np.packbits(raw > 0, axis=1))
    encoder.pipe.close()
""",
    """
import numpy as np
with StaticEmbeddingPipeline("my_encoder", "CPU") as pipe:
    adapter, texts = StaticEmbeddings(pipe), ["One text.", "Two of them."]
    np.testing.assert_allclose(adapter.embed_documents(texts), pipe.encode(texts, prompt=""), atol=1e-5)
    np.testing.assert_allclose(adapter.embed_query("a"), pipe.encode([pipe.prompts["query"] + "a"], prompt="")[0], atol=1e-5)
    store = InMemoryVectorStore(adapter)
    store.add_texts(texts)
    scores = {each.page_content: score for each, score in store.similarity_search_with_score("a", k=2)}
    expected = pipe.encode(texts, prompt="") @ np.array(pipe.embed_query("a"))
    np.testing.assert_allclose([scores[text] for text in texts], expected, atol=1e-4)
""",
    """
import numpy as np
with StaticEmbeddingPipeline("my_encoder", "CPU") as pipe:
    adapter, texts = StaticEmbedding(pipe), ["One text.", "Two of them."]
    vectors = pipe.encode(texts, prompt="")
    query = pipe.encode([pipe.prompts["query"] + "a"], prompt="")[0]
    np.testing.assert_allclose(adapter.get_text_embedding_batch(texts), vectors, atol=1e-5)
    np.testing.assert_allclose(adapter.get_text_embedding(texts[0]), vectors[0], atol=1e-5)
    np.testing.assert_allclose(adapter.get_query_embedding("a"), query, atol=1e-5)
    np.testing.assert_allclose(asyncio.run(adapter.aget_query_embedding("a")), query, atol=1e-5)
    index = VectorStoreIndex([TextNode(text=text) for text in texts], embed_model=adapter)
    scores = {each.node.get_content(): each.score for each in index.as_retriever(similarity_top_k=2).retrieve("a")}
    np.testing.assert_allclose([scores[text] for text in texts], vectors @ query, atol=1e-4)
""",
]
"""What is run after each adapter: its values are those of the pipeline."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("page")
    (place / "my_encoder").mkdir()
    encoder_directory(place / "my_encoder")
    (place / "my_reranker").mkdir()
    for name in ("bert_scores", "bert_tokenizer"):
        unpack(name, place / "my_reranker")
    return place


def snippets(root):
    """The snippets of the page, then the adapters of the examples."""
    found = re.findall(r"```python\n(.*?)```", (root / "docs" / "embeddings.md").read_text(encoding="utf-8"), re.S)
    return found + [(root / "examples" / f"embedding_{name}.py").read_text(encoding="utf-8") for name in ADAPTERS]


def needs(module, extra):
    """Skip the test without an optional package; CI has installed all of them."""
    if importlib.util.find_spec(module) is None:
        reason = f"pip install '.[{extra}]'"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def run(*command, folder):
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, encoding="utf-8", timeout=180,
        check=False, env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_each_snippet_runs_alone(root, folder, number):
    module, printed = SNIPPETS[number]
    needs(module, "adapters")
    script = folder / f"snippet{number}.py"
    script.write_text(snippets(root)[number], encoding="utf-8")
    done = run(script, folder=folder)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FIRST_ADAPTER, len(SNIPPETS)))
def test_each_adapter_gives_the_values_of_the_pipeline(root, folder, number):
    needs(SNIPPETS[number][0], "adapters")
    script = folder / f"values{number}.py"
    script.write_text(snippets(root)[number] + CHECKS[number - FIRST_ADAPTER], encoding="utf-8")
    done = run(script, folder=folder)
    assert done.returncode == 0, done.stderr


def test_every_snippet_is_tested(root):
    assert len(snippets(root)) == len(SNIPPETS)
