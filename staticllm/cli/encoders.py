"""What ``inspect``, ``verify``, ``plan`` and ``compile`` do with encoders, which have other options and reports than decoders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import read_properties
from staticllm.cli.progress import Progress, progress
from staticllm.core import OnProgress
from staticllm.errors import ConfigError

if TYPE_CHECKING:
    from staticllm.core import ProgramMode
    from staticllm.pipelines.artifacts.manifest import Manifest
    from staticllm.pipelines.diagnostics.encoder_reports import EncoderEstimate, EncoderReport, EncoderVariantReport
    from staticllm.pipelines.diagnostics.reports import Verdict
    from staticllm.pipelines.embedding.encoder_kind import EncoderChoices

OWN = {"max_length", "normalize"}
"""Options of an encoder that ``-p`` sets beside properties; they are written in any case."""


def is_encoder(model: str, options: dict[str, Any] | None = None) -> bool:
    """Return whether a model is an encoder by its graph, or a decoder whose files say how to embed.

    ``options``: the layout options, which may name its weights file.

    Raises:
        ModelError: a file of the model is missing or damaged.
    """
    from staticllm.compiler_passes.model_kind import is_lowered_as, kind_in
    from staticllm.model_dir import check_model_dir
    from staticllm.pipelines.embedding.encoder_files import read_encoder_files

    weights = dict((options or {}).get("properties", ())).get("WEIGHTS_PATH")
    directory = check_model_dir(model, False, weights)
    return is_lowered_as(kind_in(directory, weights), "encoder", read_encoder_files(directory).pooling is not None)


def read_choices(options: dict[str, Any]) -> EncoderChoices:
    """Return the choices of the layout options for an encoder.

    Raises:
        ConfigError: ``max_length`` or ``normalize`` has an impossible value.
    """
    from staticllm.pipelines.embedding.encoder_kind import EncoderChoices

    given = read_properties(options)
    own = {name.lower(): given.pop(name) for name in list(given) if name.lower() in OWN}
    length, is_normalised = own.get("max_length"), own.get("normalize", True)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ConfigError(f"max_length={length!r}: must be a whole number from 1")
    if not isinstance(is_normalised, bool):
        raise ConfigError(f"normalize={is_normalised!r}: must be yes or no")
    return EncoderChoices(max_length=length, is_normalised=is_normalised, properties=given)


def inspect(model: str, as_json: bool, options: dict[str, Any]) -> None:
    """Print the report of an encoder."""
    with progress("lowering the model"):
        from staticllm.pipelines.diagnostics.encoder_reports import inspect_encoder

        report = inspect_encoder(model, options["device"], read_choices(options))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else _report_text(report))


def plan(model: str, measured: bool, as_json: bool, options: dict[str, Any]) -> bool:
    """Print the memory and the seconds per call of an encoder. Return False if it does not fit."""
    with progress("loading and measuring the model" if measured else "lowering the model"):
        from staticllm.pipelines.diagnostics.encoder_reports import estimate_encoder, measure_encoder

        found = (measure_encoder if measured else estimate_encoder)(model, options["device"], read_choices(options))
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else _plan_text(found, measured))
    return measured or found.fits is not False


def verify(model: str, device: str, modes: tuple[ProgramMode, ...], shown: Progress) -> Iterator[Verdict]:
    """Yield the verdicts of an encoder."""
    from staticllm.pipelines.diagnostics.encoder_verify import verify_encoder

    yield from verify_encoder(model, device, modes, on_progress=shown)


def compile_set(
    model: str, target: str, is_verified: bool, options: dict[str, Any], steps: OnProgress, shown: Progress
) -> Manifest:
    """Compile an encoder, write its blob set, and compare it with the original if that is asked for."""
    from staticllm.pipelines.embedding.encoder_job import encoder_job
    from staticllm.pipelines.loading.export import export_set

    if options.get("adapters"):
        raise ConfigError("--adapter changes decoders, this model is an encoder: leave it out")
    manifest = export_set(encoder_job(model, options["device"], read_choices(options), steps), Path(target))
    if not is_verified:
        return manifest
    from staticllm.pipelines.diagnostics.encoder_verify import verify_encoder_set

    shown.show("comparing with the CPU")
    return verify_encoder_set(model, options["device"], Path(target))


def verification_text(found: dict[str, Any]) -> str:
    """Return what ``compile --verify`` found about an encoder."""
    return f"{found['places']} texts, cosine {found['agreement']:.6f}, numbers differ by {found['distance']:.1e} of their range"


def _packable(report: EncoderReport) -> str:
    if not report.is_packable:
        return "no, one text per sequence: " + "; ".join(report.reasons)
    return "yes, and a common beginning of texts runs once per sequence" if report.shares_prefixes else "yes"


def _report_text(report: EncoderReport) -> str:
    first = report.first_position
    lines = [
        f"model     {report.model}",
        f"kind      encoder: {report.output}, {report.width} numbers per text",
        f"weights   {_mib(report.weights_bytes)}",
        f"texts     up to {report.max_length} tokens"
        + (f", {report.vocab_size} token ids" if report.vocab_size else ""),
        f"masks     {', '.join(report.masks)}",
        f"positions {'none' if first is None else f'from {first}'}"
        + (", token types" if report.has_token_types else ""),
        *_pooling(report),
        f"packable  {_packable(report)}",
        *([f"unsafe    no static program of {_numbers(report.unsafe_rows)} rows"] if report.unsafe_rows else []),
        f"buffers   {_mib(report.buffers_bytes)} for masks, pooling and vectors",
        f"programs  {report.num_programs} {report.programs} on {report.device}, {report.settings}",
        "variants  " + ", ".join(map(_size, report.variants)) + f" (sequences x tokens{_of_chunks(report)})",
        "",
        "pass                       nodes          what it did",
    ]
    for entry in report.passes:
        note, *more = entry.notes or ("",)
        lines.append(f"{entry.name:<25}  {entry.nodes_before:>5} → {entry.nodes_after:<5}  {note}")
        lines.extend(" " * 42 + each for each in more)
    return "\n".join(lines)


def _pooling(report: EncoderReport) -> list[str]:
    if report.pooling is None:
        return []
    dense = f", {report.num_dense} Dense modules" if report.num_dense else ""
    normalised = ", normalised" if report.is_normalised else ""
    return [f"pooling   {report.pooling} (from {report.pooling_source}){dense}{normalised}"]


def _plan_text(found: EncoderEstimate, measured: bool) -> str:
    lines = [f"{found.num_programs} {found.programs} programs for {len(found.variants)} variants on {found.device}"]
    lines += [f"  {name:<22} {_wide_mib(count)}" for name, count in found.bytes.items()]
    lines.append(f"  {'together':<22} {_wide_mib(found.needed)}")
    if found.available is None:
        lines.append(
            f"{found.device} does not report its memory"
            if found.is_present
            else f"there is no {found.device} on this machine, so its memory is unknown"
        )
    elif not measured:
        lines.append(f"  {'available':<22} {_wide_mib(found.available)}")
        lines.append("it fits" if found.fits else "it does not fit: choose another device, or weights of fewer bits")
    lines.append(f"time per call: {found.seconds_source}" + (REMEDY if found.seconds_source == "unknown" else ""))
    for v in found.variants:
        if v.seconds is not None:
            each = f"{v.seconds * 1e3:9.2f} ms  {v.batch * v.rows / v.seconds:9.0f} tokens/s"
            lines.append(f"  {_size(v):<22} {each}")
    return "\n".join(lines)


def _size(variant: EncoderVariantReport) -> str:
    return f"{variant.batch}x{variant.rows}" + (f"+{variant.past}" if variant.past else "")


def _of_chunks(report: EncoderReport) -> str:
    return " + earlier tokens, for texts that run in chunks" if any(v.past for v in report.variants) else ""


REMEDY = "; --measured measures it, -p CACHE_DIR=… reads it from a cache"


def _numbers(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _wide_mib(count: int) -> str:
    return f"{count / 2**20:10.1f} MiB"
