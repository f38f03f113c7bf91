"""Checks a model by loading it as a verb would, and running a chat turn, a text or pairs, for ``staticllm doctor``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from staticllm.compiler_passes.model_kind import DECODER, SCORES, ModelKind, is_lowered_as, kind_in
from staticllm.core import OnProgress
from staticllm.errors import (
    GenerationConfigError,
    ModelError,
    PromptError,
    PromptTooLongError,
    StaticLLMError,
    UnsupportedModelError,
)
from staticllm.model_dir import check_model_dir
from staticllm.model_paths.path_kind import path_kind
from staticllm.pipelines.artifacts.cache import BlobCache
from staticllm.pipelines.artifacts.fingerprint import fingerprint_model
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
        tried = _tried(directory, device, on_progress)
        here = fingerprint_model(directory)
    except StaticLLMError as error:
        found = path_kind(path, needs_tokenizer=True)
        if not found.is_loadable:
            return Finding("fail", "model", found.what, found.remedy)
        return Finding("fail", "model", str(error), _remedy(error))
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
    complete = f"complete, weights {here.weights_digest[:12]}, {tried.kind.what}, {ran}{tried.how}"
    return Finding("warn" if tried.remedy else "ok", "model", complete, tried.remedy)


@dataclass(frozen=True)
class _Tried:
    """The kind of a model that ran, how it was run, and what should be done although it ran."""

    kind: ModelKind
    how: str = ""
    remedy: str = ""


def _remedy(error: StaticLLMError) -> str:
    """Return what helps a model that cannot be loaded or run."""
    again = "export the original with optimum-cli export openvino (docs/models.md)"
    if isinstance(error, UnsupportedModelError):
        return again
    if isinstance(error, GenerationConfigError):
        return "correct the field in generation_config.json, or remove it there"
    if isinstance(error, PromptError):
        return "correct the chat template in openvino_tokenizer.xml or chat_template.jinja, or set another on the tokenizer"
    return f"copy the model again, or {again}"


def _tried(directory: Path, device: str, on_progress: OnProgress) -> _Tried:
    """Load a model by the class for its kind, and run a chat turn, a text, or a query with two texts.

    Raises:
        StaticLLMError: it cannot be loaded, or cannot run.
    """
    kind = kind_in(directory)
    if kind is None:
        raise ModelError(NOT_TEXT)
    files = read_encoder_files(directory)
    if kind is SCORES or (kind is DECODER and files.score_tokens):
        with StaticRerankPipeline(directory, device, on_progress=on_progress, max_length=64) as reranker:
            reranker.scores("a", ["b", "a c"])
            is_cross = kind is SCORES and not reranker.is_paired
        if not is_cross:
            return _Tried(kind, " with a query and two texts")
        how = ", but its tokenizer encodes no pairs: each text is joined to its query without a separator"
        return _Tried(
            kind, how, "write the prompt of the model around both, or export its tokenizer again (docs/models.md)"
        )
    if is_lowered_as(kind, "encoder", files.pooling is not None):
        with StaticEmbeddingPipeline(directory, device, on_progress=on_progress, max_length=64) as embedder:
            embedder.embed_query("a")
        return _Tried(kind)
    assert kind is DECODER
    with StaticLLMPipeline(directory, device, config=SMALL, on_progress=on_progress) as pipe:
        return _Tried(kind, _said_to(pipe))


def _said_to(pipe: StaticLLMPipeline) -> str:
    """Run one turn through the chat template if there is one, else one token of text, and return how it was run."""
    pipe.set_generation_config(pipe.get_generation_config())  # which checks what the model's own file says
    if not pipe.get_tokenizer().chat_template:
        pipe.generate("a", max_new_tokens=1, apply_chat_template=False)
        return ", without a chat template"
    try:
        pipe.generate("a", max_new_tokens=1)
    except PromptTooLongError:  # the template works, and its text is longer than what is loaded for a trial
        pipe.generate("a", max_new_tokens=1, apply_chat_template=False)
    return " with its chat template"
