"""``staticllm run`` answers a prompt or stdin, or opens a chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.client.remote_run import check_options
from staticllm.cli.client.remote_run import run as run_there
from staticllm.cli.client.server_client import api_key_option, server_option
from staticllm.cli.options import (
    MODEL_HELP,
    PROGRAM_GROUP,
    Number,
    Whole,
    as_text,
    check_output,
    layout_options,
    profiling,
    read_properties,
    read_text,
)
from staticllm.cli.progress import Progress, progress
from staticllm.cli.usage.grouped_command import GroupedCommand
from staticllm.cli.usage.model_arguments import model_and_prompt, model_directory, served_name
from staticllm.errors import PromptError

if TYPE_CHECKING:
    from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
    from staticllm.results import DecodedResults, GeneratedText


GROUPS = {
    "Sampling": ("temperature", "top_p", "top_k", "seed"),
    "Output": ("stats", "as_json", "profile"),
    "A model of a server": ("server", "api_key"),
    **PROGRAM_GROUP,
}


@click.command("run", cls=GroupedCommand, groups=GROUPS)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [PROMPT]")
@click.option("-m", "--model", type=click.Path(), help=MODEL_HELP + " With --server, a name.")
@server_option
@api_key_option
@click.option("-n", "--max-new-tokens", type=Whole(1), default=256, show_default=True,
              help="Longest answer, in tokens.")  # fmt: skip
@click.option("--system", default="", help="System message.")
@click.option("--temperature", type=Number(0, 1e6), help="Sample at this temperature; greedy without it.")
@click.option("--top-p", type=Number(0, 1, min_open=True), help="Sample from the smallest set with this probability.")
@click.option("--top-k", type=Whole(0), help="Sample from this many tokens.")
@click.option("--seed", type=Whole(0), help="Seed for sampling.")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option("--stats", is_flag=True, help="Print timings to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a stream.")
@click.option(
    "--profile", type=click.Path(), help="Write a Chrome trace (ui.perfetto.dev); print where a token's time goes."
)
@layout_options
def command(
    arguments: tuple[str, ...], model: str | None, server: str | None, api_key: str | None, **options: Any
) -> None:
    """Generate text with MODEL: for PROMPT, for stdin if it is piped, else in a chat.

    A single argument is the model if it is a path, or looks like one, and else the prompt of the embedded demo model.

    In a chat, Ctrl-C stops the answer, and a second Ctrl-C leaves; /help lists the commands. With --server, a model of that
    server answers.
    """
    given = model_and_prompt(arguments, model)
    directory = model_directory(given.model, given.hint) if server is None else ""  # before stdin, which may wait
    prompt = _prompt(given.prompt)
    options["system"] = as_text(options["system"], "--system")
    if options["raw"] and (prompt is None or options["system"]):
        raise click.UsageError("--raw goes with a prompt and without --system: a chat needs the template")
    if prompt is None and options["as_json"]:
        raise click.UsageError("--json goes with a prompt: a chat prints text")
    if server is not None:
        check_options(click.get_current_context())
        run_there(server, api_key, served_name(given.model), prompt, options)
        return
    if api_key is not None:
        raise click.UsageError("--api-key goes with --server")
    if options["profile"] is not None:
        check_output(options["profile"])
    pipe = _load(directory, options)
    with profiling(pipe, options["profile"]):
        if prompt is None:
            from staticllm.cli.chat import Chat

            Chat(pipe, _generation(options), options["stats"], options["system"]).run()
        else:
            _answer(pipe, prompt, _generation(options), options)


def _prompt(argument: str | None) -> str | None:
    """Return the argument, or the text that is piped into stdin; None for a chat."""
    if argument is None and sys.stdin is None:
        raise click.UsageError("standard input is closed and there is no PROMPT: give one")
    if argument is None and sys.stdin.isatty():
        return None
    text = read_text(sys.stdin) if argument is None else as_text(argument, "the prompt")
    if not text:
        what = "the prompt is empty" if argument is not None else "standard input is empty, and there is no PROMPT"
        raise PromptError(f"{what}: give at least one character")
    return text


def _load(model: str, options: dict[str, Any]) -> StaticLLMPipeline:
    with progress("loading") as shown:
        from staticllm.pipelines.llm_pipeline import StaticLLMPipeline

        return StaticLLMPipeline(model, options["device"], config=read_properties(options), on_progress=shown)


def _generation(options: dict[str, Any]) -> dict[str, Any]:
    chosen = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "rng_seed"}
    generation = {name: options[key] for key, name in chosen.items() if options[key] is not None}
    if generation.get("temperature") == 0:  # as everywhere else: greedy
        generation = {}
    if generation:
        generation["do_sample"] = True
    return {**generation, "max_new_tokens": options["max_new_tokens"], "apply_chat_template": not options["raw"]}


def _answer(pipe: StaticLLMPipeline, prompt: str, generation: dict[str, Any], options: dict[str, Any]) -> None:
    if options["system"]:
        pipe.start_chat(options["system"])
    with progress("running the prompt") as waiting:
        result = pipe.generate(prompt, generation, None if options["as_json"] else shown_after(waiting))
    if options["as_json"]:
        click.echo(json.dumps({"text": str(result), "finish_reason": str(result.finish_reasons[0]), **_stats(result)}))
        return
    click.echo()
    if options["stats"]:
        print_stats(result)


def show(piece: str) -> None:
    """Print a piece of an answer and flush it."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def shown_after(waiting: Progress) -> Callable[[str], None]:
    """Return a streamer that removes the progress bar at the first token, and prints the answer."""

    def write(piece: str) -> None:
        waiting.close()
        show(piece)

    return write


def _stats(result: GeneratedText | DecodedResults) -> dict[str, float]:
    metrics = result.perf_metrics
    return {
        "prompt_tokens": metrics.get_num_input_tokens(),
        "cached_tokens": metrics.get_num_cached_tokens(),
        "generated_tokens": metrics.get_num_generated_tokens(),
        "ttft_ms": round(metrics.get_ttft().mean, 3),
        "tpot_ms": round(metrics.get_tpot().mean, 3),
        "tokens_per_second": round(metrics.get_throughput().mean, 1),
        "load_ms": round(metrics.get_load_time(), 1),
    }


def print_stats(result: GeneratedText | DecodedResults) -> None:
    """Print the tokens and timings of an answer as one line on stderr."""
    s = _stats(result)
    tpot = f"TPOT {s['tpot_ms']:.2f} ms ({s['tokens_per_second']:.0f} tokens/s)" if s["tpot_ms"] >= 0 else "TPOT -"
    click.echo(
        f"{s['prompt_tokens']} prompt tokens ({s['cached_tokens']} cached), {s['generated_tokens']} generated "
        f"({result.finish_reasons[0]}) | TTFT {s['ttft_ms']:.1f} ms | {tpot} | load {s['load_ms'] / 1e3:.2f} s",
        err=True,
    )
