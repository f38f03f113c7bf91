"""``staticllm inspect``: what a model is and what would become of it, before minutes of compiling."""

from __future__ import annotations

import json
from typing import Any

import click

from staticllm.cli.options import layout_options, read_config


@click.command("inspect")
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def command(model: str, as_json: bool, **options: Any) -> None:
    """Show states, masks, passes, variants and bytes of MODEL. Nothing is compiled for the device."""
    from staticllm.pipelines.inspection import inspect_model

    report = inspect_model(model, options["device"], read_config(options))
    click.echo(json.dumps(report, indent=2) if as_json else _text(report))


def _text(report: dict[str, Any]) -> str:
    layers, rows = report["layers"], report["rows"]
    lines = [
        f"model     {report['model']}",
        f"weights   {_mib(report['weights_bytes'])}",
        f"states    {report['num_states']} in {len(layers)} layers, vocabulary {report['vocab_size']}",
        f"rows      {rows['type']}, {rows['bytes_a_token']} bytes a token, {_mib(rows['bytes'])} for {rows['capacity']} rows",
        f"buffers   {_mib(report['buffers_bytes'])} for masks, logits and new rows",
        f"programs  {report['programs']} on {report['device']}",
        "variants  " + ", ".join(f"{v['rows']}x{v['capacity']}" for v in report["variants"]),
        "",
        "layer  query heads  kv heads  head size  mask",
        *(
            f"{layer['layer']:>5}  {layer['query_heads']:>11}  {layer['kv_heads']:>8}  {layer['head_dim']:>9}  {layer['mask']}"
            for layer in layers
        ),
        "",
        "pass            nodes          what it did",
    ]
    for entry in report["passes"]:
        first, *more = entry["notes"] or [""]
        lines.append(f"{entry['name']:<14}  {entry['nodes_before']:>5} → {entry['nodes_after']:<5}  {first}")
        lines.extend(" " * 31 + note for note in more)
    return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
