"""``staticllm inspect``, ``plan``, ``verify`` and ``doctor``: what is known of a model of any kind, and of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.model_arguments import one_model
from staticllm.cli.options import (
    DEVICE_HELP,
    PROGRAM_GROUP,
    flag,
    layout_options,
    model_argument,
    read_properties,
    value,
)
from staticllm.cli.plan_embed import EMBED_GROUP, embed_options
from staticllm.cli.progress import Progress, progress
from staticllm.core import ProgramMode

MODES: dict[str, tuple[ProgramMode, ...]] = {
    "both": ("separate", "shared"),
    "separate": ("separate",),
    "shared": ("shared",),
}
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("inspect", cls=GroupedCommand, groups=PROGRAM_GROUP)
@model_argument
@flag("--json as_json", "Print one JSON object.")
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
@flag("--measured", "Load the model and measure where its memory goes.")
@flag("--json as_json", "Print one JSON object.")
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
@value("--device", None, DEVICE_HELP, "CPU")
@value("--programs", click.Choice(list(MODES)), "One program per variant, or one for all.", "both")
@value("--precision", click.Choice(["f32", "f16"]), "What is computed in: f32 on the CPU, or f16 as on an NPU.", "f32")
@flag("--json as_json", "Print one JSON object.")
@click.pass_context
def verify(ctx: click.Context, model: str, device: str, programs: str, precision: str, as_json: bool) -> None:
    """Compare MODEL with its original stateful IR on the CPU, in f32: logits of 96 tokens, and greedy answers.

    The chunks are small, and generation exceeds the smaller KV lengths. An encoder runs texts of several lengths, alone and
    packed into the same calls. Exit with code 1 if anything differs.

    With --precision f16, print how far a decoder's probabilities in f16 diverge from those in f32 (KL), over texts that it writes
    itself: on --device if it computes f16, else emulated on the CPU with the programs of that device, which need not be here.
    """
    verdicts: list[Any] = []
    with progress("comparing with the original") as shown:
        for verdict in _verdicts(model, device, programs, precision, shown):
            verdicts.append(verdict)
            shown.show("comparing with the original")
            if not as_json:
                shown.write(verdict.line())
    is_ok = all(verdict.is_ok for verdict in verdicts)
    if as_json:
        checks = [verdict.as_dict() for verdict in verdicts]
        click.echo(json.dumps({"model": model, "device": device, "ok": is_ok, "checks": checks}))
    else:
        same = "as good as the original" if precision == "f16" else "the same as the original"
        click.echo(same if is_ok else f"NOT {same}")
    ctx.exit(0 if is_ok else 1)


def _verdicts(model: str, device: str, programs: str, precision: str, shown: Progress) -> Iterator[Any]:
    """Yield what is found, one comparison after another."""
    from staticllm.devices import check_device, check_known
    from staticllm.pipelines.diagnostics.kinds import diagnosis_of, job_in

    if precision == "f16":
        from staticllm.pipelines.diagnostics.half_divergence import measure_f16

        yield from measure_f16(job_in(model, device, {}, shown, check_known))
        return
    job = job_in(model, device, {}, shown, check_device)
    yield from diagnosis_of(job.kind.name).verdicts(job, MODES[programs])


def _print(report: Any, as_json: bool) -> None:
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else "\n".join(report.lines()))


@click.command("doctor")
@value("--device devices", None, "Devices for the self-test.  [all]", multiple=True)
@click.argument("model", type=click.Path(), required=False)
@value("-m --model named", click.Path(), "The same as MODEL.")
@value("--cache-dir", click.Path(), "A cache folder whose sets are verified.")
@flag("--json as_json", "Print JSON.")
def doctor(
    devices: tuple[str, ...], model: str | None, named: str | None, cache_dir: str | None, as_json: bool
) -> None:
    """Check packages, devices, memory and a cache, load MODEL, and run the embedded model. Exit with code 1 if a check fails.

    MODEL is compiled with short lengths and runs a chat turn, a text or pairs, on the first --device, else on the CPU. With
    --cache-dir, its weights are compared with those that the sets in the cache were compiled from.
    """
    model = one_model(model, named)
    findings = []
    with progress("examining") as shown:
        from staticllm.pipelines.diagnostics.doctor import examine

        for finding in examine(devices, cache_dir, model, shown):
            findings.append(finding)
            if not as_json:
                mark, colour = MARKS[finding.level]
                remedy = f"\n      {finding.remedy}" if finding.remedy else ""
                shown.write(f"{click.style(mark, fg=colour)}  {finding.name}: {finding.value}{remedy}")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.level == "fail" for finding in findings):
        raise SystemExit(1)
