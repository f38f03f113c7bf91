"""``staticllm trace`` records every device call while requests are served, for Perfetto."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.grouped_command import GroupedCommand
from staticllm.cli.options import (
    PROGRAM_GROUP,
    TOKEN_IDS,
    Number,
    check_lengths,
    check_output,
    flag,
    layout_options,
    model_option,
    read_properties,
    value,
    with_properties,
)
from staticllm.cli.progress import Progress, progress
from staticllm.config import StaticLLMConfig
from staticllm.pipelines.scheduling.policies import policy_names

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.pipelines.profiling.stats import Stats


@click.group("trace")
def command() -> None:
    """Record which requests ran in which device call."""


@command.command("record", cls=GroupedCommand, groups=PROGRAM_GROUP)
@click.option("-o", "--output", type=click.Path(), required=True, help="File to write, Chrome trace JSON.")
@model_option
@value("--requests", click.IntRange(1), "Number of requests.", 16)
@value("--prompt-len", click.IntRange(1), "Random tokens per prompt.", 128)
@value("--new-tokens", click.IntRange(1), "Tokens per answer.", 32)
@value("--rate", Number(0, 1e9, min_open=True), "Requests per second, Poisson.  [all at once]")
@value("--scheduler", click.Choice(policy_names()), "Policy.  [dynamic]")
@flag("--json as_json", "Print one JSON object.")
@layout_options
def record(output: str, model: str, as_json: bool, **options: Any) -> None:
    """Serve random prompts and write a Chrome trace.

    Perfetto (ui.perfetto.dev) and chrome://tracing show it.
    """
    check_output(output)
    properties = _properties(options)
    check_lengths("--prompt-len and --new-tokens", options["prompt_len"], options["new_tokens"], properties)
    with progress("loading") as shown:
        from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        with StaticLLMPipeline(model, options["device"], config=properties, on_progress=shown) as pipe:
            with pipe.record() as trace:
                _serve(pipe, options, shown)
            trace.save(output)
            stats = pipe.stats()
    if as_json:
        counts = {"trace": output, "device_calls": len(trace.steps), "requests_ended": len(trace.requests)}
        click.echo(json.dumps({**counts, **asdict(stats)}, indent=2))
        return
    click.echo(_summary(stats))
    click.echo(f"{len(trace.steps)} device calls, {len(trace.requests)} requests in {output}")


def _properties(options: dict[str, Any]) -> dict[str, Any]:
    """Return the user's properties; lengths and a queue that the user does not set are large enough for the requests."""
    default = StaticLLMConfig()
    properties = {
        "MAX_PROMPT_LEN": max(default.max_prompt_len, options["prompt_len"]),
        "MIN_RESPONSE_LEN": max(default.min_response_len, options["new_tokens"]),
        "MAX_WAITING": max(default.max_waiting, options["requests"]),
        **read_properties(options),
    }
    if options["scheduler"] is not None:
        own = {"SCHEDULER": options["scheduler"]}
        properties |= with_properties(own, {"scheduler": "SCHEDULER"}, options["properties"])
    return properties


def _serve(pipe: StaticLLMPipeline, options: dict[str, Any], shown: Progress) -> None:
    """Submit random prompts at their times and wait for all answers."""
    count, num_prompt, num_new, rate = (options[name] for name in ("requests", "prompt_len", "new_tokens", "rate"))
    import numpy as np

    rng = np.random.default_rng([num_prompt, num_new])
    due = np.cumsum(rng.exponential(1 / rate, count)) if rate else np.zeros(count)
    start = time.perf_counter()
    handles = []
    for moment in due:
        time.sleep(max(0.0, start + moment - time.perf_counter()))
        prompt = rng.integers(*TOKEN_IDS, num_prompt)
        handles.append(pipe.submit(prompt, max_new_tokens=num_new, ignore_eos=True))
    for number, handle in enumerate(handles):
        shown.show("serving requests", number, count)
        handle.output()


def _summary(stats: Stats) -> str:
    return "\n".join(
        [
            f"requests  {stats.num_requests}, {stats.num_tokens} tokens in {stats.num_steps} steps",
            f"TTFT      {stats.ttft_ms:.1f} ms, p95 {stats.ttft_p95_ms:.1f} ms; {stats.queueing_ms:.1f} ms queued",
            f"TPOT      {stats.tpot_ms:.2f} ms, longest gap {stats.longest_gap_ms:.1f} ms",
            f"device    {stats.device_seconds:.2f} s: prefill {stats.prefill_share:.0%}, decode {stats.decode_share:.0%}",
            f"rows      {stats.padding:.0%} are padding; at most {stats.peak_slots_in_use} KV slots in use",
        ]
    )
