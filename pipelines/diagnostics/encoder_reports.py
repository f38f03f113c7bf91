"""Describes a lowered encoder, its programs, and the memory and seconds that they need, for ``inspect`` and ``plan``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from staticllm.compiler_passes.lower_encoder import LoweredEncoder
from staticllm.compiler_passes.pass_pipeline import PassReport
from staticllm.core import EncoderShape, EncoderVariant, Pooling, ProgramMode
from staticllm.devices import check_known, get_core, is_present, kind
from staticllm.pipelines.artifacts.cache import BlobCache, key_of
from staticllm.pipelines.artifacts.measurements import CostsPlace
from staticllm.pipelines.diagnostics.memory import device_memory
from staticllm.pipelines.diagnostics.process_memory import private_bytes
from staticllm.pipelines.diagnostics.settings import label_of
from staticllm.pipelines.embedding.encoder_job import encoder_job
from staticllm.pipelines.embedding.encoder_kind import (
    AnyJob,
    EncoderChoices,
    EncoderJob,
    EncoderKind,
    EncoderPrograms,
    mode_of,
)
from staticllm.pipelines.embedding.encoder_plan import EncoderPlan, default_pooling
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.programs.compile import CompileOptions
from staticllm.pipelines.programs.layout import PROGRAM_BYTES
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

PoolingSource = Literal["the model's graph", "the user", "the model's files", "the default"]
SecondsSource = Literal["measured now", "kept in the cache", "unknown"]


@dataclass(frozen=True)
class EncoderVariantReport:
    """The size of one encoder program: sequences per call, tokens of each, and the most texts of a call.

    ``past``: the earlier tokens that it sees, if it continues a text, else 0.
    """

    batch: int
    rows: int
    texts: int
    past: int


@dataclass(frozen=True)
class EncoderReport:
    """A lowered encoder (``staticllm inspect``).

    ``width``: the numbers per text. ``first_position``: the position of a text's first token; None if the model takes no
    positions. ``pooling`` is None for scores. ``max_length``: the most tokens of a text. ``reasons``: why texts cannot share a
    sequence, empty if they can. ``shares_prefixes``: whether a common beginning of texts is computed once per sequence.
    ``unsafe_rows``: numbers of rows for which no static program is made. ``buffers_bytes``: those of masks, pooling weights, ids
    and vectors.
    """

    model: str
    kind: str
    device: str
    programs: ProgramMode
    settings: str
    weights_bytes: int
    output: str
    width: int
    masks: tuple[str, ...]
    first_position: int | None
    has_token_types: bool
    pooling: Pooling | None
    pooling_source: PoolingSource
    num_dense: int
    is_normalised: bool
    max_length: int
    vocab_size: int | None
    is_packable: bool
    shares_prefixes: bool
    reasons: tuple[str, ...]
    unsafe_rows: tuple[int, ...]
    num_programs: int
    buffers_bytes: int
    passes: tuple[PassReport, ...]
    variants: tuple[EncoderVariantReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm inspect --json`` prints."""
        return asdict(self)


@dataclass(frozen=True)
class VariantSeconds(EncoderVariantReport):
    """The size of one encoder program, and the seconds of a call; None if they are not known."""

    seconds: float | None


