"""``staticllm inspect``, ``plan``, ``verify`` and ``doctor``: what is known of a model of any kind, and of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.model_arguments import one_model
from staticllm.cli.npu_platform import check_platform, npu_target, platform_options
from staticllm.cli.options import (
    DEVICE_HELP,
    PROGRAM_GROUP,
    flag,
    layout_options,
    model_argument,
    read_properties,
    refuse,
    value,
)
from staticllm.cli.plan_embed import EMBED_GROUP, embed_options
from staticllm.cli.progress import Progress, progress
from staticllm.core import ProgramMode
from staticllm.errors import ConfigError
from staticllm.model_paths.arguments import expanded

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.reports import MemoryEstimate
    from staticllm.pipelines.loading.npu_target import CompiledForNPU

MODES: dict[str, tuple[ProgramMode, ...]] = {
    "both": ("separate", "shared"),
    "separate": ("separate",),
    "shared": ("shared",),
}
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("inspect", cls=GroupedCommand, groups=PROGRAM_GROUP)
@model_argument
@platform_options
@value(
    "--trace",
    click.Path(),
    "With --platform: a new folder for the parts' schedules, which https://ui.perfetto.dev opens.",
)
@flag("--json as_json", "Print one JSON object.")
@layout_options
def inspect(model: str, platform: str | None, compiler: str, trace: str | None, as_json: bool, **options: Any) -> None:
    """Show states, masks, passes, variants and bytes of MODEL (the demo model without it). Nothing is compiled for the device.

    Of an encoder: its output, masks, positions and pooling, and whether texts can share a sequence.
    With --device NPU --platform, the programs are compiled for an NPU elsewhere, and the compiler's schedule is shown: how they
    were divided, and the microseconds of each part, kind of layer and engine.
    """
    check_platform(platform, options["device"])
    if trace is not None and platform is None:
        raise ConfigError(
            "--trace writes schedules of the NPU compiler: add --device NPU --platform P, or leave it out"
        )
    parts: list[CompiledForNPU] = []
    with progress("lowering the model") as shown, npu_target(platform, compiler, parts.append) as elsewhere:
        from staticllm.devices import check_known
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of, jobs_in
        from staticllm.pipelines.diagnostics.npu_traces import check_new_folder, write_traces

        folder = None if trace is None else check_new_folder(Path(expanded(trace)))
        jobs = jobs_in(model, options["device"], read_properties(options), shown, check_known)
        reports: dict[str, Any] = {}
        for name, here in jobs.items():
            diagnosis = diagnosis_of(here.kind.name)
            job = replace(here, target=elsewhere)
            reports[name] = diagnosis.report(job) if elsewhere is None else diagnosis.report_on_npu(job)
        if folder is not None:
            write_traces(parts, folder)
    _print(reports, as_json)


@click.command("plan", cls=GroupedCommand, groups={**PROGRAM_GROUP, **EMBED_GROUP})
@embed_options
@model_argument
@flag("--measured", "Load the model and measure where its memory goes.")
@platform_options
@flag("--json as_json", "Print one JSON object.")
@layout_options
def plan(model: str, measured: bool, platform: str | None, compiler: str, as_json: bool, **options: Any) -> None:
    """Estimate the bytes of weights, KV slots and buffers of MODEL, and check whether they fit. Nothing is compiled.

    Exit with code 1 if they do not fit. With --measured, load MODEL in a process of its own instead, run its longest prompt and
    some decode steps, and print the private memory of each part and after each stage. Of an encoder, the milliseconds of each
    call are printed too: those that CACHE_DIR keeps, or measured ones.
    With --device NPU --platform, the programs are compiled for an NPU elsewhere, and the compiler's schedule predicts TTFT and
    TPOT.
    --embed estimates by WINDVE's cost model how many machines embed a load, without and with their CPUs. With --measured, it
    measures how many queries at once MODEL embeds within --limit-s on each of several devices, for example --device NPU,CPU.
    """
    check_platform(platform, options["device"])
    if platform is not None and measured:
        raise ConfigError("--measured runs the model, and the NPU of --platform is elsewhere: leave one of them out")
    text = "loading and measuring the model" if measured else "lowering the model"
    with progress(text) as shown, npu_target(platform, compiler) as elsewhere:
        from staticllm.devices import check_device, check_known
        from staticllm.pipelines.diagnostics.kinds import diagnosis_of, jobs_in

        check = check_device if measured else check_known
        on_progress = (lambda event: None) if elsewhere is None else shown
        found: dict[str, Any] = {}
        for name, here in jobs_in(model, options["device"], read_properties(options), on_progress, check).items():
            diagnosis = diagnosis_of(here.kind.name)
            job = replace(here, target=elsewhere)
            if measured:
                found[name] = diagnosis.measure(job)
            else:
                found[name] = diagnosis.estimate(job) if elsewhere is None else diagnosis.estimate_on_npu(job)
    _print(found, as_json)
    if not measured and not _fit(list(found.values())):
        raise SystemExit(1)


def _fit(estimates: list[MemoryEstimate]) -> bool:
    """Return whether all parts of a model fit into the device together, as far as its memory is known."""
    available = [each.available for each in estimates if each.available is not None]
    return not available or sum(each.needed for each in estimates) <= min(available)


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
    packed into the same calls. With the package tokenizers, texts get the ids of tokenizer.json. Exit with code 1 if anything
    differs.

    With --precision f16, print how far a decoder's probabilities in f16 diverge from those in f32 (KL), over texts that it writes
    itself: on --device if it computes f16, else emulated on the CPU with the programs of that device, which need not be here.
    """
    if precision == "f16":
        refuse(("programs",), "is for --precision f32, and f16 is compared with the programs of the device")
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
    from staticllm.pipelines.diagnostics.kinds import job_in, jobs_in, verdicts_of

    if precision == "f16":
        from staticllm.pipelines.diagnostics.half_divergence import measure_f16

        yield from measure_f16(job_in(model, device, {}, shown, check_known))
        return
    yield from verdicts_of(jobs_in(model, device, {}, shown, check_device), MODES[programs])


