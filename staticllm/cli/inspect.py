"""``staticllm inspect`` shows how a model would be lowered and compiled, without compiling it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli import encoders
from staticllm.cli.options import PROGRAM_GROUP, layout_options, model_argument, read_config
from staticllm.cli.progress import progress
from staticllm.cli.usage.grouped_command import GroupedCommand

if TYPE_CHECKING:
    from staticllm.core import Part
    from staticllm.pipelines.diagnostics.reports import ModelReport, VariantReport


@click.command("inspect", cls=GroupedCommand, groups=PROGRAM_GROUP)
@model_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def command(model: str, as_json: bool, **options: Any) -> None:
    """Show states, masks, passes, variants and bytes of MODEL (the demo model without it). Nothing is compiled for the device.

    Of an encoder: its output, masks, positions and pooling, and whether texts can share a sequence.
    """
    if encoders.is_encoder(model, options):
        encoders.inspect(model, as_json, options)
        return
    with progress("lowering the model"):
        from staticllm.pipelines.diagnostics.inspect import inspect_model

        report = inspect_model(model, options["device"], read_config(options, needs_device=False))
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else _text(report))


def _text(report: ModelReport) -> str:
    layers, kv = report.layers, report.kv
    lines = [
        f"model     {report.model}",
        f"weights   {_mib(report.weights_bytes)}",
        f"states    {report.num_states} in {len(layers)} layers, vocabulary {report.vocab_size}",
        f"KV slots  {kv.type}, {kv.bytes_a_token} bytes per token, {_mib(kv.bytes)} for {kv.num_slots} slots",
        *_recurrent(report),
        f"buffers   {_mib(report.buffers_bytes)} for masks, logits and new rows",
        f"programs  {report.programs} on {report.device}",
        *_settings(report.settings),
        f"serves    {report.max_num_seqs} requests at once; at most {_mib(kv.host_bytes)} more in the host pool",
        *_variants(report.variants),
        "",
        "layer  query heads  kv heads  head size  mask",
        *(
            f"{layer.layer:>5}  {layer.query_heads:>11}  {layer.kv_heads:>8}  {layer.head_dim:>9}  {layer.mask}"
            for layer in layers
        ),
        "",
        "pass                 nodes          what it did",
    ]
    for entry in report.passes:
        first, *more = entry.notes or ("",)
        lines.append(f"{entry.name:<19}  {entry.nodes_before:>5} → {entry.nodes_after:<5}  {first}")
        lines.extend(" " * 36 + note for note in more)
    return "\n".join(lines)


def _recurrent(report: ModelReport) -> list[str]:
    states = report.recurrent
    if not states.num_states:
        return (
            []
            if report.is_packable
            else ["calls     one sequence each, because its positions affect all rows of a call"]
        )
    size = f"{states.bytes_a_sequence / 1024:.1f} KiB per sequence"
    return [f"recurrent {states.num_states} states, {size}; one sequence per call, no idle rows"]


def _variants(variants: Sequence[VariantReport]) -> list[str]:
    """Return one line for all sizes with the same KV lengths: the rows, and "x sequences" if several share them."""
    kv_lens: dict[str, list[int]] = {}
    for v in variants:
        size = f"{v.rows}x{v.sequences}" if v.sequences > 1 else str(v.rows)
        kv_lens.setdefault(size, []).append(v.kv_len)
    sizes: dict[str, list[str]] = {}
    for size, buckets in kv_lens.items():
        sizes.setdefault(", ".join(map(str, sorted(buckets))), []).append(size)
    return [f"variants  rows {', '.join(names)}: KV length {buckets}" for buckets, names in sizes.items()]


def _settings(settings: Mapping[Part, str]) -> list[str]:
    """Return one line for each setting, with the parts of the work that have it."""
    parts: dict[str, list[str]] = {}
    for part, setting in settings.items():
        parts.setdefault(setting, []).append(part)
    return [f"settings  {setting} ({', '.join(names)})" for setting, names in parts.items()]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
