"""Gives GenAI's tests of embeddings and rerankers local models, a reference on them, and our classes.

The tests compare with LangChain and optimum-intel. Here the reference is the original on the CPU in f32, one text per call, with
the pooling of the test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import types
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from numpy.typing import NDArray
from openvino import opset13 as ops

ARCHIVES = Path(__file__).resolve().parent.parent / "tests" / "_encoders"
ENCODER = os.environ.get("GENAI_SUITE_ENCODER", "")
EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
MODELS = {
    "BAAI/bge-small-en-v1.5": "bert",
    "mixedbread-ai/mxbai-embed-xsmall-v1": "bert",
    "Qwen/Qwen3-Embedding-0.6B": "qwen3",
    "cross-encoder/ms-marco-TinyBERT-L2-v2": "bert_scores",
    "tomaarsen/Qwen3-Reranker-0.6B-seq-cls": "qwen3_scores",
    "Qwen/Qwen3-Reranker-0.6B": "qwen3_with_past",
}
"""The archive that stands for each model of the tests; ``--encoder`` stands for those with ``bert``."""
KEPT = tempfile.TemporaryDirectory(prefix="genai-suite-", ignore_cleanup_errors=True)
Array = NDArray[Any]


@dataclass(frozen=True)
class Converted:
    """The object that the tests call a converted model."""

    model_id: str
    opt_model: Original
    hf_tokenizer: genai.Tokenizer
    models_path: Path


class Original:
    """A model as it was exported: the states, scores or logits of one text, ``[tokens or 1, width]``."""

    def __init__(self, directory: Path) -> None:
        self._compiled = ov.Core().compile_model(directory / "openvino_model.xml", "CPU", EXACT)

    def __call__(self, ids: Array, kinds: Array | None = None) -> Array:
        row = np.asarray(ids, np.int64)[None]
        feeds = {
            "input_ids": row,
            "attention_mask": np.ones_like(row),
            "token_type_ids": np.zeros_like(row) if kinds is None else kinds[None],
            "position_ids": np.arange(row.shape[1])[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request = self._compiled.create_infer_request()
        request.infer({name: feeds[name] for port in self._compiled.inputs for name in port.get_names() & feeds.keys()})
        return np.array(request.get_output_tensor(0).data[0]).reshape(-1, self._width)

    @property
    def _width(self) -> int:
        return int(self._compiled.output(0).get_partial_shape()[-1].get_length())


@cache
def converted(model_id: str, *rest: Any, **named: Any) -> Converted:
    """Return the local model that stands for one of the tests' models."""
    if model_id not in MODELS:
        pytest.skip(f"there is no local model for {model_id}")
    name = MODELS[model_id]
    folder = Path(KEPT.name) / name
    if not folder.exists():
        folder.mkdir()
        if ENCODER and name.startswith("bert"):
            for path in Path(ENCODER).glob("openvino_*"):  # as exported: without the pooling of sentence-transformers
                shutil.copy(path, folder)
            if name == "bert_scores":
                add_score(folder)
        else:
            for part in (name, "bert_tokenizer"):
                with zipfile.ZipFile(ARCHIVES / f"{part}.zip") as archive:
                    archive.extractall(folder)
    return Converted(model_id, original_of(folder), genai.Tokenizer(folder), folder)


def add_score(folder: Path) -> None:
    """Make a cross-encoder of an embedding model: the logit of one label, by random weights on the first token."""
    model = ov.Core().read_model(
        (folder / "openvino_model.xml").read_bytes(), (folder / "openvino_model.bin").read_bytes()
    )
    (result,) = model.get_results()
    first = ops.gather(result.input_value(0), ops.constant(np.int64(0)), ops.constant(np.int64(1)))
    width = first.get_output_partial_shape(0)[1].get_length()
    weights = np.random.default_rng(0).normal(size=(1, width)).astype(np.float32) * 0.3
    logits = ops.result(ops.matmul(first, ops.constant(weights), False, True))
    logits.output(0).set_names({"logits"})
    model.remove_result(result)
    model.add_results([logits])
    model.validate_nodes_and_infer_types()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)


@cache
def original_of(folder: Path) -> Original:
    """Return the original in a directory, compiled once."""
    return Original(folder)


def token_ids(tokenizer: genai.Tokenizer, text: str, limit: int | None) -> Array:
    options = {} if limit is None else {"max_length": limit}
    return np.array(tokenizer.encode(text, **options).input_ids.data[0])