def _print(reports: Mapping[str, Any], as_json: bool) -> None:
    """Print the reports on a model: one without a name, or one for each of its parts."""
    if as_json:
        found = {name: report.as_dict() for name, report in reports.items()}
        click.echo(json.dumps(found.get("", found), indent=2))
        return
    for name, report in reports.items():
        click.echo("\n".join([*([f"== {name}"] if name else []), *report.lines()]))


@click.command("doctor")
@value("--device devices", None, "Devices for the self-test.  [all]", multiple=True)
@click.argument("model", type=click.Path(), required=False)
@value("-m --model named", click.Path(), "The same as MODEL.")
@value("--cache-dir", click.Path(), "A cache folder whose sets are verified.")
@value("--platform", str, "An NPU elsewhere for which the weights of MODEL are examined: 3720, 4000 or 5010.")
@flag("--json as_json", "Print JSON.")
def doctor(
    devices: tuple[str, ...],
    model: str | None,
    named: str | None,
    cache_dir: str | None,
    platform: str | None,
    as_json: bool,
) -> None:
    """Check packages, devices, memory and a cache, load MODEL, and run the embedded model. Exit with code 1 if a check fails.

    MODEL is compiled with short lengths and runs a chat turn, a text or pairs, on the first --device, else on the CPU. With
    --cache-dir, its weights are compared with those that the sets in the cache were compiled from. With --device NPU, --platform
    or an NPU on this machine, it is said whether its weights suit one.
    """
    model = one_model(model, named)
    if platform is not None:
        from staticllm.compiler_passes.compiling.npu_platform import platform_of

        platform_of(platform)
        if model is None:
            raise ConfigError(f"--platform {platform} examines the weights of a model: give MODEL, or leave it out")
    findings = []
    with progress("examining") as shown:
        from staticllm.pipelines.diagnostics.doctor import examine

        for finding in examine(devices, cache_dir, model, shown, platform):
            findings.append(finding)
            if not as_json:
                mark, colour = MARKS[finding.level]
                remedy = f"\n      {finding.remedy}" if finding.remedy else ""
                shown.write(f"{click.style(mark, fg=colour)}  {finding.name}: {finding.value}{remedy}")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.level == "fail" for finding in findings):
        raise SystemExit(1)
