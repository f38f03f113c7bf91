"""``staticllm plan`` estimates the memory that a model would need, and whether it fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import layout_options, model_argument, read_config
from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.reports import MemoryEstimate


@click.command("plan", short_help="Estimate memory and check whether it fits.")
@model_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def command(model: str, as_json: bool, **options: Any) -> None:
    """Estimate the bytes of weights, KV slots and buffers of MODEL, and check whether they fit. Nothing is compiled.

    Exit with code 1 if they do not fit.
    """
    with progress("lowering the model"):
        from staticllm.pipelines.diagnostics.memory import estimate_memory

        found = estimate_memory(model, options["device"], read_config(options, needs_device=False))
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else _text(found))
    if found.fits is False:
        raise SystemExit(1)


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
