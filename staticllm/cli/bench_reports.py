"""Prints the reports of ``staticllm bench`` that are not speeds: costs, settings, divergence, and the time of nodes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from staticllm.cli.options import read_config, read_properties
from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.costs import CostComparison
    from staticllm.pipelines.diagnostics.reports import CallProfile, ChosenSettings, Divergence, ProbeTimes
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.pipelines.programs.bind import BoundPrograms

IDLE_SECONDS = 120.0
PROFILED_PROMPTS = (128, 512, 1000)


def report_costs(model: str, options: dict[str, Any]) -> None:
    """Load a model, let its engine rest until it has measured costs, and print a table of planned and timed costs."""
    with progress("loading") as shown:
        from staticllm.pipelines.diagnostics.costs import compare_costs, wait_for_costs
        from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        with StaticLLMPipeline(
            Path(model), options["device"], config=read_properties(options), on_progress=shown
        ) as pipe:
            pipe.wait_until_complete()
            num_kept = len(pipe.engine.runner.costs.adopted)
            is_complete = wait_for_costs(
                pipe.engine, IDLE_SECONDS, lambda *done: shown.show("measuring costs while idle", *done)
            )
            found = compare_costs(pipe.engine, lambda *done: shown.show("timing calls", *done))
    if _is_json(options):
        click.echo(json.dumps([{**asdict(each), "error": each.error} for each in found], indent=2))
    else:
        click.echo(_costs(found))
        if num_kept:
            click.echo(f"{num_kept} costs were kept by an earlier start; some of them were measured again")
        if not is_complete:
            click.echo(f"some costs were not measured within {IDLE_SECONDS:g} s")


def report_divergence(model: str, options: dict[str, Any]) -> None:
    """Print how far the model diverges from the original in f32 with each setting of this processor."""
    with progress("writing texts with the original in f32") as shown:
        from staticllm.pipelines.diagnostics.divergence import MOST_DIVERGENCE, measure_divergence

        found = list(
            measure_divergence(
                model,
                options["device"],
                read_config(options),
                lambda *done: shown.show("measuring the divergence of settings", *done),
            )
        )
    if _is_json(options):
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        click.echo(_divergences(found, MOST_DIVERGENCE))


def report_nodes(model: str, options: dict[str, Any]) -> None:
    """Print which kinds of nodes the time of a decode step and of prompts goes to."""
    with progress("lowering the model") as shown:
        from staticllm.pipelines.diagnostics.node_profile import decode_step, profile_calls, prompt_of

        found = list(
            profile_calls(
                model,
                options["device"],
                read_config(options),
                [decode_step, *(prompt_of(count) for count in PROFILED_PROMPTS)],
                lambda *done: shown.show("profiling calls", *done),
            )
        )
    if _is_json(options):
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
    else:
        click.echo("\n\n".join(_nodes(each) for each in found))


def report_calibration(model: str, options: dict[str, Any]) -> None:
    """Load a model, print the settings of its programs, and time the settings among which the calibration chooses."""
    with progress("loading") as shown:
        from staticllm.pipelines.diagnostics.settings import probe_times
        from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        with StaticLLMPipeline(
            Path(model), options["device"], config=read_properties(options), on_progress=shown
        ) as pipe:
            pipe.wait_until_complete()
            chosen = settings_of(pipe)
        shown.show("timing settings")
        times = list(probe_times(model, options["device"], read_config(options)))
    if _is_json(options):
        click.echo(json.dumps({"chosen": list(map(asdict, chosen)), "probe": list(map(asdict, times))}, indent=2))
    else:
        click.echo("\n".join([*settings_lines(chosen), "", _probe(times)]))


def settings_of(pipe: StaticLLMPipeline) -> list[ChosenSettings]:
    """Return the settings of each program of a pipeline."""
    from staticllm.pipelines.diagnostics.settings import chosen_settings

    return chosen_settings(cast("BoundPrograms", pipe.engine.runner.programs))


def settings_lines(chosen: Sequence[ChosenSettings]) -> list[str]:
    """Return a line for each program: its calls and its settings."""
    return [f"settings for {_calls(each)}: {each.settings}" for each in chosen]


def _calls(chosen: ChosenSettings) -> str:
    rows = f"{chosen.least_rows} to {chosen.most_rows} rows"
    rows = "1 row" if chosen.most_rows == 1 else rows
    names = {"generate": "decode steps", "prefill": "prompts"}
    return f"{' and '.join(names[phase] for phase in chosen.phases)} of {rows}"


def _is_json(options: dict[str, Any]) -> bool:
    return bool(options["as_json"] or options["output"] == "json")


def _costs(found: list[CostComparison]) -> str:
    lines = ["| call | planned, ms | timed, ms | error |", "|---|---|---|---|"]
    lines += [
        f"| {each.variant}{' (estimate)' if each.is_estimate else ''} | {each.planned_ms:.1f} | {each.timed_ms:.1f} "
        f"| {each.error:+.0%} |"
        for each in found
    ]
    errors = sorted(abs(each.error) for each in found)
    lines.append("")
    lines.append(
        f"errors of {len(found)} costs: median {statistics.median(errors):.1%}, 90 % below "
        f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.1%}"
    )
    return "\n".join(lines)


def _divergences(found: list[Divergence], limit: float) -> str:
    lines = ["| settings | chosen for | mean KL | largest | same top token | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {each.settings} | {', '.join(each.chosen_for)} | {each.mean:.1e} ± {each.error:.0e} | {each.largest:.1e} "
        f"| {each.agreement:.1%} | {'' if each.is_within else 'above the limit'} |"
        for each in found
    ]
    lines.append("")
    lines.append(
        f"divergence from the original in f32, nats per token, over {found[0].tokens} tokens; limit {limit:.0e}"
    )
    return "\n".join(lines)


def _nodes(profile: CallProfile) -> str:
    lines = [f"| {profile.variant}, {profile.settings} | nodes | ms | share | types |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.kind} | {each.count} | {each.ms:.2f} | {each.share:.1%} | {', '.join(each.types)} |"
        for each in profile.nodes
    ]
    return "\n".join([*lines, f"| all | {sum(each.count for each in profile.nodes)} | {profile.ms:.2f} | | |"])


def _probe(times: list[ProbeTimes]) -> str:
    if not times:
        return "no settings to choose from: the device is not a CPU, or no shape of compressed matrices occurs twice"
    header = "| rows | " + " | ".join(times[0].ms) + " |"
    lines = [header, "|" + "---|" * (1 + len(times[0].ms))]
    lines += [f"| {each.rows} | " + " | ".join(f"{ms:.2f}" for ms in each.ms.values()) + " |" for each in times]
    return "\n".join([*lines, "", "ms of one product with each shape of matrix, weights not in a cache"])
