"""Describes, estimates, tries and verifies encoders: each text alone, packed with others, and by the original, in f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import openvino as ov

from staticllm.core import EncoderShape, EncoderVariant, OnProgress, Pooling, ProgramMode
from staticllm.devices import check_device, get_core, kind
from staticllm.errors import ConfigError
from staticllm.ports import (
    EMBEDDINGS,
    INPUT_IDS,
    KEPT_ROWS,
    POSITION_IDS,
    SCORES,
    TOKEN_TYPE_IDS,
    encoder_input_names,
    encoder_shape_of,
    past_names,
    present_names,
)

from ...compiler_passes.lower_encoder import LoweredEncoder
from ...compiler_passes.model_kind import DECODER, kind_in
from ...compiler_passes.model_kind import SCORES as SCORING
from ..embedding.encoder_job import encoder_job
from ..embedding.encoder_kind import (
    EncoderChoices,
    EncoderJob,
    EncoderKind,
    EncoderPlan,
    default_pooling,
)
from ..embedding.encoder_runner import EncoderRunner
from ..embedding.packing.encoder_buffers import Vectors
from ..embedding.packing.tokenized_text import TokenizedText
from ..embedding.pool.instances import embed_texts
from ..loading.kind import LoadJob
from ..loading.load import load_job
from ..text_embedding_pipeline import StaticEmbeddingPipeline
from ..text_rerank_pipeline import StaticRerankPipeline
from .diagnosis import OTHER_TOLERANCE, Diagnosis, Trial, agreed, in_mode, least_cosine
from .reference import EncoderReference
from .reports import (
    Agreement,
    EncoderReport,
    PoolingDecider,
    TimedVariant,
    Verdict,
    difference,
    encoder_size,
)
from .settings import label_of

LENGTHS = (1, 2, 3, 5, 9, 17, 33, 60, 100, 128, 250, 512)
"""Tokens of the texts, as far as the model allows them."""
SIZES = ((1, 32), (2, 64), (4, 128))
"""Batches and rows of the programs that are compared; a program for the longest text is added."""
TOLERANCE = 1e-5
"""Largest difference on a CPU, as a share of the range of the original's numbers."""
FIRST_ID = 8
"""Token ids below this are special in most vocabularies."""
OWN = {"max_length", "normalize"}
"""Options of an encoder beside its properties, which may be written in any case."""
TRIED_LENGTH = 64
"""Tokens of a text in an encoder that is only tried."""


