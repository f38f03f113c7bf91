"""Checks a model by loading it as a verb would, and running one token or one text, for ``staticllm doctor``."""

from __future__ import annotations

import time
from pathlib import Path

from staticllm.compiler_passes.model_kind import DECODER, SCORES, ModelKind, is_lowered_as, kind_in
from staticllm.core import OnProgress
from staticllm.errors import ModelError, StaticLLMError, UnsupportedModelError
from staticllm.model_dir import check_model_dir
from staticllm.model_paths.path_kind import path_kind
from staticllm.pipelines.blobs.cache import BlobCache
from staticllm.pipelines.blobs.fingerprint import fingerprint_model
from staticllm.pipelines.diagnostics.reports import Finding
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline

SMALL = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "MAX_NUM_SEQS": 1, "MEASURE_COSTS": False}
"""Properties of a decoder that is only tried: few programs and little memory."""
NOT_TEXT = "its graph is neither a decoder's nor an encoder's"


def check_model(path: str, device: str, cache_dir: str | None, on_progress: OnProgress) -> Finding:
    """Load the model at ``path`` on ``device`` and run it once; compare its weights with those of the sets in a cache."""
    start = time.perf_counter()
    try:
        directory = check_model_dir(path)
        kind = _tried(directory, device, on_progress)
        here = fingerprint_model(directory)
    except StaticLLMError as error:
        found = path_kind(path, needs_tokenizer=True)
        if not found.is_loadable:
            return Finding("fail", "model", found.what, found.remedy)
        again = "export the original with optimum-cli export openvino (docs/models.md)"
        is_refused = isinstance(error, UnsupportedModelError)
        return Finding("fail", "model", str(error), again if is_refused else f"copy the model again, or {again}")
    for entry in BlobCache(cache_dir).entries() if cache_dir is not None else ():
        there = entry.manifest.fingerprint if entry.manifest is not None else None
        if there is not None and there.ir_digest == here.ir_digest and there.weights_digest != here.weights_digest:
            return Finding(
                "warn",
                "model",
                f"its weights ({here.weights_digest[:12]}) are not those of set {entry.key} ({there.weights_digest[:12]})",
                "if this is not intended, copy the model again; a pipeline that runs with the model refuses requests",
            )
    ran = f"loaded and run on {device} in {time.perf_counter() - start:.1f} s"
    return Finding("ok", "model", f"complete, weights {here.weights_digest[:12]}, {kind.what}, {ran}")


def _tried(directory: Path, device: str, on_progress: OnProgress) -> ModelKind:
    """Load a model by the class for its kind, run one token or one text, and return the kind.

    Raises:
        StaticLLMError: it cannot be loaded, or cannot run.
    """
    kind = kind_in(directory)
    if kind is None:
        raise ModelError(NOT_TEXT)
    if not is_lowered_as(kind, "encoder", read_encoder_files(directory).pooling is not None):
        assert kind is DECODER
        with StaticLLMPipeline(directory, device, config=SMALL, on_progress=on_progress) as pipe:
            pipe.generate("a", max_new_tokens=1, apply_chat_template=False)
    elif kind is SCORES:
        with StaticRerankPipeline(directory, device, on_progress=on_progress, max_length=64) as reranker:
            reranker.scores("a", ["a"])
    else:
        with StaticEmbeddingPipeline(directory, device, on_progress=on_progress, max_length=64) as embedder:
            embedder.embed_query("a")
    return kind
