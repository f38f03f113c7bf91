"""Keeps the programs of an encoder as a blob set: at ``BLOB_PATH``, or in the cache at ``CACHE_DIR``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.errors import BlobError, StaticLLMError, last_line
from staticllm.pipelines.blobs.blob_set import (
    ImportTarget,
    check_kind,
    json_properties,
    read_steadily,
)
from staticllm.pipelines.blobs.encoder_fields import encoder_shape_from_json, encoder_shape_to_json
from staticllm.pipelines.blobs.fingerprint import EncoderFingerprint
from staticllm.pipelines.blobs.manifest import ENCODE, Manifest, VariantFile
from staticllm.pipelines.blobs.measurements import CostsPlace, KeptCosts
from staticllm.pipelines.embedding.encoder_job import EncoderJob
from staticllm.pipelines.embedding.encoder_programs import EncoderPrograms, compile_encoder, plan_encoder
from staticllm.pipelines.embedding.packing.continued_text import ChunkBuffers, ContinuedText
from staticllm.pipelines.embedding.packing.encoder_buffers import EncoderBuffers
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.model_loader.blob_export import (
    ExportedBlobs,
    check_new,
    export_each,
    is_weightless_wanted,
    write_blobs,
)
from staticllm.pipelines.model_loader.cached import CachePlace, open_cache
from staticllm.pipelines.model_loader.exported import export_target
from staticllm.pipelines.model_loader.imported import import_each, read_checked
from staticllm.pipelines.model_loader.loaded import Origin
from staticllm.ports import (
    EMBEDDINGS,
    SCORES,
    encoder_input_names,
    encoder_shape_of,
    past_names,
    present_names,
)

FEW_IDS = 50
"""Token ids below this are used to compare a blob with its program, if the model has that many."""
MOST_PAST = 512
"""The most past rows that are not empty in such a comparison."""


@dataclass(frozen=True)
class EncoderSet:
    """Programs that can run, where they came from, and the place of their measured costs, if these are kept."""

    programs: EncoderPrograms
    origin: Origin
    kept: KeptCosts[EncoderVariant] | None = None


def programs_of(job: EncoderJob) -> EncoderSet:
    """Import the job's programs from ``BLOB_PATH`` or ``CACHE_DIR``, or compile them, and write a set if one is wanted.

    Raises:
        ModelError: a file of the model is missing or damaged, or the model is no encoder.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device refused a program.
        ConfigError: an option is impossible for this model, or a folder cannot be written.
        BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else, or exported blobs failed verification.
    """
    config = job.load.config
    if config.export_blob:
        target = export_target(job.load)
        programs, manifest = _exported(job, target)
        return EncoderSet(programs, "compiled", _kept(job, target, manifest))
    if config.blob_path:
        folder = Path(config.blob_path)
        return read_steadily(folder, lambda manifest: _from_path(job, folder, manifest), job.load.key)
    return _through_cache(job, config.cache_dir) if config.cache_dir else _compiled(job)


def export_encoder(job: EncoderJob, target: Path) -> Manifest:
    """Compile an encoder, write a blob set to ``target``, a new folder, and return its manifest.

    Raises:
        As ``programs_of``; ``ConfigError`` also if ``target`` exists.
    """
    check_new(target)
    return _exported(job, target)[1]


def _compiled(job: EncoderJob) -> EncoderSet:
    return EncoderSet(compile_encoder(job, plan_encoder(job)), "compiled")


def _exported(job: EncoderJob, target: Path) -> tuple[EncoderPrograms, Manifest]:
    programs, stored = _compile_for_export(job)
    manifest = _manifest_of(job, programs, stored, job.fingerprint())
    return programs, write_blobs(job.load, target, manifest, stored.blobs)


def _compile_for_export(job: EncoderJob) -> tuple[EncoderPrograms, ExportedBlobs[EncoderVariant]]:
    """Compile and export: weightless blobs if they are wanted and compute the same, else whole blobs."""
    if is_weightless_wanted(job.load):
        programs, stored = _export(job, {"CACHE_MODE": "OPTIMIZE_SIZE"}, is_weightless=True)
        if stored.blobs is not None:
            return programs, stored
    return _export(job, {}, is_weightless=False)


def _export(
    job: EncoderJob, extra: Mapping[str, object], is_weightless: bool
) -> tuple[EncoderPrograms, ExportedBlobs[EncoderVariant]]:
    programs = compile_encoder(job, plan_encoder(job, for_blobs=True), extra)
    num_ids = min(FEW_IDS, programs.vocab_size or FEW_IDS)
    stored = export_each(
        job.load,
        programs.compiled,
        lambda variant: {**job.properties, **extra},
        lambda variant: random_texts(programs.shape, variant, num_ids),
        is_weightless,
    )
    return programs, stored


def random_texts(shape: EncoderShape, variant: EncoderVariant, num_ids: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a call that is full of random tokens, by port name: several texts per sequence if that is allowed.

    The values are the same in every process.
    """
    random = np.random.default_rng(0)
    if variant.past:
        return _random_chunk(shape, variant, num_ids)
    per_sequence = min(variant.texts // variant.batch, 2, variant.rows) if shape.is_packable else 1
    cuts = np.linspace(0, variant.rows, max(per_sequence, 1) + 1).astype(int)
    sequences = [
        [TokenizedText(random.integers(0, num_ids, end - start)) for start, end in pairwise(cuts)]
        for _ in range(variant.batch)
    ]
    buffers = EncoderBuffers(shape, variant, 0)
    buffers.fill(sequences, shape.pooling or "mean")
    return _inputs(shape, buffers)


def _random_chunk(shape: EncoderShape, variant: EncoderVariant, num_ids: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a call that continues a random text after random keys and values."""
    random, num_done = np.random.default_rng(0), min(variant.past, MOST_PAST)
    chunk = ContinuedText(shape, TokenizedText(random.integers(0, num_ids, num_done + variant.rows)))
    chunk.reserve(variant.past)
    chunk.num_done = num_done
    for rows in chunk.past:
        rows[:, :, :num_done] = random.standard_normal((*rows.shape[:2], num_done, rows.shape[3]), np.float32)
    buffers = ChunkBuffers(shape, variant, 0, [np.zeros(0, np.float32)] * len(shape.past))
    buffers.fill_chunk(chunk, variant.rows, "last")
    return {**_inputs(shape, buffers), **dict(zip(past_names(shape), chunk.past, strict=True))}


def _inputs(shape: EncoderShape, buffers: EncoderBuffers) -> dict[str, NDArray[Any]]:
    return {name: array for name, array in buffers.arrays.items() if name in encoder_input_names(shape)}


def _manifest_of(
    job: EncoderJob,
    programs: EncoderPrograms,
    stored: ExportedBlobs[EncoderVariant],
    fingerprint: EncoderFingerprint,
) -> Manifest:
    sizes = job.choices.sizes
    return Manifest(
        fingerprint=fingerprint,
        config={
            "max_length": job.max_length,
            "sizes": None if sizes is None else [list(size) for size in sizes],
            "longest": programs.longest,
            "vocab_size": programs.vocab_size,
        },
        programs=job.mode,
        kv_type="",
        shape=encoder_shape_to_json(programs.shape),
        properties={ENCODE: json_properties(job.properties)},
        variants=tuple(VariantFile(variant, name) for variant, name in stored.files.items()),
        blobs={},
        is_weightless=stored.is_weightless,
        is_encrypted=False,
    )


def _from_path(job: EncoderJob, folder: Path, manifest: Manifest) -> EncoderSet:
    check_kind(folder, manifest, "encoder")
    decided = job.decided_by(manifest.config)
    return _import_set(decided, folder, manifest, "blob")


def _import_set(
    job: EncoderJob, folder: Path, manifest: Manifest, origin: Origin, fingerprint: EncoderFingerprint | None = None
) -> EncoderSet:
    """Import every program of a set. ``fingerprint``: the job's; it is computed here if it is None.

    Raises:
        BlobError: the set is damaged, or was made for something else.
    """
    load = job.load
    blobs = read_checked(load, folder, manifest, lambda: fingerprint or job.fingerprint())
    extra = {"CACHE_MODE": "OPTIMIZE_SIZE"} if manifest.is_weightless else {}
    target = ImportTarget(load.device, {**job.properties, **extra}, load.weights if manifest.is_weightless else None)
    compiled = import_each(load, manifest.files_of(EncoderVariant), blobs, lambda variant: target)
    shape, longest = encoder_shape_from_json(manifest.shape), int(manifest.config["longest"])
    try:
        _check_ports(shape, compiled, longest)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, StaticLLMError):
            raise
        raise BlobError(f"the blobs in {str(folder)!r} do not match their manifest: {last_line(error)}") from error
    kept = _kept(job, folder, manifest)
    vocab_size = manifest.config["vocab_size"]
    return EncoderSet(EncoderPrograms(shape, compiled, longest, vocab_size, kept.read()), origin, kept)


def _check_ports(shape: EncoderShape, compiled: Mapping[EncoderVariant, ov.CompiledModel], longest: int) -> None:
    """Check the sizes of imported programs, before any memory is allocated for them.

    Raises:
        ValueError: a program cannot run its variant, or no variant holds the longest text.
        KeyError: a program has a port that an encoder does not have.
    """
    if longest > max(variant.past + variant.rows for variant in compiled):
        raise ValueError(f"no program holds texts of {longest} tokens")
    if not any(not variant.past for variant in compiled) or any(v.past for v in compiled) != bool(shape.past):
        raise ValueError("the programs are not those of a model of this shape")
    known = encoder_input_names(shape) | {EMBEDDINGS if shape.output == "embeddings" else SCORES}
    known |= {*present_names(shape)}
    for variant, program in compiled.items():
        found = {name for port in (*program.inputs, *program.outputs) for name in port.get_names()}
        if variant.past and not {*past_names(shape), *present_names(shape)} <= found:
            raise KeyError(f"{variant} lacks ports of keys and values")
        for port in (*program.inputs, *program.outputs):
            names = sorted(port.get_names() & known)
            if not names:
                raise KeyError(f"the port {port.get_any_name()!r} is unknown")
            expected = ov.PartialShape(list(encoder_shape_of(names[0], shape, variant)))
            if not port.get_partial_shape().compatible(expected):
                raise ValueError(f"{names[0]!r} has the shape {port.get_partial_shape()}, {variant} needs {expected}")


def _kept(job: EncoderJob, folder: Path, manifest: Manifest) -> KeptCosts[EncoderVariant]:
    return kept_costs(job, CostsPlace(folder, manifest.fingerprint, job.load.key))


def kept_costs(job: EncoderJob, place: CostsPlace) -> KeptCosts[EncoderVariant]:
    """Return the costs that are kept at the place of the job's set."""
    return place.kept(EncoderVariant, {"layout": job.mode, "properties": json_properties(job.properties)})


def _through_cache(job: EncoderJob, folder: str) -> EncoderSet:
    """Import the job's set from the cache; compile it and write it there if the cache has none that can be read."""
    fingerprint = job.fingerprint()
    place = CachePlace(job.load, open_cache(job.load, folder), fingerprint)
    lease = place.lease()

    def import_it(manifest: Manifest) -> EncoderSet:
        return _import_set(job, place.path, manifest, "cache", fingerprint)

    if isinstance(lease, str):
        return place.read_only(lease, import_it) or _compiled(job)
    try:
        found = place.read(import_it, lambda: _compiled(job))
        if found is None:
            programs, stored = _compile_for_export(job)
            manifest = _manifest_of(job, programs, stored, fingerprint)
            place.keep(manifest, stored.blobs)
            found = EncoderSet(programs, "compiled", _kept(job, place.path, manifest))
    finally:
        lease.release()
    place.cache.prune(keep=place.key)
    return found
