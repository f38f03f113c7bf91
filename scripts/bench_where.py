"""Divides the time of prompts and decode steps: the nodes that the device runs, the rest of its calls, and the host.

    python scripts/bench_where.py MODEL                        # prompts of 128 and 512 tokens, 32 decode steps after 128
    python scripts/bench_where.py MODEL --n-turn 30 -d 512     # a later turn of 30 tokens
    python scripts/bench_where.py MODEL --nodes                # only our nodes, of a decode step and of prompts

GenAI's pipeline runs the same prompts beside ours, if it loads the model. ``docs/lab/benchmarks.md`` says how parts are measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import click
from bench_where_genai import DEVICE, GenaiCalls
from bench_where_nodes import CallProfile, decode_step, profile_calls, prompt_of
from bench_where_ours import StaticCalls
from bench_where_parts import Divisible, divide, parts_tables
from click.core import ParameterSource

from staticllm.cli.bench import IDLE_SECONDS, SHORT_PROMPT, Counts, Report, Test, checked_properties, loaded
from staticllm.cli.options import flag, layout_options, model_argument, read_config, refuse, value
from staticllm.cli.progress import progress
from staticllm.errors import ModelError, StaticLLMError, last_line
from staticllm.model_files.model_at import check_model_dir
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.system.table import markdown

PROFILED_PROMPTS = (128, 512, 1000)
OF_REQUESTS = ("n_prompt", "n_gen", "n_depth", "n_turn", "repetitions")


@dataclass(frozen=True)
class Request:
    """A request whose time is divided: ``flag`` asks for it, and a turn follows ``past`` tokens and one of their answer."""

    flag: str
    prompt: int
    new: int
    past: int = 0

    @property
    def test(self) -> Test:
        """The test of ``staticllm bench`` that is as long."""
        return Test("", self.flag, self.past + 1 + self.prompt if self.past else self.prompt, self.new)


def report_where(model: str, options: dict[str, Any]) -> Report:
    """Divide the time of prompts and of decode steps: nodes, the rest of calls, host; beside GenAI's, if that loads the model."""
    requests = requests_of(options)
    lengths = checked_properties(options, [each.test for each in requests])
    properties = {**lengths, "PREFIX_CACHING": any(each.past for each in requests)}
    new_tokens = dict[tuple[int, int], int]()
    for each in requests:
        new_tokens[each.past, each.prompt] = max(each.new, new_tokens.get((each.past, each.prompt), 0))
    with progress("loading") as shown, loaded(model, options, shown, **properties) as pipe:
        ours = StaticCalls(pipe, model, IDLE_SECONDS, lambda *done: shown.show("measuring costs while idle", *done))
        theirs, reason = genai_calls(model, pipe)
        pipelines: list[Divisible] = [ours, *theirs]
        parts = [
            each
            for (past, count), new in sorted(new_tokens.items())
            for each in divide(
                pipelines,
                count,
                new,
                options["repetitions"],
                partial(shown.show, f"measuring {'turns' if past else 'prompts'} of {count} tokens"),
                past,
            )
        ]
    wanted = {(each.past, each.prompt, each.new > 1) for each in requests}
    parts = [each for each in parts if (each.past_len, each.prompt_len, each.phase == "decode") in wanted]
    values = {"parts": [each.as_dict() for each in parts], "without_genai": reason}
    return Report(values, [*parts_tables(parts), *([f"GenAI is not shown: {reason}"] if reason else [])])


def genai_calls(model: str, pipe: StaticLLMPipeline) -> tuple[list[GenaiCalls], str]:
    """Return GenAI's pipeline on the same model with the same properties of the device, or nothing and why."""
    if pipe.device != DEVICE:
        return [], f"it is compared on {DEVICE} only, this is {pipe.device}"
    kv_type = pipe.config.kv_cache_precision
    properties = {**pipe.config.device_properties, **({} if kv_type is None else {"KV_CACHE_PRECISION": kv_type})}
    try:
        return [GenaiCalls(check_model_dir(model), properties)], ""
    except (RuntimeError, ModelError) as error:
        return [], last_line(error)


def requests_of(options: dict[str, Any]) -> list[Request]:
    """Return the prompts and the depths of decode steps that are asked for, or the usual ones; or the turns."""
    source = click.get_current_context().get_parameter_source
    if any(options["n_turn"]):
        given = (options[name] for name in ("n_prompt", "n_gen") if source(name) is not ParameterSource.DEFAULT)
        if any(map(any, given)):
            raise click.UsageError(
                "--n-turn caches prefixes, and without it nothing does: leave --n-prompt and -n out, or measure them apart"
            )
        if not all(options["n_depth"]):
            raise click.UsageError("--n-turn follows the tokens of -d: give -d a number above 0")
        turns = [count for count in options["n_turn"] if count]
        return [Request("--n-turn", count, 1, depth) for depth, count in product(options["n_depth"], turns)]
    if len(options["n_gen"]) > 1:
        raise click.UsageError("one number of decode steps is divided: give -n one")
    found = [Request("--n-prompt", count, 1) for count in options["n_prompt"] if count]
    for depth, count in product(options["n_depth"], filter(None, options["n_gen"])):
        found.append(Request("--n-depth" if depth else "--n-gen", depth or SHORT_PROMPT, count + 1))
    if not found:
        raise click.UsageError("nothing to measure: give --n-prompt, -n or --n-turn a number above 0")
    return found


def report_nodes(model: str, options: dict[str, Any]) -> Report:
    """Divide the time of a decode step and of prompts among the kinds of nodes."""
    refuse(OF_REQUESTS, "is for requests, and --nodes profiles calls instead")
    with progress("lowering the model") as shown:
        calls = [decode_step, *(prompt_of(count) for count in PROFILED_PROMPTS)]
        config = read_config(options)
        found = list(
            profile_calls(model, options["device"], config, calls, lambda *done: shown.show("profiling calls", *done))
        )
    return Report([asdict(each) for each in found], "\n\n".join(map(nodes_text, found)).splitlines())


def nodes_text(profile: CallProfile) -> str:
    """Return the table of a call."""
    rows = [
        [each.kind, str(each.count), f"{each.ms:.2f}", f"{each.share:.1%}", ", ".join(each.types)]
        for each in profile.nodes
    ]
    total = ["all", str(sum(each.count for each in profile.nodes)), f"{profile.ms:.2f}", "", ""]
    return "\n".join(
        markdown([f"{profile.variant}, {profile.settings}", "nodes", "ms", "share", "types"], [*rows, total])
    )


@click.command()
@model_argument
@value("--n-prompt", Counts(), "Tokens per prompt; 0 skips this test.", "128,512")
@value("-n --n-gen", Counts(), "Decode steps; 0 skips this test.", "32")
@value("-d --n-depth", Counts(), "Tokens before the decode steps, or before a turn.", "128")
@value("--n-turn", Counts(), "Only a later turn of so many tokens, after those of -d and an answer.", "0")
@value("-r --repetitions", click.IntRange(1), "Runs, after a warm-up.", 5)
@flag("--nodes is_nodes", "Only divide the time of calls among the kinds of nodes that the device runs.")
@flag("--json as_json", "Print JSON.")
@layout_options
def command(model: str, is_nodes: bool, as_json: bool, **options: Any) -> None:
    """Divide the time of MODEL, or of the embedded demo model."""
    report = (report_nodes if is_nodes else report_where)(model, options)
    click.echo(json.dumps(report.values, indent=2) if as_json else "\n".join(report.lines))


if __name__ == "__main__":
    try:
        command()
    except StaticLLMError as error:
        sys.exit(f"Error: {error}")
