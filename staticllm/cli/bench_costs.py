"""Prints how far the costs that plans are made with are from timed calls, for ``staticllm bench --costs``."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.options import read_properties
from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.diagnostics.costs import CostComparison

IDLE_SECONDS = 120.0


def report_costs(model: str, options: dict[str, Any]) -> None:
    """Load a model, let its engine rest until it has measured costs, and print a table of planned and timed costs."""
    with progress("loading") as shown:
        from staticllm.pipelines.diagnostics.costs import compare_costs, wait_for_costs
        from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        with StaticLLMPipeline(
            Path(model), options["device"], config=read_properties(options), on_progress=shown
        ) as pipe:
            pipe.wait_until_complete()
            is_complete = wait_for_costs(
                pipe.engine, IDLE_SECONDS, lambda *done: shown.show("measuring costs while idle", *done)
            )
            found = compare_costs(pipe.engine, lambda *done: shown.show("timing calls", *done))
    if options["as_json"] or options["output"] == "json":
        click.echo(json.dumps([{**asdict(each), "error": each.error} for each in found], indent=2))
    else:
        click.echo(_table(found))
        if not is_complete:
            click.echo(f"some costs were not measured within {IDLE_SECONDS:g} s")


def _table(found: list[CostComparison]) -> str:
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