@dataclass(frozen=True)
class EncoderEstimate:
    """The memory and the seconds per call of an encoder on a device (``staticllm plan``).

    ``bytes`` has an entry per part, and ``needed`` is their sum; with ``--measured`` the private memory of the process instead.
    ``available`` and ``fits`` are None if the device does not report its memory.
    """

    model: str
    device: str
    is_present: bool
    programs: ProgramMode
    num_programs: int
    bytes: Mapping[str, int]
    needed: int
    available: int | None
    fits: bool | None
    seconds_source: SecondsSource
    variants: tuple[VariantSeconds, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``staticllm plan --json`` prints."""
        return asdict(self)


def inspect_encoder(models_path: str | os.PathLike[str], device: str, choices: EncoderChoices) -> EncoderReport:
    """Lower an encoder and describe its shape, passes, variants and bytes. Nothing is compiled.

    An NPU or GPU need not be on this machine.

    Raises:
        ModelError: a file of the model is missing or damaged, or the model is no encoder.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, and is neither an NPU nor a GPU.
        ConfigError: an option is impossible for this model.
    """
    job = encoder_job(models_path, device, choices, check=check_known)
    return _report(job, job.kind.plan(job))


def _report(job: EncoderJob, plan: EncoderPlan) -> EncoderReport:
    shape, mode = plan.lowered.shape, plan.options.mode
    lowered, (pooling, source) = cast(LoweredEncoder, plan.lowered), _pooling(job, shape)
    return EncoderReport(
        model=str(job.directory),
        kind="encoder",
        device=job.device,
        programs=mode,
        settings=label_of(get_core(), job.device, plan.options.properties["encode"]),
        weights_bytes=job.weights.stat().st_size,
        output=shape.output,
        width=shape.width,
        masks=tuple(mask.label for mask in shape.masks),
        first_position=shape.first_position if shape.has_positions else None,
        has_token_types=shape.has_token_types,
        pooling=pooling,
        pooling_source=source,
        num_dense=len(job.kind.files.dense),
        is_normalised=shape.output == "embeddings" and job.kind.chosen.is_normalised,
        max_length=shape.longest,
        vocab_size=shape.vocab_size,
        is_packable=shape.is_packable,
        shares_prefixes=shape.shares_prefixes,
        reasons=lowered.reasons,
        unsafe_rows=shape.unsafe_rows,
        num_programs=1 if mode == "shared" else len(plan.variants),
        buffers_bytes=encoder_buffer_bytes(shape, plan.variants),
        passes=lowered.reports,
        variants=tuple(EncoderVariantReport(v.batch, v.rows, v.texts, v.past) for v in plan.variants),
    )


def _pooling(job: EncoderJob, shape: EncoderShape) -> tuple[Pooling | None, PoolingSource]:
    """Return how a text's vectors become one, and what decides that; None if they are scores."""
    if shape.output == "scores":
        return None, "the model's graph"
    if shape.pooling is not None:
        return shape.pooling, "the model's graph"
    chosen, named = job.kind.chosen.pooling, job.kind.files.pooling
    if chosen is not None:
        return chosen, "the user"
    if named is not None:
        return named, "the model's files"
    return default_pooling(shape), "the default"


def encoder_buffer_bytes(shape: EncoderShape, variants: Iterable[EncoderVariant]) -> int:
    """Return the bytes of the host's memory behind the ports of all variants, with keys and values of one long text."""
    variants = list(variants)
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


def estimate_encoder(models_path: str | os.PathLike[str], device: str, choices: EncoderChoices) -> EncoderEstimate:
    """Estimate the bytes of an encoder's weights, programs and buffers on ``device``. Nothing is compiled.

    The seconds per call are those that a cache keeps of an earlier start, if ``CACHE_DIR`` is given and has them.

    Raises:
        As ``inspect_encoder``.
    """
    job = encoder_job(models_path, device, choices, check=check_known)
    plan = job.kind.plan(job)
    report = _report(job, plan)
    copies = report.num_programs if kind(job.device) == "CPU" else 1  # the CPU packs the weights for each program
    parts = {
        "weights": report.weights_bytes * copies,
        "programs": PROGRAM_BYTES * report.num_programs,
        "buffers": report.buffers_bytes,
    }
    known = _kept_seconds(job)
    return _estimate(report, parts, plan.variants, known, "kept in the cache" if known else "unknown")


def measure_encoder(models_path: str | os.PathLike[str], device: str, choices: EncoderChoices) -> EncoderEstimate:
    """Load an encoder in this process, run each of its programs, and measure its private memory and the seconds per call.

    Raises:
        As ``load_encoder``.
    """
    job = encoder_job(models_path, device, choices)
    report = _report(job, job.kind.plan(job))
    noting = _NotingKind(job.kind.chosen, job.kind.files, job.kind.max_length)
    before = private_bytes()
    runner = load_job(replace(job, kind=noting)).runner
    after, (loaded,) = private_bytes(), noting.noted
    parts = {"programs, with weights": loaded - before, "buffers, first calls": after - loaded}
    return _estimate(report, parts, runner.variants, runner.measured_costs, "measured now")


@dataclass(frozen=True)
class _NotingKind(EncoderKind):
    """An encoder's kind that notes the private memory of the process when the programs are there, and nothing has run."""

    noted: list[int] = field(default_factory=list, compare=False)

    def runner(
        self, job: AnyJob, programs: EncoderPrograms, memory: object, planned: Sequence[EncoderVariant] = ()
    ) -> EncoderRunner:
        """Bind the programs and run them."""
        self.noted.append(private_bytes())
        return super().runner(job, programs, memory, planned)


def _estimate(
    report: EncoderReport,
    parts: Mapping[str, int],
    variants: Iterable[EncoderVariant],
    seconds: Mapping[EncoderVariant, float],
    source: SecondsSource,
) -> EncoderEstimate:
    needed, available = sum(parts.values()), device_memory(get_core(), report.device)
    return EncoderEstimate(
        model=report.model,
        device=report.device,
        is_present=is_present(get_core(), report.device),
        programs=report.programs,
        num_programs=report.num_programs,
        bytes=dict(parts),
        needed=needed,
        available=available,
        fits=None if available is None else needed <= available,
        seconds_source=source,
        variants=tuple(VariantSeconds(v.batch, v.rows, v.texts, v.past, seconds.get(v)) for v in variants),
    )


def _kept_seconds(job: EncoderJob) -> dict[EncoderVariant, float]:
    """Return the seconds per call that the job's cache keeps; none without a cache, or for a device that is not here."""
    folder = job.config.cache_dir
    if folder is None or not Path(folder).is_dir() or not is_present(get_core(), job.device):
        return {}
    fingerprint = job.kind.fingerprint(job)
    options = CompileOptions(job.device, mode_of(job), None, job.kind.properties(job))
    place = CostsPlace(BlobCache(folder).path(key_of(fingerprint)), fingerprint, job.key)
    return place.costs_of(EncoderVariant, options).read()
