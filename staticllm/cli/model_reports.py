"""``staticllm inspect``, ``plan`` and ``verify``: what is known of a model of any kind, before it serves."""

from __future__ import annotations

import json
from typing import Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.options import PROGRAM_GROUP, layout_options, model_argument, read_properties
from staticllm.cli.plan_embed import EMBED_GROUP, embed_options
from staticllm.cli.progress import progress
from staticllm.core import ProgramMode

MODES: dict[str, tuple[ProgramMode, ...]] = {
    "both": ("separate", "shared"),
    "separate": ("separate",),
    "shared": ("shared",),
}


@click.command("inspect", cls=GroupedCommand, groups=PROGRAM_GROUP)
@model_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def inspect(model: str, as_json: bool, **options: Any) -> None:
    """Show states, masks, passes, variants and bytes of MODEL (the demo model without it). Nothing is compiled for the device.

    Of an encoder: its output, masks, positions and pooling, and whether texts can share a sequence.
    """
    with progress("lowering the model"):
        from staticllm.devices import check_known
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

        job = job_in(model, options["device"], read_properties(options), check=check_known)
        report = diagnosis_of(job.kind.name).report(job)
    _print(report, as_json)


@click.command("plan", cls=GroupedCommand, groups={**PROGRAM_GROUP, **EMBED_GROUP})
@embed_options
@model_argument
@click.option("--measured", is_flag=True, help="Load the model and measure where its memory goes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@layout_options
def plan(model: str, measured: bool, as_json: bool, **options: Any) -> None:
    """Estimate the bytes of weights, KV slots and buffers of MODEL, and check whether they fit. Nothing is compiled.

    Exit with code 1 if they do not fit. With --measured, load MODEL in a process of its own instead, run its longest prompt and
    some decode steps, and print the private memory of each part and after each stage. Of an encoder, the milliseconds of each
    call are printed too: those that CACHE_DIR keeps, or measured ones.
    --embed estimates by WINDVE's cost model how many machines embed a load, without and with their CPUs. With --measured, it
    measures how many queries at once MODEL embeds within --limit-s on each of several devices, for example --device NPU,CPU.
    """
    with progress("loading and measuring the model" if measured else "lowering the model"):
        from staticllm.devices import check_device, check_known
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

        check = check_device if measured else check_known
        job = job_in(model, options["device"], read_properties(options), check=check)
        diagnosis = diagnosis_of(job.kind.name)
        estimate = None if measured else diagnosis.estimate(job)
        found = diagnosis.measure(job) if estimate is None else estimate
    _print(found, as_json)
    if estimate is not None and estimate.fits is False:
        raise SystemExit(1)


@click.command("verify")
@model_argument
@click.option("--device", default="CPU", show_default=True, help="OpenVINO device: CPU, NPU, GPU …")
@click.option(
    "--programs",
    type=click.Choice(list(MODES)),
    default="both",
    show_default=True,
    help="One program per variant, or one for all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def verify(ctx: click.Context, model: str, device: str, programs: str, as_json: bool) -> None:
    """Compare MODEL with its original stateful IR on the CPU, in f32: logits of 96 tokens, and greedy answers.

    The chunks are small, and generation exceeds the smaller KV lengths. An encoder runs texts of several lengths, alone and
    packed into the same calls. Exit with code 1 if anything differs.
    """
    verdicts = []
    with progress("comparing with the original") as shown:
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

        job = job_in(model, device, {}, shown)
        for verdict in diagnosis_of(job.kind.name).verdicts(job, MODES[programs]):
            verdicts.append(verdict)
            shown.show("comparing with the original")
            if not as_json:
                shown.write(verdict.line())
    is_ok = all(verdict.is_ok for verdict in verdicts)
    if as_json:
        checks = [verdict.as_dict() for verdict in verdicts]
        click.echo(json.dumps({"model": model, "device": device, "ok": is_ok, "checks": checks}))
    else:
        click.echo("the same as the original" if is_ok else "NOT the same as the original")
    ctx.exit(0 if is_ok else 1)


def _print(report: Any, as_json: bool) -> None:
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(report.lines()))