class EncoderDiagnosis(Diagnosis[EncoderKind]):
    """The questions about encoders."""

    places = "texts"

    def job(
        self,
        directory: Path,
        device: str,
        properties: Mapping[str, Any],
        on_progress: OnProgress = lambda event: None,
        check: Callable[[ov.Core, object], str] = check_device,
    ) -> EncoderJob:
        return encoder_job(directory, device, read_choices(properties), on_progress, check)

    def report(self, job: EncoderJob) -> EncoderReport:
        return self.report_of(job, job.kind.plan(job))

    def report_of(self, job: EncoderJob, plan: EncoderPlan) -> EncoderReport:
        shape = plan.lowered.shape
        pooling, decider = _pooling(job, shape)
        return EncoderReport(
            **self.described(job, plan),
            settings=label_of(get_core(), job.device, plan.options.properties["encode"]),
            output=shape.output,
            width=shape.width,
            masks=tuple(mask.label for mask in shape.masks),
            first_position=shape.first_position if shape.has_positions else None,
            has_token_types=shape.has_token_types,
            pooling=pooling,
            pooling_source=decider,
            num_dense=len(job.kind.files.dense),
            is_normalised=shape.output == "embeddings" and job.kind.chosen.is_normalised,
            max_length=shape.longest,
            vocab_size=shape.vocab_size,
            is_packable=shape.is_packable,
            shares_prefixes=shape.shares_prefixes,
            reasons=cast(LoweredEncoder, plan.lowered).reasons,
            unsafe_rows=shape.unsafe_rows,
        )

    def buffer_bytes(self, plan: EncoderPlan) -> int:
        """Return the bytes of all variants, with keys and values of one long text."""
        shape = plan.lowered.shape
        variants = plan.variants
        names = [*encoder_input_names(shape), EMBEDDINGS if shape.output == "embeddings" else SCORES]
        widths = {INPUT_IDS: 8, POSITION_IDS: 8, TOKEN_TYPE_IDS: 8, KEPT_ROWS: 8}
        own = sum(
            widths.get(name, 4) * math.prod(encoder_shape_of(name, shape, variant))
            for variant in variants
            for name in names
            if name not in past_names(shape)
        )
        most = max(variants, key=lambda variant: (variant.past, variant.rows))
        shared = (*past_names(shape), *present_names(shape))
        return own + sum(4 * math.prod(encoder_shape_of(name, shape, most)) for name in shared)

    def timed(self, variant: EncoderVariant, seconds: float | None) -> TimedVariant:
        return TimedVariant(variant, encoder_size(variant), variant.batch * variant.rows, seconds)

    def verdicts(self, job: EncoderJob, modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
        """Compare texts of several lengths alone, packed with each other, and as the original computes them."""
        expected: Vectors | None = None
        tolerance = TOLERANCE if kind(job.device) == "CPU" else OTHER_TOLERANCE
        sized = replace(job, kind=replace(job.kind, chosen=replace(job.kind.chosen, sizes=SIZES)))
        for mode in modes:
            exact = in_mode(sized, mode)
            runner = load_job(exact).runner
            texts = _texts(runner)
            if expected is None:
                expected = _originals(exact, runner, texts)
            alone = np.concatenate([embed_texts(runner, [text]) for text in texts])
            shared = _run_full(runner, texts)
            packed = np.concatenate([call.vectors for call in shared])
            others = [index for call in shared for index in call.texts]
            lengths = [len(text) for text in texts]
            yield _verdict(f"{mode}: alone, against the original", alone, expected, lengths, tolerance)
            lengths = [lengths[index] for index in others]
            full = f", {len(others)} texts in {len(shared)} calls"
            yield _verdict(f"{mode}: packed, against the original", packed, expected[others], lengths, tolerance, full)
            yield _verdict(f"{mode}: packed, against alone", packed, alone[others], lengths, tolerance, full)

    def agreement(self, job: EncoderJob) -> Agreement:
        """Load a model, and compare it with the original: the least cosine of a text's vectors, or that of all scores."""
        runner = load_job(job).runner
        texts = _texts(runner)
        expected = _originals(job, runner, texts)
        vectors = embed_texts(runner, texts)
        distance = float(np.abs(vectors - expected).max() / np.ptp(expected))
        shape = vectors.shape if runner.shape.output == "embeddings" else (1, -1)
        return agreed(least_cosine(vectors.reshape(shape), expected.reshape(shape)), distance, len(texts))

    def try_out(self, job: EncoderJob) -> Trial:
        """Embed a text, or score two texts for a query."""
        what = kind_in(job.directory, job.config.weights_path)
        if what is SCORING or (what is DECODER and job.kind.files.score_tokens):
            return try_reranker(job, is_cross_encoder=what is SCORING)
        with StaticEmbeddingPipeline(
            job.directory, job.device, on_progress=job.on_progress, max_length=TRIED_LENGTH
        ) as embedder:
            embedder.embed_query("a")
        return Trial()


def read_choices(properties: Mapping[str, Any]) -> EncoderChoices:
    """Return what a user chose for an encoder, of properties and the options in ``OWN``.

    Raises:
        ConfigError: ``max_length`` or ``normalize`` has an impossible value.
    """
    own = {name.lower(): value for name, value in properties.items() if name.lower() in OWN}
    length = own.get("max_length")
    is_normalised = own.get("normalize", True)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ConfigError(f"max_length={length!r}: must be a whole number from 1")
    if not isinstance(is_normalised, bool):
        raise ConfigError(f"normalize={is_normalised!r}: must be yes or no")
    others = {name: value for name, value in properties.items() if name.lower() not in OWN}
    return EncoderChoices(max_length=length, is_normalised=is_normalised, properties=others)


def try_reranker(job: LoadJob[Any], is_cross_encoder: bool) -> Trial:
    """Score two texts for a query. A cross-encoder should get the query and each text as a pair."""
    with StaticRerankPipeline(
        job.directory, job.device, on_progress=job.on_progress, max_length=TRIED_LENGTH
    ) as reranker:
        reranker.scores("a", ["b", "a c"])
        if reranker.is_paired or not is_cross_encoder:
            return Trial(" with a query and two texts")
    how = ", but its tokenizer encodes no pairs: each text is joined to its query without a separator"
    return Trial(how, "write the prompt of the model around both, or export its tokenizer again (docs/models.md)")


def _pooling(job: EncoderJob, shape: EncoderShape) -> tuple[Pooling | None, PoolingDecider]:
    """Return how a text's vectors become one, and what decides that; None if they are scores."""
    if shape.output == "scores":
        return None, "the model's graph"
    if shape.pooling is not None:
        return shape.pooling, "the model's graph"
    chosen = job.kind.chosen.pooling
    named = job.kind.files.pooling
    if chosen is not None:
        return chosen, "the user"
    if named is not None:
        return named, "the model's files"
    return default_pooling(shape), "the default"


def _verdict(
    check: str, found: Vectors, other: Vectors, lengths: Sequence[int], tolerance: float, full: str = ""
) -> Verdict:
    differences = np.abs(found - other).max(axis=1)
    share = float(differences.max() / np.ptp(other)) if np.isfinite(found).all() else math.inf
    worst = lengths[int(differences.argmax())]
    detail = f"most at {worst} of {min(lengths)} to {max(lengths)} tokens{full}"
    return difference(check, share, tolerance, "numbers", detail)


def _originals(job: EncoderJob, runner: EncoderRunner, texts: Sequence[TokenizedText]) -> Vectors:
    reference = EncoderReference(job, runner.shape, runner.pooling)
    return np.stack([reference(text) for text in texts])


def _texts(runner: EncoderRunner) -> list[TokenizedText]:
    """Return texts of random ids, the second half of each with token type 1 if the model knows types."""
    random = np.random.default_rng(0)
    most = runner.shape.vocab_size or 1000
    chunked = [runner.max_rows + 88, 2 * runner.max_rows + 1] if runner.continuing else []
    lengths = [length for length in LENGTHS if length <= runner.max_rows]
    lengths += [length for length in chunked if length <= runner.max_tokens]
    has_types = runner.shape.has_token_types
    return [
        TokenizedText(
            random.integers(min(FIRST_ID, most - 1), most, length),
            (np.arange(length) >= length // 2).astype(np.int64) if has_types else None,
        )
        for length in lengths
    ]


@dataclass(frozen=True)
class FullCall:
    """A call that holds as many texts as fit: their indices, and their vectors in this order."""

    texts: tuple[int, ...]
    vectors: Vectors


def _run_full(runner: EncoderRunner, texts: Sequence[TokenizedText]) -> list[FullCall]:
    """Run one call of each variant that is full of texts: several per sequence, if the model allows it."""
    found = []
    for variant in runner.variants:
        sequences: list[list[int]] = [[] for _ in range(variant.batch)]
        order = np.random.default_rng(variant.batch * variant.rows).permutation(len(texts)).tolist()
        for index in order:
            num_held = sum(map(len, sequences))
            room = [
                line
                for line in sequences
                if sum(len(texts[i]) for i in line) + len(texts[index]) <= variant.rows
                and (runner.shape.is_packable or not line)
            ]
            if room and num_held < variant.texts:
                min(room, key=len).append(index)
        held = tuple(index for line in sequences for index in line)
        vectors = runner.run(variant, [[texts[index] for index in line] for line in sequences])
        found.append(FullCall(held, vectors))
    return found