class Embeddings:
    """The part of LangChain's ``OpenVINOBgeEmbeddings`` that the tests use."""

    embed_instruction, query_instruction = "", ""

    def __init__(self, model_name_or_path: str, model_kwargs: Any, encode_kwargs: dict[str, Any]) -> None:
        folder = Path(model_name_or_path)
        self._original, self._tokenizer, self._options = original_of(folder), genai.Tokenizer(folder), encode_kwargs

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return [self._vector(self.embed_instruction + text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self._vector(self.query_instruction + text)

    def _vector(self, text: str) -> list[float]:
        states = self._original(token_ids(self._tokenizer, text, None))
        vector = states.mean(axis=0) if self._options.get("mean_pooling") else states[0]
        found = vector / np.linalg.norm(vector) if self._options["normalize_embeddings"] else vector
        return [float(value) for value in found]


class Reranker:
    """The part of LangChain's ``OpenVINOReranker`` that the tests use."""

    def __init__(self, model_name_or_path: str, top_n: int) -> None:
        folder = Path(model_name_or_path)
        self._original, self._tokenizer, self._top_n = original_of(folder), genai.Tokenizer(folder), top_n

    def compress_documents(self, documents: Sequence[Any], query: str) -> list[Any]:
        first = token_ids(self._tokenizer, query, None)
        scores = []
        for document in documents:
            ids = np.concatenate([first, token_ids(self._tokenizer, document.page_content, None)[1:]])
            kinds = (np.arange(len(ids)) >= len(first)).astype(np.int64)
            scores.append(1 / (1 + np.exp(-float(self._original(ids, kinds)[0, 0]))))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        return [types.SimpleNamespace(metadata={"id": i, "relevance_score": scores[i]}) for i in best]


def document(page_content: str) -> Any:
    return types.SimpleNamespace(page_content=page_content, metadata={})


def qwen3_embeddings(model: Original, tokenizer: genai.Tokenizer, documents: Sequence[str], side: str = "") -> Array:
    """Return the state of each text's last token, ``[n, width]``, in place of the tests' reference of this name."""
    return np.stack([model(token_ids(tokenizer, text, None))[-1] for text in documents])


def qwen3_ranking(
    model: Original, tokenizer: genai.Tokenizer, query: str, documents: Sequence[str], config: Any = None
) -> list[tuple[int, float]]:
    """Return the ranking by one label, or by the logits of "no" and "yes", in place of the tests' reference."""
    vocabulary, scores = tokenizer.get_vocab(), []
    for text in documents:
        logits = model(token_ids(tokenizer, query + text, None))[-1].astype(np.float64)
        good = logits[0] if len(logits) == 1 else logits[vocabulary[b" yes"]] - logits[vocabulary[b" no"]]
        scores.append(1 / (1 + np.exp(-good)))
    top_n = 3 if config is None else config.top_n
    return sorted(enumerate(map(float, scores)), key=lambda entry: -entry[1])[:top_n]


def replace_references(module: types.ModuleType) -> None:
    """Replace the names of ``test_rag.py`` that would need torch, a network or LangChain."""
    vars(module).update(
        download_and_convert_model=converted,
        download_and_convert_model_class=lambda model_id, kind, **rest: converted(model_id),
        OpenVINOBgeEmbeddings=Embeddings,
        OpenVINOReranker=Reranker,
        Document=document,
        run_qwen3_embedding_optimum=qwen3_embeddings,
        run_qwen3_rerank_optimum=qwen3_ranking,
    )


def put_our_classes() -> None:
    """Replace GenAI's classes by ours, which run tests for the NPU on the CPU and compile each model once (``CACHE_DIR``)."""
    from staticllm import StaticEmbeddingPipeline, StaticRerankPipeline

    cache = str(Path(KEPT.name) / "cache")

    class TextEmbeddingPipeline(StaticEmbeddingPipeline):
        def __init__(self, path: Any, device: str = "CPU", *arguments: Any, **named: Any) -> None:
            own = {name: value for name, value in named.items() if not name.startswith("NPU")}
            super().__init__(path, "CPU", *arguments, CACHE_DIR=cache, **own)

    class TextRerankPipeline(StaticRerankPipeline):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, CACHE_DIR=cache, **named)

    genai.TextEmbeddingPipeline = TextEmbeddingPipeline  # type: ignore[misc,assignment]
    genai.TextRerankPipeline = TextRerankPipeline  # type: ignore[misc,assignment]
