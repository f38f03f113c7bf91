"""``staticllm plan`` estimates the memory that a model would need, and whether it fits; ``--measured`` measures it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli import encoders
from staticllm.cli.embedding.plan_embed import EMBED_GROUP, embed_options
from staticllm.cli.options import PROGRAM_GROUP, layout_options, model_argument, read_config
from staticllm.cli.progress import progress
from staticllm.cli.usage.grouped_command import GroupedCommand

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.memory_parts import MeasuredMemory
    from staticllm.pipelines.diagnostics.reports import MemoryEstimate


@click.command("plan", cls=GroupedCommand, groups={**PROGRAM_GROUP, **EMBED_GROUP})
@embed_options
@model_argument
@click.option("--measured", is_flag=True, help="Load the model and measure where its memory goes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def command(model: str, measured: bool, as_json: bool, **options: Any) -> None:
    """Estimate the bytes of weights, KV slots and buffers of MODEL, and check whether they fit. Nothing is compiled.

    Exit with code 1 if they do not fit. With --measured, load MODEL in a process of its own instead, run its longest prompt and
    some decode steps, and print the private memory of each part and after each stage. Of an encoder, the milliseconds of each
    call are printed too: those that CACHE_DIR keeps, or measured ones.
    --embed estimates by WINDVE's cost model how many machines embed a load, without and with their CPUs. With --measured, it
    measures how many queries at once MODEL embeds within --limit-s on each of several devices, for example --device NPU,CPU.
    """
    if encoders.is_encoder(model, options):
        if not encoders.plan(model, measured, as_json, options):
            raise SystemExit(1)
        return
    if measured:
        _measure(model, as_json, options)
        return
    with progress("lowering the model"):
        from staticllm.pipelines.diagnostics.memory import estimate_memory

        found = estimate_memory(model, options["device"], read_config(options, needs_device=False))
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else _text(found))
    if found.fits is False:
        raise SystemExit(1)


def _measure(model: str, as_json: bool, options: dict[str, Any]) -> None:
    with progress("loading and measuring the model"):
        from staticllm.pipelines.diagnostics.measured_memory import measure_memory

        found = measure_memory(model, options["device"], read_config(options))
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else _measured_text(found))


def _measured_text(found: MeasuredMemory) -> str:
    width = max(map(len, (*found.bytes, *(stage.name for stage in found.stages))))
    lines = [f"private memory after each stage on {found.device}"]
    lines += [f"  {stage.name:<{width}} {_mib(stage.private)}" for stage in found.stages]
    lines.append("where it goes at the end")
    lines += [f"  {name:<{width}} {_mib(count)}" for name, count in found.bytes.items()]
    lines.append(f"  {'together':<{width}} {_mib(found.private)}")
    return "\n".join([*lines, *([found.unknown] if found.unknown else [])])


def _text(found: MemoryEstimate) -> str:
    programs = found.programs
    lines = [f"{programs.count} {programs.mode} programs for {len(found.variants)} variants on {found.device}"]
    lines += [f"  {name:<22} {_mib(count)}" for name, count in found.bytes.items()]
    lines.append(f"  {'together':<22} {_mib(found.needed)}")
    if found.available is None:
        lines.append(
            f"{found.device} does not report its memory"
            if found.is_present
            else f"there is no {found.device} on this machine, so its memory is unknown"
        )
        return "\n".join(lines)
    lines.append(f"  {'available':<22} {_mib(found.available)}")
    remedy = (
        "it fits"
        if found.fits
        else "it does not fit: lower MAX_PROMPT_LEN, KV_SLOTS or HOST_KV_SLOTS, or choose a smaller KV_CACHE_PRECISION"
    )
    return "\n".join([*lines, remedy])


def _mib(count: int) -> str:
    return f"{count / 2**20:10.1f} MiB"
